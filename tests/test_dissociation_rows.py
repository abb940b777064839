"""The rows hold what the arrays hold, and the verdict is the answer that was built in."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import doses as made
import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from lens_geometry.dissociation_verdict import verdict
from lens_geometry.errors import ResultError
from lens_geometry.experiments.damages import contrast, ratio
from lens_geometry.experiments.dissociation_rows import as_table, rows
from lens_geometry.stats import two_way_interval

DOSES = made.doses()
TABLE = as_table(rows(DOSES))
VERDICTS = {answer: verdict(as_table(rows(made.doses(answer, noise=0.2, seed=1)))) for answer in made.COSTS}


def one(table: pd.DataFrame, quantity: str, kind: str, regime: str = "", displacement: float | None = None, seed=None):
    """The one row of these names."""
    chosen = (table["quantity"] == quantity) & (table["kind"] == kind) & (table["regime"] == regime)
    chosen &= table["seed"].isna() if seed is None else (table["seed"] == seed).fillna(False)
    if displacement is not None:
        chosen &= table["displacement"] == displacement
    (row,) = table[chosen].to_dict("records")
    return row


def test_damage_is_the_change_per_token_and_the_drop_of_margin_and_accuracy():
    sums, total = DOSES.sums["angular"][2], DOSES.counts.sum()
    row = one(TABLE, "loss", "angular", displacement=0.2)
    assert row["value"] == pytest.approx((sums.mean(0) - DOSES.base_sums).sum() / total)
    assert row["level"] == pytest.approx(sums.mean(0).sum() / total)
    assert row["base"] == pytest.approx(DOSES.base_sums.sum() / total)
    single = one(TABLE, "loss", "angular", displacement=0.2, seed=3)
    assert single["value"] == pytest.approx((sums[3] - DOSES.base_sums).sum() / total)
    margins = DOSES.margins["magnitude"][1]
    row = one(TABLE, "margin", "magnitude", displacement=0.1)
    assert row["value"] == pytest.approx(DOSES.base_margins.mean() - margins.mean())
    assert row["level"] == pytest.approx(margins.mean())
    row = one(TABLE, "accuracy", "magnitude", displacement=0.1)
    assert row["value"] == pytest.approx((DOSES.base_margins > 0).mean() - (margins > 0).mean())
    assert (row["n_seeds"], row["n_items"]) == (5, 80)


def test_every_interval_holds_its_value():
    for row in TABLE.dropna(subset=["value", "low"]).to_dict("records"):
        assert row["low"] <= row["value"] <= row["high"]


def test_contrasts_ratios_and_the_crossover_are_of_the_damages():
    angular, magnitude = (one(TABLE, "loss", kind, displacement=0.1)["value"] for kind in ("angular", "magnitude"))
    assert one(TABLE, "loss", "difference", displacement=0.1)["value"] == pytest.approx(angular - magnitude)
    assert one(TABLE, "loss", "ratio", displacement=0.1)["value"] == pytest.approx(angular / magnitude)
    of_loss = (angular - magnitude) / (angular + magnitude)
    assert one(TABLE, "loss", "contrast", displacement=0.1)["value"] == pytest.approx(of_loss)
    of_margin = one(TABLE, "margin", "contrast", displacement=0.1)["value"]
    assert one(TABLE, "margin", "crossover", displacement=0.1)["value"] == pytest.approx((of_loss - of_margin) / 2)


def test_regimes_pool_the_displacements_up_to_the_median_and_above():
    singles = [one(TABLE, "margin", "contrast", displacement=d)["value"] for d in made.DISPLACEMENTS]
    expected = {"low": np.mean(singles[:2]), "high": np.mean(singles[2:]), "all": np.mean(singles)}
    for regime, value in expected.items():
        assert one(TABLE, "margin", "contrast", regime)["value"] == pytest.approx(value)
    damages = {kind: one(TABLE, "loss", kind, "high")["value"] for kind in ("angular", "magnitude")}
    assert damages["angular"] == pytest.approx(
        np.mean([one(TABLE, "loss", "angular", displacement=d)["value"] for d in (0.2, 0.4)])
    )
    assert one(TABLE, "loss", "ratio", "high")["value"] == pytest.approx(damages["angular"] / damages["magnitude"])
    moved = as_table(rows(DOSES, low_regime=0.2))
    assert one(moved, "margin", "contrast", "high")["value"] == pytest.approx(singles[3])
    assert "high" not in set(as_table(rows(DOSES, low_regime=9.0))["regime"])


def test_tests_over_seeds_and_items_are_scipys_and_the_family_is_every_difference():
    row = one(TABLE, "loss", "difference", displacement=0.2)
    by_seed = {k: (DOSES.sums[k][2] - DOSES.base_sums).sum(-1) / DOSES.counts.sum() for k in DOSES.sums}
    assert row["p_seeds"] == pytest.approx(scipy_stats.ttest_rel(by_seed["angular"], by_seed["magnitude"]).pvalue)
    by_item = {k: DOSES.sums[k][2].mean(0) / DOSES.counts for k in DOSES.sums}
    assert row["p_items"] == pytest.approx(scipy_stats.ttest_rel(by_item["angular"], by_item["magnitude"]).pvalue)
    apart = by_item["angular"] - by_item["magnitude"]
    assert row["cohens_d_items"] == pytest.approx(apart.mean() / apart.std(ddof=1))
    assert row["p_items_wilcoxon"] == pytest.approx(scipy_stats.wilcoxon(apart).pvalue)
    family = TABLE[(TABLE["kind"] == "difference") & (TABLE["regime"] == "") & TABLE["p_items"].notna()]
    assert len(family) > 8  # loss and margin at four displacements, and accuracy where it moves
    assert row["p_items_bonferroni"] == pytest.approx(min(1, len(family) * row["p_items"]))
    assert family["p_items_holm"].min() == pytest.approx(len(family) * family["p_items"].min())
    assert TABLE.loc[TABLE["regime"] != "", "p_items_holm"].isna().all()


@pytest.mark.parametrize("answer", ["dissociation", "reversed", "one-sided", "none"])
def test_the_verdict_is_the_built_in_answer(answer):
    found = VERDICTS[answer]
    assert list(found["regime"]) == ["all", "low", "high"] * 2
    of_margin = found[found["quantity"] == "margin"]
    assert set(of_margin["verdict"]) == {answer}
    whole = of_margin.iloc[0]
    assert whole["crossover"] == pytest.approx((whole["loss_contrast"] - whole["contrast"]) / 2)
    inside = whole["crossover_low"] <= 0 <= whole["crossover_high"]
    assert inside == (answer in ("one-sided", "none"))


@pytest.mark.slow
def test_pure_noise_is_no_dissociation_nearly_always():
    found = []
    for seed in range(8):
        doses = made.doses("none", seed=seed, pairs=40, sequences=20, displacements=(0.2, 0.4))
        found += verdict(as_table(rows(doses, seed=seed))).query("regime == 'all'")["verdict"].tolist()
    assert found.count("none") >= 13
    assert not {"dissociation", "reversed"} & set(found)


def test_sentences_say_which_side():
    of = {answer: VERDICTS[answer].iloc[0]["sentence"] for answer in made.COSTS}
    assert of["dissociation"].startswith("angular hurts the loss more, magnitude hurts the margin more (contrasts +0.")
    assert of["reversed"].startswith("magnitude hurts the loss more, angular hurts the margin more")
    assert of["one-sided"].startswith("angular hurts both the loss and the margin more")
    assert of["none"].startswith("hardly any difference, neither in the loss nor in the margin")
    calm = made.doses("none", seed=1)
    mixed = replace(DOSES, margins=calm.margins, base_margins=calm.base_margins)
    (found,) = verdict(as_table(rows(mixed))).query("quantity == 'margin' and regime == 'all'").to_dict("records")
    assert found["verdict"] == "one-sided"
    assert found["sentence"].startswith("angular hurts the loss more; hardly any difference in the margin")


def test_without_pairs_nothing_is_decided():
    table = as_table(rows(made.doses(pairs=0)))
    assert set(table["quantity"]) == {"loss"}
    found = verdict(table)
    assert set(found["verdict"]) == {"undecided"}
    assert found["sentence"][0].startswith("angular hurts the loss more; no minimal pairs were scored (contrast +0.")


def test_one_seed_has_intervals_over_items_and_no_test_over_seeds():
    table = as_table(rows(made.doses(seeds=1)))
    row = one(table, "loss", "difference", displacement=0.2)
    assert math.isnan(row["p_seeds"])
    assert row["p_items"] < 0.05
    assert row["low"] < row["value"] < row["high"]
    single, pooled = (one(table, "loss", "angular", displacement=0.2, seed=seed) for seed in (0, None))
    assert (single["value"], single["low"], single["high"]) == (pooled["value"], pooled["low"], pooled["high"])
    assert verdict(table)["verdict"][0] == "dissociation"


def test_one_seed_and_one_sequence_decide_nothing():
    table = as_table(rows(made.doses(seeds=1, sequences=1)))
    assert math.isnan(one(table, "loss", "contrast", "all")["low"])
    assert math.isfinite(one(table, "margin", "contrast", "all")["low"])
    found = verdict(table).iloc[0]
    assert found["verdict"] == "undecided"
    assert found["sentence"].startswith("there is no interval for the loss; magnitude hurts the margin more")


def test_one_impossible_condition_leaves_its_displacement_out_of_every_comparison():
    measured = copy.deepcopy(DOSES.measured)
    measured["magnitude"][3][2] = made.ran(math.nan, 0, "impossible")
    sums, margins = copy.deepcopy((DOSES.sums, DOSES.margins))
    sums["magnitude"][3, 2] = margins["magnitude"][3, 2] = math.nan
    table = as_table(rows(replace(DOSES, sums=sums, margins=margins, measured=measured)))
    row = one(table, "loss", "magnitude", displacement=0.4)
    assert (row["status"], row["n_seeds"]) == ("impossible", 4)
    kept = np.delete(sums["magnitude"][3], 2, axis=0)
    assert row["value"] == pytest.approx((kept.mean(0) - DOSES.base_sums).sum() / DOSES.counts.sum())
    assert math.isnan(row["low"])
    lost = one(table, "loss", "magnitude", displacement=0.4, seed=2)
    assert (lost["status"], lost["n_seeds"], lost["n_places"]) == ("impossible", 0, 0)
    assert math.isnan(lost["value"])
    for kind in ("difference", "ratio", "contrast"):
        row = one(table, "loss", kind, displacement=0.4)
        assert row["status"] == "magnitude impossible"
        assert np.isnan([row["value"], row["low"], row["high"], row["p_items"]]).all()
        assert row["n_left_out"] == 1
    singles = [one(table, "loss", "contrast", displacement=d)["value"] for d in made.DISPLACEMENTS[:3]]
    whole = one(table, "loss", "contrast", "all")
    assert whole["value"] == pytest.approx(np.mean(singles))
    assert (whole["n_left_out"], whole["status"]) == (1, "ok")
    assert verdict(table)["n_left_out"].tolist()[0] == 1


def test_a_margin_that_is_not_finite_is_lost_for_pairs_alone_and_for_the_crossover():
    margins = copy.deepcopy(DOSES.margins)
    margins["angular"][0, 1, 7] = math.nan
    table = as_table(rows(replace(DOSES, margins=margins)))
    assert one(table, "loss", "contrast", displacement=0.05)["status"] == "ok"
    for quantity in ("margin", "accuracy"):
        assert one(table, quantity, "angular", displacement=0.05)["status"] == "nonfinite"
        assert one(table, quantity, "contrast", displacement=0.05)["status"] == "angular nonfinite"
        assert one(table, quantity, "crossover", displacement=0.05)["status"] == "angular nonfinite"
    row = one(table, "margin", "angular", displacement=0.05, seed=1)
    assert (row["n_items"], row["status"]) == (79, "nonfinite")
    others = np.arange(80) != 7
    dropped = DOSES.base_margins[others] - margins["angular"][0, 1, others]
    assert row["value"] == pytest.approx(dropped.mean())


def test_nothing_comparable_is_said_to_be_so():
    measured = copy.deepcopy(DOSES.measured)
    measured["angular"] = [[made.ran(math.nan, 0, "no_effect")] * 5] * 4
    table = as_table(rows(replace(DOSES, measured=measured)))
    row = one(table, "loss", "contrast", "all")
    assert (row["status"], row["n_left_out"]) == ("incomparable", 4)
    assert set(verdict(table)["verdict"]) == {"undecided"}


def test_what_the_perturbation_did_is_pooled_over_seeds():
    measured = copy.deepcopy(DOSES.measured)
    measured["angular"][0] = [made.ran(0.05 + 0.01 * s, 100 * (s + 1)) | {"n_clipped": s} for s in range(5)]
    measured["angular"][0][4]["displacement_max_error"] = 0.02
    row = one(as_table(rows(replace(DOSES, measured=measured))), "loss", "angular", displacement=0.05)
    expected = sum((0.05 + 0.01 * s) * 100 * (s + 1) for s in range(5)) / 1500
    assert row["displacement_mean"] == pytest.approx(expected)
    assert (row["displacement_max_error"], row["n_clipped"], row["n_places"]) == (0.02, 10, 1500)


def test_a_contrast_runs_from_only_magnitude_to_only_angular():
    found = contrast(np.array([2.0, 0.0, 3.0, 0.0, np.nan]), np.array([0.0, 2.0, 1.0, 0.0, 1.0]))
    assert found.tolist() == pytest.approx([1.0, -1.0, 0.5, 0.0, math.nan], nan_ok=True)


def test_a_ratio_without_a_denominator_is_infinite_or_undefined():
    angular, magnitude = np.array([2.0, 2.0, -1.0, -1.0, 0.0]), np.array([1.0, -0.1, 0.5, -0.2, 0.0])
    assert ratio(angular, magnitude).tolist() == pytest.approx([2.0, math.inf, -2.0, math.nan, math.nan], nan_ok=True)
    assert ratio(angular, magnitude, -math.inf)[3:].tolist() == [-math.inf] * 2


def test_the_interval_of_a_ratio_covers():
    rng, hits = np.random.default_rng(0), 0
    for seed in range(200):
        angular, magnitude = (
            mean * (1 + 0.1 * rng.normal(size=(6, 1)) + 0.5 * rng.normal(size=(6, 30))) for mean in (5.0, 1.0)
        )
        low, high = two_way_interval([angular, magnitude], ratio, seed=seed, resamples=300)
        hits += bool(low < 5.0 < high)
    assert 0.92 <= hits / 200 <= 0.995


def test_a_ratio_is_open_upwards_where_its_denominator_may_be_zero():
    doses = made.doses(pairs=0, noise=0.1)
    nothing = doses.base_sums + np.random.default_rng(0).normal(0, 1.0, doses.sums["angular"].shape)
    table = as_table(rows(replace(doses, sums={**doses.sums, "magnitude": nothing})))
    row = one(table, "loss", "ratio", displacement=0.4)
    assert row["high"] == math.inf
    assert row["low"] > 1.0
    neither = as_table(rows(replace(doses, sums=dict.fromkeys(doses.sums, nothing))))
    row = one(neither, "loss", "ratio", displacement=0.4)
    assert (row["low"], row["high"]) == (-math.inf, math.inf)


def test_another_seed_moves_the_ends_alone_and_the_same_one_nothing():
    again, other = as_table(rows(DOSES)), as_table(rows(DOSES, seed=1))
    pd.testing.assert_frame_equal(TABLE, again)
    assert (TABLE["value"].dropna() == other["value"].dropna()).all()
    moved = TABLE["low"] != other["low"]
    assert moved[TABLE["quantity"].isin(["loss", "margin"]) & TABLE["low"].notna()].mean() > 0.9


def test_a_table_of_something_else_has_no_verdict():
    with pytest.raises(ResultError, match="dissociation table lacks the column"):
        verdict(pd.DataFrame({"loss": [1.0]}))
