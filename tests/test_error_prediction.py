"""Which error predicts the damage: correlations against scipy, verdicts, layers, and what is left out."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from study_tables import report, reports, study

from lens_geometry.errors import DataError, ResultError
from lens_geometry.experiments.error_prediction import error_prediction
from lens_geometry.experiments.study_rows import lost_row, study_rows, study_table
from lens_geometry.prediction_verdict import find, prediction_sentence, verdict
from lens_geometry.rank_correlation import spearman
from lens_geometry.results import Result

FEW = {"resamples": 100}


def row_of(result, **wanted):
    found = find(result.table, **{"question": "variants", "mode": "local", "site": "pooled",
                                  "against": "loss_change", **wanted})  # fmt: skip
    assert found is not None
    return found


def test_the_rows_of_a_variant_are_means_over_layers_and_over_sites():
    one = report([0.1, 0.3], [0.01, 0.02], 0.5, layer_losses=[0.2, 0.25])
    one.table.loc[(one.table["site"] == "attn") & (one.table["metric"] == "error"), "mean"] *= 3
    table = study_table(list(study_rows("rtn:bits=4", "rtn", one)))
    whole = table[table["layer"].isna()].set_index(["mode", "site", "predictor"])
    error = np.hypot([0.1, 0.3], [0.01, 0.02]).mean()
    assert whole.loc[("local", "block", "error"), "value"] == pytest.approx(error)
    assert whole.loc[("local", "pooled", "error"), "value"] == pytest.approx((3 + 1 + 1 + 1) / 4 * error)
    assert whole.loc[("propagated", "pooled", "perpendicular_error"), "value"] == pytest.approx(0.2)
    assert whole.loc[("weights", "", "weight_error"), "value"] == pytest.approx(error**0.5)
    assert (whole["loss_change"] == 0.5).all()
    assert np.allclose(whole["loss_change_low"], 0.45)
    layers = table[table["layer"].notna()]
    assert set(layers["mode"]) == {"local", "weights"}
    assert layers[layers["layer"] == 1]["loss_change"].unique().tolist() == [0.25]
    assert not table.duplicated(["variant", "mode", "site", "layer", "predictor"]).any()


def test_a_variant_with_losses_that_are_not_finite_says_so():
    table = study_table([*study_rows("a", "a", report([0.1], [0.1], 0.5, lost=7))])
    assert set(table["status"]) == {"nonfinite"}
    assert "7 losses" in table["reason"].iloc[0]
    assert set(study_table([*study_rows("a", "a", report([0.0], [0.0], 0.0))])["status"]) == {"no_effect"}


def test_correlations_are_scipys_on_the_studys_numbers():
    made = study(n=12)
    found = error_prediction(made, **FEW)
    part = made.table[(made.table["mode"] == "local") & (made.table["site"] == "mlp") & made.table["layer"].isna()]
    wide = part.pivot(index="variant", columns="predictor", values="value")
    loss = part.drop_duplicates("variant").set_index("variant")["loss_change"].reindex(wide.index)
    for name in wide:
        row = row_of(found, site="mlp", kind="spearman", predictor=name)
        assert row["value"] == pytest.approx(stats.spearmanr(loss, wide[name]).statistic)
        assert row["low"] <= row["value"] <= row["high"]
        assert (row["n"], row["n_families"]) == (12, 6)
    partial = row_of(found, site="mlp", kind="partial", predictor="perpendicular_error", given="error")
    assert partial["value"] == pytest.approx(spearman(loss, wide["perpendicular_error"], wide["error"]))
    one, other = (row_of(found, site="mlp", kind="spearman", predictor=n) for n in ("perpendicular_error", "error"))
    difference = row_of(found, site="mlp", kind="difference")
    assert difference["value"] == pytest.approx(one["value"] - other["value"])
    weights = row_of(found, site="mlp", kind="spearman", predictor="weight_error")
    assert weights["value"] > 0.5
    assert set(found.table["question"]) == {"variants", "layers"}


def test_the_verdict_follows_what_the_loss_was_made_from():
    whole = error_prediction(reports(of="error", noise=0.0, n=30), **FEW)
    assert row_of(whole, kind="spearman", predictor="error")["value"] > 0.99
    assert row_of(whole, kind="difference")["verdict"] in ("worse", "not_better")
    perpendicular = error_prediction(reports(of="perpendicular_error", noise=0.0, n=30), **FEW)
    assert row_of(perpendicular, kind="difference")["verdict"] == "better"
    assert row_of(perpendicular, kind="partial", predictor="perpendicular_error", given="error")["low"] > 0.5
    sentence = prediction_sentence(perpendicular.table)
    assert "predicts better than the whole error" in sentence
    assert "Over 30 variants of 6 kinds" in sentence
    assert perpendicular.meta["verdicts"][0] == sentence


def test_layers_are_ordered_within_their_variant():
    found = error_prediction(reports(of="error", noise=0.0), **FEW)
    row = row_of(found, question="layers", kind="spearman", predictor="error")
    assert row["value"] == pytest.approx(1.0)
    assert row["n"] == 24
    assert row_of(found, question="layers", site="value", kind="spearman", predictor="parallel_error")["value"] < 0.9


def test_layers_that_a_variant_leaves_alone_are_not_counted():
    made = reports(n=8, noise=0.0)
    made["blank:layers=2"] = report([0, 0, 1, 0], [0, 0, 1, 0], 3.0, layer_losses=[0, 0, 3.0, 0])
    row = row_of(error_prediction(made, **FEW), question="layers", kind="spearman", predictor="error")
    assert row["n"] == 8  # the blanked one has one layer left, which has no order


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((0.1, 0.05, 0.2, 0.04, 0.3), "better"),
        ((0.1, 0.05, 0.2, -0.04, 0.3), "open"),  # one family carries it
        ((-0.1, -0.2, -0.05, -0.3, -0.01), "worse"),
        ((0.0, -0.02, 0.03, -0.01, 0.04), "not_better"),
        ((0.0, -0.02, 0.03, -0.01, 0.2), "open"),
        ((0.1, 0.05, 0.2, math.nan, math.nan), "better"),
        ((0.1, math.nan, math.nan, 0.1, 0.1), "open"),
    ],
)
def test_the_verdict_needs_the_interval_and_every_family(numbers, expected):
    assert verdict(dict(zip(("value", "low", "high", "family_low", "family_high"), numbers, strict=True))) == expected


def test_lost_variants_are_left_out_named_and_counted():
    lost = [lost_row("awq:bits=4", "awq", "failed", "llmcompressor is not installed")]
    with pytest.warns(UserWarning, match="awq:bits=4 .llmcompressor is not installed"):
        found = error_prediction(study(*lost, n=10), **FEW)
    assert found.meta["counts"] == {"variants": 11, "variants_used": 10, "variants_lost": 1}
    assert row_of(found, kind="spearman", predictor="error")["n"] == 10


def test_a_tie_of_all_orders_cannot_be_told_apart():
    made = {f"rtn:bits={n}": report([0.1 * n], [0.01 * n], 0.1 * n) for n in range(1, 14)}
    with pytest.warns(UserWarning, match="all variants are of one family"):
        found = error_prediction(made, **FEW)
    partial = row_of(found, kind="partial", predictor="perpendicular_error", given="error")
    assert math.isnan(partial["value"])
    row = row_of(found, kind="difference")
    assert (row["value"], row["low"], row["high"], row["verdict"]) == (0.0, 0.0, 0.0, "not_better")
    assert "what cannot be told" in prediction_sentence(found.table)


def test_what_is_no_study_is_refused():
    made = reports(n=3)
    with pytest.raises(DataError, match="3 of 3 variants"):
        error_prediction(made)
    with pytest.raises(DataError, match="no study"):
        error_prediction(next(iter(made.values())))
    more = reports(n=6)
    next(iter(more.values())).meta["data"] = {"tokens_sha256": "another"}
    with pytest.raises(DataError, match="different texts"):
        error_prediction(more)
    with pytest.raises(DataError, match="the same label"):
        error_prediction(list(reports(n=6).values()))
    with pytest.raises(ResultError, match="lacks the column"):
        error_prediction(Result("compression_study", pd.DataFrame({"variant": ["a"]})))


def test_a_handful_of_variants_has_no_verdict():
    row = {"value": 0.0, "low": -0.02, "high": 0.03, "family_low": -0.01, "family_high": 0.04, "question": "variants"}
    assert verdict({**row, "n": 11}) == "open"
    assert verdict({**row, "n": 12}) == "not_better"
    assert verdict({**row, "question": "layers", "n": 4}) == "not_better"
