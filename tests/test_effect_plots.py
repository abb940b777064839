"""Figures, sections and sentences of the head sweep and of applied strength hold their tables' numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tables

from lens_geometry.axes import SymlogAxis, symlog_inverse
from lens_geometry.effect_plots import heads_figure, strength_figure
from lens_geometry.effect_sections import heads_section, strength_section
from lens_geometry.errors import ResultError
from lens_geometry.findings import findings
from lens_geometry.report import write_report


def test_the_map_of_heads_holds_every_cell_on_a_scale_around_zero():
    table = tables.heads().table
    drawn = heads_figure(table)
    exact, first = (trace for trace in drawn.data if trace.type == "heatmap")
    assert np.shape(exact.z) == (4, 3)  # head by layer
    linear = SymlogAxis(table.loc[table["kind"] == "single", "loss_change"]).linear
    assert symlog_inverse(np.array(exact.z, dtype=float), linear)[2, 1] == pytest.approx(0.01 * 3 * 2 + 0.5)
    assert symlog_inverse(np.array(first.z, dtype=float), linear)[0, 2] == pytest.approx(0.8 * (0.03 - 0.1))
    assert "layer 1, head 2" in exact.hovertext[2][1]
    assert "+0.560" in exact.hovertext[2][1]
    assert drawn.layout.coloraxis.cmin == -drawn.layout.coloraxis.cmax


def test_layer_lines_are_all_at_once_the_sum_and_the_extremes():
    drawn = heads_figure(tables.heads().table)
    lines = {trace.name: trace for trace in drawn.data if trace.type == "scatter" and trace.mode == "lines+markers"}
    assert set(lines) == {
        "all heads at once", "sum of single heads", "the head that costs most", "the head that costs least"
    }  # fmt: skip
    assert list(lines["the head that costs most"].customdata) == pytest.approx([0.04, 0.56, 0.12])
    assert list(lines["the head that costs least"].customdata) == pytest.approx([0.01, 0.02, -0.07])
    assert list(lines["sum of single heads"].customdata) == pytest.approx([0.1, 0.7, 0.2])


def test_heads_that_are_not_finite_are_crosses():
    table = tables.heads().table
    lost = (table["kind"] == "single") & (table["layer"] == 0) & (table["head"] == 3)
    table.loc[lost, ["loss_change", "loss_change_low", "loss_change_high"]] = np.nan
    table.loc[lost, "status"] = "nonfinite"
    drawn = heads_figure(table)
    marks = np.array(next(trace for trace in drawn.data if trace.type == "heatmap").text)
    assert marks[3, 0] == "×"
    assert (marks != "").sum() == 1


def test_strength_stands_across_and_cost_upwards():
    drawn = strength_figure(tables.strengths().table)
    dots = [trace for trace in drawn.data if trace.mode == "markers"]
    attn = next(trace for trace in dots if trace.meta["site"] == "attn")
    assert list(attn.x) == [0.25] * 4
    assert list(attn.marker.symbol) == ["circle-open", "circle", "circle", "circle"]
    assert "all layers at once" in attn.text[0]
    assert "+0.300 [+0.250, +0.350]" in attn.text[0]
    by_layer = [trace for trace in drawn.data if trace.type == "scatter" and trace.mode == "lines+markers"]
    assert {tuple(trace.x) for trace in by_layer} == {(0, 1, 2)}


def test_the_sections_hold_figures_and_the_short_tables():
    section = "".join(heads_section(tables.heads().table, "p"))
    assert section.count("<figure") == 4
    assert "value, each, exactly" in section
    assert "+0.333" in section  # mean over layers of the sum of single heads
    section = "".join(strength_section(tables.strengths().table, "p"))
    assert section.count("<figure") == 4
    assert "attn, parallel 0" in section
    assert "0.250\n" not in section  # a line break of a cell becomes small print
    assert "0.250<small>[0.230, 0.270]</small>" in section


def test_the_sentences_name_the_head_that_costs_most_and_the_strengths():
    heads, strength = findings([tables.strengths(), tables.heads()])
    assert "head 2 of layer 1 (+0.560 nats per token)" in heads
    assert "Of 12 single heads edited at value (s_par = 0, s_perp = 1) the one" in heads
    assert "cost +0.500 on average over layers, the sum of single ones +0.333" in heads
    assert "attn 25.0 % for +0.300; value 50.0 % for +0.900" in strength
    table = tables.heads().table
    table.loc[table["kind"] == "single", "loss_change"] *= -1
    (turned,) = findings([tables.Result("head_sweep", table, {})])
    assert "head 0 of layer 2 (+0.0700" in turned


def test_both_are_in_a_report_and_nothing_else_is_claimed(tmp_path):
    page = write_report([tables.heads(), tables.strengths()], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Single heads" in page
    assert "Applied strength" in page
    assert "was not measured" not in page
    assert json.dumps("layer")[1:-1] in page


@pytest.mark.parametrize("draw", [heads_figure, strength_figure])
def test_a_table_of_something_else_is_refused(draw):
    with pytest.raises(ResultError, match="table lacks the column"):
        draw(tables.sweep_table())
