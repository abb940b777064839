"""Figures show the table's numbers: at the right place, with the right words, none dropped in silence."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import tables

from lens_geometry import axes, plots
from lens_geometry.errors import ResultError
from lens_geometry.sweep_plots import CONTROLS


def lines(figure: go.Figure, site: str, role: str = "edit") -> list[Any]:
    return [trace for trace in figure.data if trace.meta == {"site": site, "role": role}]


@pytest.mark.parametrize("linear", [1e-4, 0.1, 1.0])
def test_symlog_inverts_and_keeps_order_and_sign(linear: float) -> None:
    values = np.array([-3e7, -20.0, -1.0, -1e-5, 0.0, 1e-5, 0.46, 1.0, 189.0, 9.5e4, 3.3e7])
    placed = axes.symlog(values, linear)
    np.testing.assert_allclose(axes.symlog_inverse(placed, linear), values, rtol=1e-12, atol=1e-18)
    assert (np.diff(placed) > 0).all()
    np.testing.assert_allclose(placed, -axes.symlog(-values, linear))
    assert np.diff(axes.symlog([1e5, 1e6], linear)) == pytest.approx(1, abs=1e-6)  # a decade is one unit


@pytest.mark.parametrize(
    ("low", "high", "linear"), [(-0.1, 20, 0.01), (-5, 3.3e7, 1), (0, 1e48, 1), (-1e6, 0, 1), (0, 35, 0.1)]
)
def test_symlog_ticks_stand_within_the_data_and_hold_zero(low: float, high: float, linear: float) -> None:
    ticks = axes.symlog_ticks(low, high, linear)
    assert ticks == sorted(set(ticks))
    assert 0.0 in ticks
    assert min(ticks) >= low
    assert max(ticks) <= high
    assert 4 <= len(ticks) <= 12


def test_the_labels_of_a_symlog_axis_are_the_values_at_its_ticks() -> None:
    axis = axes.SymlogAxis([-0.3, 0.02, 1.5, 20.0, 3.3e7])
    superscripts = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    for position, label in zip(axis.ticks, axis.labels, strict=True):
        sign, size = (-1 if label.startswith("−") else 1), label.lstrip("−").replace(",", "")
        factor, _, power = size.rpartition("10") if set(size) & set("⁻⁰¹²³⁴⁵⁶⁷⁸⁹") else (size, "", "0")
        value = sign * float(factor.rstrip("·") or 1) * 10.0 ** int(power.translate(superscripts))
        assert axes.symlog_inverse(position, axis.linear) == pytest.approx(value, rel=1e-9, abs=1e-12)
    low, high = axis.range
    assert low < axes.symlog(-0.3, axis.linear) < axes.symlog(3.3e7, axis.linear) < high


def test_numbers_are_written_with_three_digits_and_their_sign() -> None:
    written = [axes.number(value, signed=True) for value in (0.0, 1.305, -1234.5, 3.3e6, 2e-6, -1e-320)]
    assert written == ["0", "+1.30", "−1,230", "+3.3 × 10⁶", "+2 × 10⁻⁶", "−1 × 10⁻³²⁰"]
    assert axes.number(math.nan) == axes.number(math.inf) == "not finite"
    assert axes.number(9.999) == "10.0"
    assert axes.interval(1.0, 0.5, 1.5, signed=True) == "+1.00 [+0.500, +1.50]"
    assert axes.interval(1.0, math.nan, math.nan) == "1.00"


def test_profile_lines_carry_the_tables_means_by_layer() -> None:
    table = tables.profile_table()
    figure = plots.profile_figure(table, ["parallel_ratio"])
    for site in tables.FRACTIONS:
        (line,) = lines(figure, site)
        rows = table[(table.site == site) & (table.metric == "parallel_ratio") & table["head"].isna()]
        assert list(line.x) == list(range(30))
        np.testing.assert_array_equal(np.array(line.y, float), rows["mean"])
        np.testing.assert_allclose(np.array(line.y) + np.array(line.error_y.array), rows["ci_high"])
        (band,) = lines(figure, site, "band")
        np.testing.assert_allclose(band.y, [*rows["q90"], *rows["q10"][::-1]])
    assert figure.layout.yaxis.type == "log"


def test_profile_shows_the_perpendicular_fraction_dashed_beside_the_parallel_one() -> None:
    table = tables.profile_table({"attn": 0.3})
    solid, dashed = lines(plots.profile_figure(table, ["parallel_fraction"]), "attn")
    assert (solid.line.dash, dashed.line.dash) == ("solid", "dash")
    np.testing.assert_allclose(np.array(solid.y) ** 2 + np.array(dashed.y) ** 2, 1)


def test_a_profile_has_four_panels_with_one_legend_entry_and_one_colour_per_site() -> None:
    figure = plots.figure("profile", tables.profile_table(), tables.META)
    shown = [trace.name for trace in figure.data if trace.showlegend]
    assert shown == list(tables.FRACTIONS)
    colours = {site: {line.line.color for line in lines(figure, site)} for site in tables.FRACTIONS}
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == 5
    assert figure.layout.title.text == "smollm2-135m"


def test_layers_that_lost_tokens_are_open_and_those_without_a_mean_are_crosses() -> None:
    table = tables.profile_table({"value": 0.5})
    here = (table.metric == "parallel_ratio") & table["head"].isna()
    table.loc[here & (table.layer == 3), "n_infinite"] = 7
    table.loc[here & (table.layer == 5), ["mean", "ci_low", "ci_high", "q90"]] = math.inf
    line, cross = lines(plots.profile_figure(table, ["parallel_ratio"]), "value")
    assert [x for x, symbol in zip(line.x, line.marker.symbol, strict=True) if symbol.endswith("-open")] == [3]
    assert "7 left out" in line.text[3]
    assert math.isnan(line.y[5])
    assert [x for x, y in zip(cross.x, cross.y, strict=True) if not math.isnan(y)] == [5]
    assert cross.marker.symbol == "x-thin"
    assert "not finite" in cross.text[5]


def test_heads_map_holds_every_layer_and_head_and_marks_the_undefined() -> None:
    table = tables.profile_table()
    chosen = (table.site == "value") & (table["head"] == 4) & (table.layer == 2)
    table.loc[chosen & (table.metric == "parallel_fraction"), "mean"] = math.nan
    figure = plots.profile_heads_figure(table)
    assert [trace.meta["site"] for trace in figure.data] == ["value", "value_excl_self"]
    cells = figure.data[0]
    assert np.shape(cells.z) == (9, 30)
    rows = table[(table.site == "value") & (table.metric == "parallel_fraction") & (table["head"] == 7)]
    np.testing.assert_array_equal(np.array(cells.z, float)[7], rows["mean"])
    assert cells.text[4][2] == "×"
    assert "layer 2, head 4" in cells.hovertext[4][2]
    assert "not finite" in cells.hovertext[4][2]


def test_heads_map_of_a_signed_metric_is_centred_on_zero() -> None:
    scale = plots.profile_heads_figure(tables.profile_table(), "alpha").layout.coloraxis
    assert scale.cmin == -scale.cmax < 0


def test_sweep_lines_stand_at_symlog_of_the_tables_changes_and_hover_real_values() -> None:
    table = tables.sweep_table()
    figure = plots.sweep_figure(table)
    axis = axes.SymlogAxis(table[["loss_change", "loss_change_low", "loss_change_high"]])
    for panel, part in enumerate(("parallel", "perpendicular")):
        line = lines(figure, "mlp")[panel]
        rows = table[(table.site == "mlp") & (table.component == part) & (table.control == "none")]
        assert list(line.x) == list(tables.GRIDS[part])
        np.testing.assert_array_equal(np.array(line.customdata, float), rows["loss_change"])
        np.testing.assert_allclose(axes.symlog_inverse(line.y, axis.linear), rows["loss_change"], atol=1e-12)
        top = np.array(line.y) + np.array(line.error_y.array)
        np.testing.assert_allclose(axes.symlog_inverse(top, axis.linear), rows["loss_change_high"], atol=1e-12)
    assert "s_perp = 0<br>change of loss +20.4 [+19.4, +21.4] nats per token" in line.text[0]
    assert list(figure.layout.yaxis.range) == list(figure.layout.yaxis2.range)


def test_sweep_of_perplexity_reads_the_perplexity_columns() -> None:
    table = tables.sweep_table()
    line = lines(plots.sweep_figure(table, ["perpendicular"], ["perplexity"]), "mlp")[0]
    assert line.customdata[0] == pytest.approx(math.exp(3.46 + 20.4) - math.exp(3.46))


def test_controls_are_broken_lines_in_the_sites_colour_that_one_legend_entry_switches() -> None:
    figure = plots.sweep_figure(tables.sweep_table())
    edit, control = lines(figure, "attn")[0], lines(figure, "attn", "isotropic")[0]
    assert control.line.color == edit.line.color
    assert control.line.dash != edit.line.dash
    assert control.line.width < edit.line.width
    keys = [trace for trace in figure.data if trace.meta["role"] == "key"]
    assert sorted(key.legendgroup for key in keys) == sorted(tables.CONTROLS)
    for key in keys:
        group = [trace for trace in figure.data if trace.legendgroup == key.legendgroup]
        assert {trace.meta["role"] for trace in group} == {"key", key.legendgroup}
        assert {trace.visible for trace in group} == {"legendonly"}


def test_a_condition_that_is_not_finite_is_a_cross_and_breaks_the_line() -> None:
    table = tables.sweep_table()
    one = (table.site == "mlp") & (table.component == "parallel") & (table.control == "none") & (table.scale == 3)
    line, cross = lines(plots.sweep_figure(tables.lose(table, one), ["parallel"]), "mlp")
    assert math.isnan(line.y[-1])
    assert [x for x, y in zip(cross.x, cross.y, strict=True) if not math.isnan(y)] == [3.0]
    assert "3 losses not finite" in cross.text[-1]
    partly = table.copy()
    partly.loc[one, ["status", "n_nonfinite"]] = ["nonfinite", 1]
    _, cross = lines(plots.sweep_figure(partly, ["parallel"]), "mlp")
    assert cross.customdata[-1] == table[one]["loss_change"].item()  # where the rest of the losses is


def test_layer_sets_of_one_site_are_lines_of_their_own() -> None:
    table = pd.concat([tables.sweep_table(), tables.sweep_table().assign(layers="1-29")], ignore_index=True)
    names = {line.name for line in lines(plots.sweep_figure(table), "attn")}
    assert names == {"attn, layers all", "attn, layers 1-29"}


def test_controls_figure_puts_the_edit_beside_its_controls_on_one_axis_for_both_parts() -> None:
    table = tables.sweep_table()
    parallel, perpendicular = (plots.controls_figure(table, part) for part in tables.GRIDS)
    dots = {trace.meta["role"]: trace for trace in parallel.data if trace.meta["role"] != "key"}
    assert set(dots) == {"none", *tables.CONTROLS}
    for name, trace in dots.items():
        rows = table[(table.control == name) & (table.component == "parallel") & (table.scale == 0)]
        np.testing.assert_array_equal(np.array(trace.customdata, float), rows["loss_change"])
    assert list(parallel.layout.xaxis.range) == list(perpendicular.layout.xaxis.range)
    assert {t.meta["role"] for t in perpendicular.data} == {"none", "isotropic", "key"}
    assert list(parallel.layout.yaxis.ticktext) == list(tables.LOSSES)


def test_an_unknown_site_and_control_are_drawn_too() -> None:
    table = tables.sweep_table({"resid_new": (0.1, 0.2)}).replace({"control": {"gain": "sideways"}})
    figure = plots.controls_figure(table)
    assert "sideways" in {trace.meta["role"] for trace in figure.data}
    assert len(plots.sweep_figure(table).data) > 3


def test_figures_are_valid_json_even_with_infinite_changes() -> None:
    table = tables.sweep_table()
    table.loc[table.scale == 0, ["perplexity_change", "perplexity_change_high"]] = math.inf
    figure = plots.sweep_figure(table, quantities=["perplexity"])
    text = json.dumps(json.loads(figure.to_json()), allow_nan=False)
    assert math.isfinite(figure.layout.yaxis.range[1])
    assert "Infinity" not in text


def test_site_names_cannot_put_markup_into_a_figure() -> None:
    table = tables.sweep_table({"<b onclick=x>": (0.1, 0.2)})
    for line in plots.sweep_figure(table).data:
        assert "<b onclick" not in f"{line.name}{line.text}"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.figure("wizardry", pd.DataFrame(), {}), "no figure is known for 'wizardry'"),
        (
            lambda: plots.figure("profile", tables.profile_table().drop(columns="q90"), {}),
            "lacks the column q90",
        ),
        (
            lambda: plots.sweep_figure(tables.sweep_table().drop(columns="loss_change")),
            "lacks the column loss_change",
        ),
        (lambda: plots.profile_figure(tables.profile_table().head(0)), "no rows"),
        (lambda: plots.sweep_figure(tables.sweep_table().head(0)), "no rows"),
        (lambda: plots.profile_figure(tables.profile_table(), ["glamour"]), "profile of glamour"),
        (lambda: plots.profile_heads_figure(tables.profile_table({"mlp": 0.3})), "by head table has no rows"),
        (lambda: plots.controls_figure(tables.sweep_table(), scale=0.123), "s_par = 0.123"),
    ],
)
def test_wrong_and_empty_tables_are_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(ResultError, match=message):
        call()


def test_generation_lines_are_the_means_over_layers_and_maps_the_layers() -> None:
    table = tables.generation_table()
    figure = plots.figure("generation_profile", table, tables.META)
    (line, *_) = lines(figure, "value")
    rows = table[(table.site == "value") & (table.metric == "parallel_ratio") & table["layer"].isna()]
    assert list(line.x) == list(range(6))
    np.testing.assert_allclose(np.array(line.y, float), rows["mean"])
    np.testing.assert_allclose(np.array(line.y) + np.array(line.error_y.array), rows["ci_high"])
    (cells,) = lines(figure, "value", "map")
    rows = table[(table.site == "value") & (table.metric == "parallel_fraction") & (table["layer"] == 2)]
    assert np.shape(cells.z) == (4, 6)
    np.testing.assert_array_equal(np.array(cells.z, float)[2], rows["mean"])
    assert [trace.name for trace in figure.data if trace.showlegend] == ["attn", "value"]
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert len(titles) == len(plots.METRICS) + 2


def test_a_step_without_a_mean_is_a_cross_and_one_that_left_numbers_out_is_open() -> None:
    table = tables.generation_table(("value",))
    pooled = (table.metric == "parallel_ratio") & table["layer"].isna()
    table.loc[pooled & (table.step == 1), "n_infinite"] = 2
    table.loc[pooled & (table.step == 3), ["mean", "ci_low", "ci_high"]] = math.nan
    table.loc[(table.metric == "parallel_fraction") & (table.step == 0) & (table.layer == 1), "mean"] = math.nan
    figure = plots.generation_figure(table)
    line, cross = lines(figure, "value")[:2]
    assert [x for x, symbol in zip(line.x, line.marker.symbol, strict=True) if symbol.endswith("-open")] == [1]
    assert "2 numbers left out" in line.text[1]
    assert [x for x, y in zip(cross.x, cross.y, strict=True) if not math.isnan(y)] == [3]
    (cells,) = lines(figure, "value", "map")
    assert np.array(cells.text)[1, 0] == "×"


def test_continuations_stand_side_by_side_and_markup_in_them_stays_text() -> None:
    figure = plots.figure("continuations", tables.continuations_table(), tables.META)
    first, second = figure.data[0].cells["values"]
    assert first[0] == "<b>prompt</b>"
    assert second[0] == "<b>It was<br>1 &lt; 2</b>"
    assert second[1] == "once upon a time"
    assert second[2] == "once <b><u>again, &lt;b&gt;again&lt;/b&gt;</u></b>"
    assert "attn, s_par = 0, new tokens<br><i>agrees for 1 of 4 tokens</i><br><i>log-probability −1.75" in first[2]
    assert "not finite" in first[3]
    assert "the edit changed nothing" in first[4]
    for name in ("continuations", "generation_profile"):
        with pytest.raises(ResultError, match="lacks the column"):
            plots.figure(name, pd.DataFrame({"site": []}), {})


def test_many_controls_stay_within_their_sites_row():
    controls = {name: 1.0 + place / 10 for place, name in enumerate(CONTROLS)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "CONTROLS", controls)
        drawn = plots.controls_figure(tables.sweep_table(controls=tuple(controls)), "parallel", 0.0)
    dots = [trace for trace in drawn.data if trace.meta["role"] != "key"]
    assert len(dots) == 1 + len(CONTROLS) > 6
    for trace in dots:
        assert all(abs(y - round(y)) < 0.4 for y in trace.y)
