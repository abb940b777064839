"""The gate on compression error, and everything that is told of it: Markdown, JSON, figure, section, sentence."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from compression_tables import META, SITES, changed, compression, compression_table

from lens_geometry.compression_gate import judge, measured, worst_layers
from lens_geometry.compression_json import report_json, write_json
from lens_geometry.compression_markdown import LIMIT, code, plain, summary_markdown
from lens_geometry.compression_plots import compression_figure
from lens_geometry.compression_sections import compression_section
from lens_geometry.compression_summaries import compression_summary, models_summary, verdict_summary
from lens_geometry.errors import DataError, ResultError
from lens_geometry.findings import findings
from lens_geometry.report import write_report

WORST = 0.96 * 0.30 * (1 + 5 / 6)  # attn of the last layer, local


def at(site="attn", layer=5, mode="local", metric="perpendicular_error"):
    return {"mode": mode, "site": site, "layer": layer, "head": None, "metric": metric}


LOSS = at("", None, "propagated", "loss_change")


# ---- the gate ----------------------------------------------------------------------------------------------


def test_a_bound_is_kept_at_the_number_itself_and_broken_just_below_it():
    table = compression_table()
    assert judge(table, max_perpendicular=WORST).passed
    verdict = judge(table, max_perpendicular=WORST - 1e-9)
    assert [(o.site, o.layer, o.mode, o.metric) for o in verdict.offending] == [
        ("attn", 5, "local", "perpendicular_error")
    ]
    assert verdict.offending[0].value == pytest.approx(WORST)
    assert (verdict.checked, verdict.sites, verdict.mode) == (24, SITES, "local")
    assert judge(table, max_loss_change=0.12).passed
    (loss,) = judge(table, max_loss_change=0.1199).offending
    assert (loss.layer, loss.site, loss.value, loss.bound) == (None, "", 0.12, 0.1199)


def test_offending_layers_are_named_with_value_and_bound_the_furthest_first():
    verdict = judge(compression_table(), 0.43, 0.1)
    assert [offence.words for offence in verdict.offending] == [
        "attn, layer 5 (local): |e_perp|/|u| is 0.5280, bound 0.43",
        "attn, layer 4 (local): |e_perp|/|u| is 0.4800, bound 0.43",
        "whole model: change of loss is +0.1200, bound +0.1",
        "value, layer 5 (local): |e_perp|/|u| is 0.4400, bound 0.43",
        "attn, layer 3 (local): |e_perp|/|u| is 0.4320, bound 0.43",
    ]


def test_the_mode_is_local_where_it_was_run_and_else_propagated():
    assert judge(compression_table(), 0.6).passed
    assert judge(compression_table(), 0.6, mode="propagated").offending[0].mode == "propagated"
    assert judge(compression_table(modes=("propagated",), layer_losses=True), 0.6).mode == "propagated"


def test_without_bounds_nothing_is_decided():
    verdict = judge(compression_table())
    assert (verdict.passed, verdict.word, verdict.checked) == (True, "no bounds", 0)
    broken = changed(compression_table(), at(), mean=math.nan)
    assert judge(broken, max_loss_change=1.0).passed  # what is not gated does not count


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gated_number_that_is_not_finite_offends_before_all_others(value):
    table = changed(compression_table(), at("mlp", 2), mean=value)
    first, *others = judge(table, 0.5).offending
    assert (first.site, first.layer) == ("mlp", 2)
    assert "is not finite" in first.words
    assert [other.site for other in others] == ["attn"]
    (loss,) = judge(changed(compression_table(), LOSS, mean=value), max_loss_change=10).offending
    assert "change of loss is not finite" in loss.words


def test_an_error_that_is_infinite_for_a_token_is_over_every_bound():
    table = changed(compression_table(), at("mlp", 2), n_infinite=3)
    (offence,) = judge(table, 100).offending
    assert offence.words == (
        "mlp, layer 2 (local): |e_perp|/|u| is 0.2560 (is infinite for 3 of 1,019 tokens), bound 100"
    )
    assert judge(changed(compression_table(), at("mlp", 2), n_undefined=3), 100).passed


@pytest.mark.parametrize("heads", [0, 1])
def test_single_heads_and_means_over_layers_are_not_gated(heads):
    table = changed(compression_table(), {**at("value", 1), "head": heads}, mean=9.0)
    assert judge(changed(table, at("attn", None), mean=9.0), WORST).passed


def test_a_bound_that_gates_nothing_is_an_error():
    with pytest.raises(ResultError, match="gates nothing.*--gate-mode"):
        judge(compression_table(modes=("propagated",)), 0.3, mode="local")
    with pytest.raises(ResultError, match="gates nothing.*loss was not measured"):
        judge(compression_table(modes=("local",)), max_loss_change=0.3)
    table = compression_table()
    with pytest.raises(ResultError, match="gates nothing"):
        judge(table[table["site"] == ""], 0.3)
    with pytest.raises(ResultError, match="lacks the column n_infinite"):
        judge(table.drop(columns="n_infinite"), 0.3)


@pytest.mark.parametrize(
    ("bounds", "words"), [((-0.1, None), "-0.1"), ((math.nan, None), "nan"), ((None, math.inf), "inf")]
)
def test_a_bound_that_bounds_nothing_is_refused(bounds, words):
    with pytest.raises(DataError, match=words):
        judge(compression_table(), *bounds)


def test_the_worst_layers_are_those_with_the_largest_perpendicular_error():
    table = changed(compression_table(), at("mlp", 1), mean=math.nan)
    assert [layer for layer, _ in worst_layers(table, "local", "mlp")] == [1, 5, 4]
    assert measured(table)[:5] == [("local", site) for site in SITES] + [("propagated", "attn")]


# ---- Markdown ----------------------------------------------------------------------------------------------


def cells(line):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def tables_of(markdown):
    """Every table as its rows of cells."""
    blocks = re.findall(r"(?:^\|.*\n)+", markdown, flags=re.M)
    return [[cells(line) for line in block.splitlines()] for block in blocks]


@pytest.mark.parametrize("layers", [2, 80])
def test_markdown_says_the_verdict_first_and_fits_into_a_comment_at_any_depth(layers):
    result = compression(compression_table(layers))
    verdict = judge(result.table, 0.01, 0.1)
    markdown = summary_markdown([(result, verdict)])
    assert markdown.startswith("**❌ Compression error: failed**: ")
    assert f"{4 * layers + 1:,} of {4 * layers + 1:,} numbers" in markdown.splitlines()[0]
    assert len(markdown) < LIMIT / 3
    assert "More does not fit" not in markdown
    for rows in tables_of(markdown):
        assert {len(row) for row in rows} == {len(rows[0])}
    offending = next(rows for rows in tables_of(markdown) if rows[0][0] == "offending")
    assert len(offending) - 2 == min(4 * layers + 1, 40)
    assert offending[2][0] == f"attn, layer {layers - 1} (local)"
    assert ("and 281 more" in markdown) == (layers == 80)


def test_markdown_has_the_whole_model_with_intervals_and_the_worst_layers_of_each_site():
    result = compression()
    markdown = summary_markdown([(result, judge(result.table, 0.9, 0.2))])
    assert markdown.startswith("**✅ Compression error: passed**: 25 numbers within ")
    whole = dict(row for rows in tables_of(markdown) for row in rows if len(row) == 2)
    assert whole["change of loss (nats per token)"] == "+0.120 [+0.108, +0.132]"
    assert whole["same most likely token"] == "86.0 [77.4, 94.6] %"
    sites = next(rows for rows in tables_of(markdown) if rows[0][0] == "site")
    assert sites[2] == [
        "attn", "local", "0.408 [0.367, 0.449]", "0.119 [0.107, 0.131]", "92.2 [82.9, 101.4] %",
        "5 (0.528), 4 (0.480), 3 (0.432)",
    ]  # fmt: skip
    assert "- site value was left out of layer \\| 3" in markdown


def test_names_can_neither_break_markdown_nor_be_html_nor_call_people():
    name = "a | `b` <img src=x> **bold** @octocat\n# heading"
    result = compression(base={"name": name}, compressed={"name": name}, warnings=[name, "<script>"])
    both = [(result, judge(result.table, 0.01)), (result, judge(result.table))]
    for markdown in (summary_markdown(both[:1]), summary_markdown(both)):
        for rows in tables_of(markdown):
            assert {len(row) for row in rows} == {len(rows[0])}
        bare = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", markdown)  # what stands in no code
        assert set(re.findall(r"<[^>]*>", bare)) <= {"<details>", "</details>", "<summary>", "</summary>"}
        assert "@octocat" not in bare
        assert "**bold**" not in bare
        assert not re.search(r"^# ", markdown, flags=re.M)
    assert code("a`b|", table=True) == "``a`b\\|``"
    assert plain("<a> | @b") == "&lt;a&gt; \\| @\u200bb"


def test_many_models_are_cut_off_at_the_limit_and_the_text_says_so():
    result = compression()
    many = [(result, judge(result.table, 0.01, 0.1))] * 12
    markdown = summary_markdown(many, limit=9000)
    assert 6000 < len(markdown) <= 9000
    assert markdown.startswith("**❌ Compression error: failed**: 12 of 12 models")
    assert markdown.rstrip().endswith("have all of it.*")
    assert len(summary_markdown(many, limit=500)) <= 500
    assert 9000 < len(summary_markdown(many)) <= LIMIT


# ---- JSON --------------------------------------------------------------------------------------------------


def test_json_holds_every_number_of_a_layer_and_no_nan(tmp_path):
    table = changed(compression_table(layer_losses=True), at("mlp", 2), mean=math.nan, ci_low=math.nan)
    result = compression(table, extra=math.inf)
    verdict = judge(table, 0.5, 0.2)
    write_json([(result, verdict)], tmp_path / "report.json")

    def never(name):
        raise AssertionError(name)

    document = json.loads((tmp_path / "report.json").read_text(), parse_constant=never)
    assert document == report_json([(result, verdict)])
    assert (document["format"], document["verdict"], document["gate_mode"]) == (1, "failed", "local")
    assert document["bounds"] == {"perpendicular_error": 0.5, "loss_change": 0.2}
    first, second = document["offending"]
    assert (first["site"], first["layer"], first["value"], first["bound"]) == ("mlp", 2, None, 0.5)
    assert (second["site"], second["layer"], second["compressed"]) == ("attn", 5, META["compressed"]["name"])
    (found,) = document["comparisons"]
    assert found["whole_model"]["kl"]["mean"] == 0.11
    by_place = {(row["mode"], row["site"], row["layer"], row["metric"]): row for row in found["layers"]}
    pooled = table[table["head"].isna() & table["layer"].notna() & (table["mode"] != "weights")]
    assert len(by_place) == len(found["layers"]) == len(pooled)
    assert by_place["local", "attn", 5, "perpendicular_error"]["mean"] == pytest.approx(WORST)
    assert by_place["local", "mlp", 2, "perpendicular_error"]["mean"] is None
    assert by_place["local", "", 3, "loss_change"]["mean"] == pytest.approx(0.03)
    assert found["sites"][0]["over_layers"]["pearson_perpendicular"]["mean"] == 0.999
    assert found["weights"][-1]["layer"] is None
    assert found["meta"]["data"]["tokens_sha256"] == META["data"]["tokens_sha256"]


# ---- what people see ---------------------------------------------------------------------------------------


def drawn_lines(figure, site, role="edit"):
    return [trace for trace in figure.data if trace.meta == {"site": site, "role": role}]


def test_the_figure_has_both_parts_of_every_site_local_beside_propagated():
    figure = compression_figure(compression_table())
    for site in SITES:
        lines = drawn_lines(figure, site)
        assert [line.line.dash for line in lines] == ["solid", "dash"] * 2
        assert len({line.xaxis for line in lines}) == 2
        assert len(drawn_lines(figure, site, "band")) == 4
    line = drawn_lines(figure, "attn")[0]
    assert list(line.x) == list(range(6))
    assert line.y[5] == pytest.approx(WORST)
    band = drawn_lines(figure, "attn", "band")[0]
    assert (max(band.y), min(band.y)) == (pytest.approx(1.1 * WORST), pytest.approx(0.9 * 0.288))
    assert figure.layout.yaxis.range == figure.layout.yaxis2.range
    assert "loss 3.40 → 3.52: +0.120 [+0.108, +0.132] nats" in figure.layout.title.subtitle.text
    assert compression().plot().layout.title.text == "rounded | &lt;b&gt;4 bits&lt;/b&gt; against a model"


def test_an_error_of_zero_ends_at_the_edge_open_and_one_that_is_lost_is_a_cross():
    table = changed(compression_table(), at("mlp", 1), mean=0.0, ci_low=0.0, ci_high=0.0)
    table = changed(table, at("mlp", 3), mean=math.nan, ci_low=math.nan, ci_high=math.nan)
    figure = compression_figure(table)
    line, cross = drawn_lines(figure, "mlp")[:2]
    assert line.marker.symbol[1] == "square-open"
    assert math.log10(line.y[1]) >= figure.layout.yaxis3.range[0]
    assert np.isnan(line.y[3])
    assert np.isfinite(cross.y[3])
    assert cross.marker.symbol == "x-thin"


@pytest.mark.parametrize("modes", [("local",), ("propagated",)])
def test_one_mode_alone_is_drawn_and_told(modes, tmp_path):
    result = compression(compression_table(modes=modes))
    assert len(drawn_lines(result.plot(), "attn")) == 2
    assert f"({modes[0]}, mean over layers)" in findings([result])[0]
    assert compression_summary(result.table).count("attn") == 1
    write_report([result], tmp_path / "report.html")


def test_the_section_has_a_figure_per_site_and_mode_and_the_tables(tmp_path):
    table = changed(compression_table(), at("mlp", 2), n_infinite=3)
    html = "\n".join(compression_section(table, "part0"))
    assert html.count("<figure") == 8
    assert "+0.120<small>[+0.108, +0.132]</small>" in html
    assert "5 (0.528), 4 (0.480), 3 (0.432)" in html
    assert "<td>0.37</td>" in html
    page = write_report([compression(table)], tmp_path / "report.html").read_text()
    assert "Compression error" in page
    assert "is infinite for some tokens" in page
    assert "rounded | &lt;b&gt;4 bits&lt;/b&gt; against a model" in page


def test_the_sentence_is_computed_from_the_table():
    sentence = findings([compression()])[0]
    assert "raises the loss (+0.120 [+0.108, +0.132] nats per token)" in sentence
    assert "92.2 % at attn" in sentence
    assert "largest at attn of layer 5, 0.528 [0.475, 0.581] of the update" in sentence
    better = changed(compression_table(), LOSS, mean=-0.1, ci_low=-0.2, ci_high=-0.05)
    assert "lowers the loss" in findings([compression(better)])[0]
    unclear = changed(compression_table(), LOSS, mean=0.01, ci_low=-0.2, ci_high=0.3)
    assert "does not clearly change the loss" in findings([compression(unclear)])[0]
    lost = changed(changed(compression_table(), LOSS, mean=math.nan), at("attn", 5), mean=math.nan)
    assert "The loss of the compressed model is not finite" in findings([compression(lost)])[0]
    assert "largest at attn of layer 4" in findings([compression(lost)])[0]


def test_the_summaries_name_every_offending_layer_and_set_models_side_by_side():
    result = compression()
    verdict = judge(result.table, 0.5, 0.1)
    assert verdict_summary(verdict, "small").splitlines() == [
        "small: failed: 2 of 25 numbers are not within --max-perpendicular 0.5 and --max-loss-change +0.1",
        "  attn, layer 5 (local): |e_perp|/|u| is 0.5280, bound 0.5",
        "  whole model: change of loss is +0.1200, bound +0.1",
    ]
    assert verdict_summary(judge(result.table)) == ""
    beside = models_summary([(result, verdict), (result, judge(result.table, 0.9))]).splitlines()
    assert [line.split()[-1] for line in beside[2:]] == ["failed", "passed"]


def test_a_layer_that_adds_nothing_in_either_model_passes_and_one_lost_loss_fails():
    place = at("attn", 5)
    idle = changed(compression_table(), place, mean=math.nan, n_tokens=0, n_undefined=252)
    assert all(found.layer != 5 or found.site != "attn" for found in judge(idle, 0.1).offending)
    lost = changed(compression_table(), LOSS, n_undefined=3)
    assert "is not finite for 3 of" in judge(lost, max_loss_change=10.0).offending[0].reason
