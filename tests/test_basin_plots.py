"""Figures and report of basins and schedules: the table's numbers in their places, and nothing dropped."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import tables

from lens_geometry import plots, report
from lens_geometry.basin_plots import basin_range, basins
from lens_geometry.errors import ResultError
from lens_geometry.report import write_report
from lens_geometry.results import Result


def basin_row(site, low, high, *, layers="all", head=pd.NA, open_=(), **more):
    row = {"kind": "basin", "site": site, "layers": layers, "head": head, "grouping": "each", "component": "parallel"}
    row |= {"bound": 0.05, "low": low, "high": high, "low_estimate": low - 0.1, "high_estimate": high + 0.2}
    row |= {f"{end}_open": end in open_ for end in ("low", "high", "low_estimate", "high_estimate")}
    row |= {"low_loss_change": 0.031, "high_loss_change": 0.042, "reentrant": False, "n_evaluations": 21}
    return {**row, "status": "ok", **more}


def tried(site, scale, inside, layers="all"):
    row = {"kind": "evaluation", "site": site, "layers": layers, "head": pd.NA, "component": "parallel"}
    return {**row, "bound": 0.05, "scale": scale, "loss_change": 0.01, "inside": inside, "status": "ok"}


BASINS = pd.DataFrame(
    [
        basin_row("attn", 0.4, 1.7),
        basin_row("mlp", -1.0, 3.0, open_=("low", "low_estimate", "high")),
        basin_row("attn", 0.2, 1.5, layers="3", reentrant=True),
        tried("attn", 0.5, True),
        tried("attn", 2.0, True),
        tried("attn", 1.75, False, layers="3"),
        tried("attn", 2.25, True, layers="3"),
        tried("attn", 1.25, True, layers="3"),
    ]
).astype({"head": "Int64"})


def schedule_table():
    rows = []
    scales = {"greedy": [1.0, 0.5, 0.0], "uniform": [0.6] * 3, "random 1": [0.0, 1.0, 0.7]}
    for site in ("attn", "value"):
        for variant, of_layer in scales.items():
            for layer, s in enumerate(of_layer):
                rows.append({"kind": "layer", "site": site, "variant": variant, "half": "search", "layer": layer,
                             "scale": s, "strength": 0.3 * (1 - s), "loss_change": 0.01, "status": "ok"})  # fmt: skip
            for half, shift in (("search", 0.0), ("held_out", 0.03)):
                change = {"greedy": 0.05, "uniform": 0.11, "random 1": 0.3}[variant] + shift
                rows.append({"kind": "comparison", "site": site, "variant": variant, "half": half, "strength": 0.45,
                             "loss_change": change, "loss_change_low": change - 0.02, "loss_change_high": change + 0.04,
                             "difference": change - 0.05 - shift, "difference_low": -0.01, "difference_high": 0.5,
                             "status": "ok"})  # fmt: skip
    return pd.DataFrame(rows).assign(budget=0.1).astype({"layer": "Int64"})


def test_basins_are_lines_from_edge_to_edge_site_by_site():
    rows = basins(BASINS)
    assert list(rows["label"]) == ["attn, layers all", "attn, layer 3", "mlp, layers all"]
    figure = plots.figure("basin", BASINS, tables.META)
    assert list(figure.layout.yaxis.ticktext) == list(rows["label"])
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    thin, thick = lines[::2], lines[1::2]
    for place, (_, row) in enumerate(rows.iterrows()):
        assert list(thick[place].x) == [row.low, row.high]
        assert list(thin[place].x) == [row.low_estimate, row.high_estimate]
        assert set(thick[place].y) == set(thin[place].y) == {place}
        assert thick[place].line.width > thin[place].line.width
        assert thick[place].line.color == thin[place].line.color
        assert basin_range(row) in thick[place].text
    assert thick[0].line.color != thick[2].line.color


def test_an_open_end_is_an_arrow_outwards_and_a_closed_one_a_bar():
    lines = [trace for trace in plots.basin_figure(BASINS).data if trace.mode == "lines+markers"]
    symbols = [list(line.marker.symbol) for line in lines]
    assert symbols[:4] == [["line-ns", "line-ns"]] * 4
    assert symbols[4] == ["triangle-left", "line-ns"]  # by the change itself
    assert symbols[5] == ["triangle-left", "triangle-right"]


def test_scales_that_are_inside_again_are_hollow_dots_at_their_target():
    (dots,) = [trace for trace in plots.basin_figure(BASINS).data if trace.mode == "markers"]
    assert list(dots.x) == [2.25]
    assert list(dots.y) == [1]
    assert dots.marker.symbol == "circle-open"


def test_ranges_in_words_say_where_the_limit_was_reached():
    rows = basins(BASINS)
    assert basin_range(rows.iloc[0]) == "0.40 to 1.70"
    assert basin_range(rows.iloc[2]) == "≤ −1.00 to ≥ 3.00"
    assert basin_range(rows.iloc[2], "_estimate") == "≤ −1.10 to 3.20"


def test_labels_name_what_differs_and_no_more():
    one = BASINS[(BASINS["layers"] == "all") & (BASINS["site"] == "attn")]
    assert list(basins(one)["label"]) == ["attn"]
    assert list(basins(BASINS[BASINS["layers"] == "all"])["label"]) == ["attn", "mlp"]
    assert list(basins(BASINS[BASINS["site"] == "attn"])["label"]) == ["layers all", "layer 3"]
    rows = [basin_row("value", 0.4, 1.7, layers="2", head=head) for head in (0, 5)]
    heads = pd.DataFrame([*rows, tried("value", 0.5, True, layers="2")]).astype({"head": "Int64"})
    assert list(basins(heads)["label"]) == ["layer 2, head 0", "layer 2, head 5"]


def test_a_schedule_is_drawn_as_steps_by_layer_in_scale_and_in_strength():
    table = schedule_table()
    figure = plots.figure("schedule", table, tables.META)
    for axis, column in (("y", "scale"), ("y2", "strength")):
        lines = {(t.meta["site"], t.meta["role"]): t for t in figure.data if t.yaxis == axis}
        for role, variant in (("edit", "greedy"), ("uniform", "uniform"), ("random", "random 1")):
            rows = table[(table["kind"] == "layer") & (table["site"] == "value") & (table["variant"] == variant)]
            np.testing.assert_array_equal(np.array(lines["value", role].y, float), rows[column])
            assert list(lines["value", role].x) == [0, 1, 2]
            assert lines["value", role].line.shape == "hvh"
        assert len({lines["value", role].line.dash for role in ("edit", "uniform", "random")}) == 3
    assert "layer 1" in lines["value", "edit"].text[1]
    assert "s_par = 0.5" in lines["value", "edit"].text[1]


def test_the_comparison_shows_both_halves_of_every_variant_beside_the_budget():
    table = schedule_table()
    figure = plots.schedule_figure(table, ["comparison"])
    labels = list(figure.layout.yaxis.ticktext)
    assert labels == [f"{site}, {name}" for site in ("attn", "value") for name in ("greedy", "uniform", "random 1")]
    shown = {}
    for dots in figure.data:
        half = "search" if str(dots.marker.symbol).endswith("-open") else "held_out"
        for x, y, up, down in zip(dots.x, dots.y, dots.error_x.array, dots.error_x.arrayminus, strict=True):
            shown[labels[round(y)], half] = (x, x - down, x + up)
    rows = table[table["kind"] == "comparison"]
    assert len(shown) == len(rows) == 12
    for row in rows.itertuples():
        place = shown[f"{row.site}, {row.variant}", row.half]
        assert place == pytest.approx((row.loss_change, row.loss_change_low, row.loss_change_high))
    assert figure.layout.shapes[0].x0 == 0.1


def test_the_report_says_what_the_tables_say(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "get_plotlyjs", lambda: "/* plotly */")
    results = [Result("basin", BASINS, tables.META), Result("schedule", schedule_table(), tables.META)]
    page = write_report(results, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h2>Tolerance basin</h2>" in page
    assert "<h2>Schedule of scales by layer</h2>" in page
    assert "<td>0.40 to 1.70</td><td>0.30 to 1.90</td><td>+0.0310</td><td>+0.0420</td><td>no</td><td>21</td>" in page
    assert "≤ −1.00 to ≥ 3.00" in page
    assert "the budget is 0.1" in page
    assert "<td>+0.140<small>[+0.120, +0.180]</small></td><td>+0.0600<small>[−0.0100, +0.500]</small></td>" in page
    assert 'data-role="uniform"' in page
    assert 'data-role="random"' in page
    assert "one scale for all layers" in page


def test_many_basins_get_a_figure_for_each_site(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "get_plotlyjs", lambda: "/* plotly */")
    rows = [basin_row(site, 0.4, 1.7, layers=str(layer)) for layer in range(20) for site in ("attn", "mlp")]
    table = pd.DataFrame([*rows, tried("attn", 0.5, True, layers="0")]).astype({"head": "Int64"})
    page = write_report([Result("basin", table, {})], tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("<figure") == 2
    assert "Tolerance of s_par, mlp" in page
    assert "All 40 basins" in page


def test_figures_are_valid_json_though_a_change_is_not_finite():
    table = schedule_table()
    table.loc[table["variant"] == "random 1", ["loss_change", "loss_change_low", "loss_change_high"]] = math.nan
    text = json.dumps(json.loads(plots.schedule_figure(table).to_json()), allow_nan=False)
    assert "not finite" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.figure("basin", BASINS.drop(columns="low_open"), {}), "lacks the column low_open"),
        (lambda: plots.basin_figure(BASINS[BASINS["kind"] == "evaluation"]), "no rows"),
        (lambda: plots.schedule_figure(schedule_table().drop(columns="budget")), "lacks the column budget"),
        (lambda: plots.schedule_figure(schedule_table().head(0)), "no rows"),
    ],
)
def test_wrong_and_empty_tables_are_refused_by_name(call, message):
    with pytest.raises(ResultError, match=message):
        call()
