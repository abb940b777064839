"""Figures, section, sentences and summary of the dissociation hold their table's numbers."""

from __future__ import annotations

import json
import math
import re

import doses as made
import numpy as np
import pandas as pd
import pytest

from lens_geometry import plots
from lens_geometry.axes import SymlogAxis, number, symlog_inverse
from lens_geometry.dissociation_plots import dissociation_figure, ratio_words
from lens_geometry.dissociation_sections import dissociation_section, dissociation_warnings
from lens_geometry.dissociation_verdict import verdict
from lens_geometry.errors import ResultError
from lens_geometry.findings import findings
from lens_geometry.report import write_report
from lens_geometry.summaries import dissociation_summary

ANSWERS = {"default": "dissociation", "turned <b>": "reversed", "both": "one-sided"}
RESULT = made.dissociation(ANSWERS, sequences=20, pairs=40)
TABLE = RESULT.table


def rows(table: pd.DataFrame, quantity: str, kind: str, variant: str = "default") -> pd.DataFrame:
    """The rows over all seeds at single displacements."""
    chosen = (table["quantity"] == quantity) & (table["kind"] == kind) & (table["variant"] == variant)
    return table[chosen & (table["regime"] == "") & table["seed"].isna()]


def lose(table: pd.DataFrame, displacement: float, kind: str, status: str) -> pd.DataFrame:
    """The same table with one displacement of one kind without a value."""
    lost = (table["displacement"] == displacement) & (table["kind"] == kind)
    table = table.copy()
    table.loc[lost, ["value", "low", "high", "displacement_mean"]] = math.nan
    table.loc[lost, "status"] = status
    return table


def test_both_panels_of_every_variant_hold_both_kinds_and_their_seeds():
    drawn = dissociation_figure(TABLE)
    lines = [trace for trace in drawn.data if trace.mode == "lines+markers"]
    assert len(lines) == 3 * 2 * 2
    linear = SymlogAxis(_ends("loss")).linear
    for kind, line in zip(("angular", "magnitude"), lines[:2], strict=True):
        expected = rows(TABLE, "loss", kind)
        assert line.meta == {"site": kind, "role": "edit"}
        assert list(line.x) == list(made.DISPLACEMENTS)
        assert symlog_inverse(np.array(line.y, dtype=float), linear) == pytest.approx(expected["value"].to_numpy())
        top = np.array(line.y, dtype=float) + np.array(line.error_y.array, dtype=float)
        assert symlog_inverse(top, linear) == pytest.approx(expected["high"].to_numpy())
    assert lines[0].line.color != lines[1].line.color
    assert lines[0].line.dash != lines[1].line.dash
    assert lines[0].marker.symbol[0] != lines[1].marker.symbol[0]
    seeds = [trace for trace in drawn.data if trace.meta["role"] == "seeds"]
    assert len(seeds) == 3 * 2 * 2
    assert {len(trace.x) for trace in seeds} == {5 * 4}
    assert len({tuple(axis.range) for axis in (drawn.layout.yaxis, drawn.layout.yaxis3, drawn.layout.yaxis5)}) == 1
    titles = [note.text for note in drawn.layout.annotations]
    assert titles[0] == "default: change of loss (nats per token)"
    assert titles[3] == "turned &lt;b&gt;: drop of the margin (nats)"


def _ends(quantity: str) -> pd.DataFrame:
    alone = (TABLE["quantity"] == quantity) & TABLE["kind"].isin(["angular", "magnitude"]) & (TABLE["regime"] == "")
    return TABLE.loc[alone, ["value", "low", "high"]]


def test_contrasts_stand_on_their_variants_line_with_their_interval():
    drawn = dissociation_figure(TABLE)
    dots = [trace for trace in drawn.data if trace.meta["role"] in ("loss", "margin", "accuracy")]
    assert [trace.name for trace in dots] == ["loss", "margin", "accuracy", "margin", "accuracy"]
    decided = verdict(TABLE).query("regime == 'all' and quantity == 'margin'")
    assert list(dots[0].x) == pytest.approx(list(decided["loss_contrast"]))
    assert list(dots[1].x) == pytest.approx(list(decided["contrast"]))
    assert list(dots[3].x) == pytest.approx(list(decided["crossover"]))
    assert np.round(np.array(dots[1].y)).tolist() == [0, 1, 2]
    assert list(dots[1].error_x.array) == pytest.approx(list(decided["contrast_high"] - decided["contrast"]))
    assert "displacement 0.05" in dots[0].text[0]
    assert list(drawn.layout.yaxis7.ticktext) == ["default", "turned &lt;b&gt;", "both"]


def test_hover_texts_have_the_numbers():
    line = next(trace for trace in dissociation_figure(TABLE).data if trace.mode == "lines+markers")
    row = rows(TABLE, "loss", "angular").iloc[2]
    assert "<b>angular</b>, displacement 0.2, 5 seeds" in line.text[2]
    assert f"unperturbed {row['base']:.2f}" in line.text[2]
    assert "realised 0.200, largest error 4 × 10⁻⁵ %" in line.text[2]


def test_what_was_impossible_or_not_finite_is_a_cross():
    drawn = dissociation_figure(lose(TABLE, 0.4, "magnitude", "impossible"))
    crosses = [trace for trace in drawn.data if trace.marker.symbol == "x-thin"]
    assert len(crosses) == 3 * 2
    assert {trace.meta["site"] for trace in crosses} == {"magnitude"}
    assert crosses[0].y[3] > drawn.layout.yaxis.range[0]
    assert "impossible" in crosses[0].text[3]


def test_without_pairs_or_with_one_variant_the_figure_is_smaller():
    alone = made.table(pairs=0, sequences=10)
    drawn = plots.figure("dissociation", alone, {"model": {"name": "tiny"}})
    assert len([trace for trace in drawn.data if trace.mode == "lines+markers"]) == 2
    assert drawn.layout.annotations[0].text == "change of loss (nats per token)"
    accuracy = dissociation_figure(TABLE, ("loss", "accuracy"))
    assert "drop of accuracy" in accuracy.layout.annotations[1].text
    one = made.table(seeds=1, sequences=10, pairs=10)
    assert not [trace for trace in dissociation_figure(one).data if trace.meta["role"] == "seeds"]


def test_the_section_has_verdicts_figures_and_tables():
    section = "".join(dissociation_section(TABLE, "p"))
    assert section.count("<figure") == 2 + 3 * 3
    assert section.count('type="radio"') == 3
    decided = verdict(TABLE).query("regime == 'all'")
    assert re.search(r"default, margin</th><td>dissociation</td>", section)
    assert re.search(r"turned &lt;b&gt;, margin</th><td>reversed</td>", section)
    first = decided.iloc[0]
    assert f"<td>+{first['loss_contrast']:.3f}<small>[+{first['loss_contrast_low']:.3f}" in section
    ratio = rows(TABLE, "loss", "ratio").iloc[0]
    assert f"<td>{ratio['value']:.2f}<small>[{ratio['low']:.2f}, {ratio['high']:.2f}]" in section
    p = rows(TABLE, "loss", "difference")["p_seeds_holm"].iloc[0]
    assert f"<td>{number(p, digits=2)}<small>d +" in section
    figures = re.findall(r'<script type="application/json" id="([^"]+)">(.*?)</script>', section)
    assert len({name for name, _ in figures}) == 11
    for _, dumped in figures:
        assert json.loads(dumped)["data"]


def test_one_variant_has_no_switch_of_variants_and_no_name():
    section = "".join(dissociation_section(made.table(sequences=10, pairs=20), "p"))
    assert 'type="radio"' not in section
    assert "<li>angular hurts the loss more, magnitude hurts the margin more" in section
    assert '<th scope="row">margin</th>' in section


def test_what_cannot_be_compared_is_said_in_table_and_warnings():
    doses = made.doses(sequences=10, pairs=10)
    measured = {kind: [list(row) for row in of_kind] for kind, of_kind in doses.measured.items()}
    measured["angular"][3][0] = made.ran(math.nan, 0, "impossible")
    table = made.as_table(made.rows(made.replace(doses, measured=measured)))
    assert dissociation_warnings(table)[0] == "1 conditions were impossible at their displacement and were not run."
    assert "not compared<small>angular impossible" in "".join(dissociation_section(table, "p"))
    assert "angular impossible" in dissociation_summary(table)
    assert dissociation_warnings(made.table(sequences=10, pairs=20)) == []
    assert len(dissociation_warnings(made.table(seeds=1, pairs=0, sequences=10))) == 2


def test_sets_of_pairs_and_equal_loss_are_told_apart(tmp_path):
    parts = [TABLE[TABLE["variant"] == name].assign(variant="default") for name in ANSWERS]
    about = [("agreement", "displacement"), ("anaphor", "displacement"), ("agreement", "loss")]
    table = pd.concat(
        [part.assign(pairs=name, matched=by, unit="relative") for part, (name, by) in zip(parts, about, strict=True)]
    )
    drawn = dissociation_figure(lose(table, 0.4, "magnitude", "not_reached"))
    assert drawn.layout.xaxis.title.text == "displacement |h′ − h| / |h|"
    assert drawn.layout.xaxis5.title.text == "change of loss that both were set to"
    assert len([trace for trace in drawn.data if trace.marker.symbol == "x-thin"]) == 6
    section = "".join(dissociation_section(table, "p"))
    assert "agreement, at equal displacement, margin</th><td>dissociation" in section
    assert "anaphor, at equal displacement, margin</th><td>reversed" in section
    assert "agreement, at equal loss, margin</th><td>one-sided" in section
    (sentence,) = findings([made.Result("dissociation", table, {})])
    assert "agreement dissociation (contrast +" in sentence
    assert "anaphor reversed" in sentence
    assert "equal loss" not in sentence


def test_ratios_are_written_with_open_ends():
    assert ratio_words({"value": 3.0, "low": 1.5, "high": math.inf}) == "3.00 [1.50, ∞]"
    assert ratio_words({"value": math.nan, "low": -math.inf, "high": math.inf}) == "neither hurts"
    assert ratio_words({"value": math.inf, "low": math.nan, "high": math.nan}) == "∞"


def test_the_summary_puts_damages_beside_each_other_and_ends_with_the_verdict():
    words = dissociation_summary(TABLE)
    first = rows(TABLE, "loss", "angular").iloc[0]["value"], rows(TABLE, "loss", "magnitude").iloc[0]["value"]
    assert re.search(rf"loss +0\.05 +\+{first[0]:.4f} +\+{first[1]:.4f}", words)
    assert "\nreversed: magnitude hurts the loss more, angular hurts the margin more (contrasts" in words
    assert words.count("\ndefault\n") == 1


def test_the_sentence_is_the_verdict_with_its_numbers():
    (sentence,) = findings([made.dissociation(sequences=20, pairs=40)])
    assert (
        "(margin): dissociation, angular hurts the loss more, magnitude hurts the margin more (contrasts +" in sentence
    )
    (sentence,) = findings([RESULT])
    contrast = verdict(TABLE).iloc[0]["loss_contrast"]
    assert f"default dissociation (contrast +{contrast:.3f} of the loss, −" in sentence
    assert "turned <b> reversed" in sentence
    many = pd.concat([TABLE.assign(model=name) for name in ("a", "b")])
    (sentence,) = findings([made.Result("dissociation", many, {})])
    assert "(margin): a, default: dissociation, angular hurts the loss more, magnitude hurts the margin" in sentence
    assert "of 5 other comparisons dissociation in 1, reversed in 2" in sentence
    (sentence,) = findings([made.Result("dissociation", made.table(pairs=0, sequences=10), {})])
    assert "text alone: undecided, angular hurts the loss more; no minimal pairs were scored" in sentence


@pytest.mark.slow
def test_it_is_in_a_report_and_loads_back(tmp_path):
    page = write_report([RESULT], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Direction against magnitude" in page
    assert "turned <b>" not in re.sub(r"<script.*?</script>", "", page, flags=re.S)
    RESULT.save(tmp_path / "saved")
    again = made.Result.load(tmp_path / "saved")
    assert len(verdict(again.table)) == len(verdict(TABLE))
    assert dissociation_summary(again.table) == dissociation_summary(TABLE)


def test_a_table_of_something_else_is_refused():
    with pytest.raises(ResultError, match="table lacks the column"):
        dissociation_figure(pd.DataFrame({"quantity": ["loss"]}))
