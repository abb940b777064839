"""The sentences follow the tables: they change when the numbers do, and claim nothing unmeasured."""

from __future__ import annotations

import math
import re

import pandas as pd
import pytest
import tables
from tables import profile, sweep, without_interval

from lens_geometry.findings import findings
from lens_geometry.results import Result


@pytest.mark.parametrize(
    "results",
    [
        [],
        [profile()],
        [sweep()],
        [profile(), sweep()],
        [profile({"mlp": 0.3}), sweep(losses={"mlp": (0.1, -0.2)}, controls=())],
        [sweep(without_interval(tables.sweep_table()))],
        [sweep(tables.lose(tables.sweep_table(), tables.sweep_table().scale == 0))],
        [sweep(tables.sweep_table().query("scale != 0"))],
        [sweep(tables.sweep_table().query("component == 'perpendicular'"))],
        [Result("wizardry", pd.DataFrame({"a": [1]}), {})],
    ],
)
def test_findings_are_whole_sentences_one_for_a_profile_and_two_for_a_sweep(results: list[Result]) -> None:
    found = findings(results)
    kinds = {result.experiment for result in results}
    assert len(found) == ("profile" in kinds) + 2 * ("scaling_sweep" in kinds)
    for sentence in found:
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert not re.search(r"[.!?]\s", sentence)
        assert "nan" not in sentence
        assert "  " not in sentence


def test_nothing_is_claimed_of_what_was_not_measured() -> None:
    assert findings([]) == []
    removal, controls = findings([sweep(controls=())])
    assert "+1.31" in removal
    assert "not measured" in controls


def test_the_most_parallel_site_its_number_and_its_layers_come_from_the_table() -> None:
    (sentence, *_) = findings([profile()])
    assert sentence.startswith(
        "The update most parallel to its reference is that of value, with parallel_fraction 0.620"
    )
    assert "mlp 0.330" in sentence
    table = tables.profile_table()
    rows = table[(table.site == "value") & (table.metric == "parallel_fraction") & table["head"].isna()]
    peak = rows.loc[rows["mean"] >= 0.95 * rows["mean"].max(), "layer"]
    assert f"highest in layers {peak.min()} to {peak.max()}, up to {rows['mean'].max():.3f}" in sentence
    (other, *_) = findings([profile({"value": 0.2, "mlp": 0.5})])
    assert "that of mlp, with parallel_fraction 0.500" in other
    assert "against value 0.200" in other


def test_one_site_ties_and_infinite_layers_are_put_into_right_words() -> None:
    assert findings([profile({"attn": 0.3})])[0].startswith("At attn, the only site profiled, the update has")
    assert "tied at attn and mlp, each with" in findings([profile({"attn": 0.3, "mlp": 0.3, "block": 0.1})])[0]
    result = profile({"attn": 0.3, "mlp": 0.2})
    result.table.loc[(result.table.site == "attn") & (result.table.layer > 2), "mean"] = math.inf
    assert "inf" not in findings([result])[0]
    result.table["mean"] = math.nan
    assert "not measured" in findings([result])[0]


def test_swapping_the_components_turns_the_second_sentence_round() -> None:
    table = tables.sweep_table()
    before, _ = findings([sweep(table)])
    assert "(s_perp = 0) costs more than removing the parallel part (s_par = 0) at every one of the 4 sites" in before
    assert "attn +8.00 against +1.31 (6.1 times)" in before
    swapped = table.replace({"component": {"parallel": "perpendicular", "perpendicular": "parallel"}})
    after, _ = findings([sweep(swapped)])
    assert "(s_perp = 0) costs less than removing the parallel part (s_par = 0) at every one of the 4 sites" in after
    assert "attn +1.31 against +8.00 (0.16 times)" in after


def test_removal_is_described_site_by_site_where_sites_differ() -> None:
    rows = [
        tables.sweep_row("attn", "parallel", 0.0, 0.1, half=0.01),
        tables.sweep_row("attn", "perpendicular", 0.0, 1.0),
        tables.sweep_row("mlp", "parallel", 0.0, 0.9, half=0.05),
        tables.sweep_row("mlp", "perpendicular", 0.0, 0.4),
        tables.sweep_row("value", "parallel", 0.0, -0.1, half=0.2),
        tables.sweep_row("value", "perpendicular", 0.0, 0.05, half=0.2),
        tables.sweep_row("block", "parallel", 0.0, 0.5),
    ]
    sentence, _ = findings([sweep(pd.DataFrame(rows))])
    assert "costs more than removing the parallel part (s_par = 0) at attn, less at mlp, " in sentence
    assert "cannot be told apart from it at value (intervals overlap)" in sentence
    assert "was not compared at block (not measured)" in sentence
    assert "value +0.0500 against −0.100;" in sentence  # no ratio across zero
    assert "block not measured against +0.500" in sentence


def test_the_third_sentence_compares_with_isotropic_and_gain_by_their_intervals() -> None:
    table = tables.sweep_table()
    _, before = findings([sweep(table)])
    assert "costs less than an isotropic change of the same size at every one of the 4 sites" in before
    assert "it costs less than removing the whole update at every one of the 4 sites" in before
    isotropic = (table.control == "isotropic") & (table.site == "attn")
    table.loc[isotropic, ["loss_change", "loss_change_low", "loss_change_high"]] = [0.1, 0.05, 0.15]
    isotropic = (table.control == "isotropic") & (table.site == "mlp")
    table.loc[isotropic, ["loss_change", "loss_change_low", "loss_change_high"]] = [3.3, 2.5, 4.0]
    _, after = findings([sweep(table)])
    assert "costs more than an isotropic change of the same size at attn, less at value and value_excl_self" in after
    assert "cannot be told apart from it at mlp (intervals overlap)" in after


def test_a_single_control_and_missing_intervals_are_said() -> None:
    _, sentence = findings([sweep(controls=["gain"])])
    assert "was not measured beside an isotropic change of the same size; it was not measured beside" in sentence
    assert "it costs less than removing the whole update" in sentence
    assert "(no interval)" in findings([sweep(without_interval(tables.sweep_table()))])[1]


def test_conditions_that_are_not_finite_are_not_compared() -> None:
    table = tables.sweep_table()
    lost = tables.lose(table, (table.site == "mlp") & (table.scale == 0) & (table.component == "perpendicular"))
    sentence, _ = findings([sweep(lost)])
    assert "cannot be compared at mlp (not finite)" in sentence
    assert "mlp not finite against +3.05" in sentence


def test_other_layer_sets_are_neither_mixed_in_nor_hidden() -> None:
    table = tables.sweep_table()
    some = tables.sweep_table(losses={"attn": (90.0, 1.0)}, controls=()).assign(layers="4")
    sentence, _ = findings([sweep(pd.concat([some, table], ignore_index=True))])
    assert "attn +8.00 against +1.31" in sentence
    assert sentence.endswith("; other layer sets or groupings are in the table.")
    assert findings([sweep(table.assign(layers="1-"))])[0].endswith("; layers 1- were edited.")
