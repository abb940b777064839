"""Rank correlations: against scipy and plain regressions on ranks; ties, NaN, intervals, families, blocks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lens_geometry.errors import DataError
from lens_geometry.rank_correlation import Correlation, correlate, correlate_all, correlate_within, spearman

PAIR = Correlation("x", "y")


def plain_partial(x, y, *controls):
    """Residuals of least squares on a constant and the controls' ranks, correlated."""
    rows = [stats.rankdata(v) for v in (x, y, *controls)]
    design = np.column_stack([np.ones(len(x)), *rows[2:]])
    left = [r - design @ np.linalg.lstsq(design, r, rcond=None)[0] for r in rows[:2]]
    return float(np.corrcoef(*left)[0, 1])


@pytest.mark.parametrize("digits", [6, 0])  # 0: many ties
def test_spearman_is_scipys_with_and_without_ties(digits):
    for seed in range(20):
        x, y = np.random.default_rng(seed).normal(size=(2, 15)).round(digits)
        assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)


@pytest.mark.parametrize("controls", [1, 2])
@pytest.mark.parametrize("digits", [6, 0])
def test_a_partial_correlation_is_that_of_the_residuals_of_ranks(controls, digits):
    for seed in range(20):
        values = np.random.default_rng(seed).normal(size=(2 + controls, 18)).round(digits)
        assert spearman(*values) == pytest.approx(plain_partial(*values), abs=1e-9)


def test_a_case_with_a_nan_is_left_out_and_infinity_is_the_largest():
    x, y = np.array([1.0, 2, 3, 4, 5, np.nan, 7]), np.array([2.0, 1, 4, 3, np.inf, 0, np.nan])
    assert spearman(x, y) == pytest.approx(stats.spearmanr([1, 2, 3, 4, 5], [2, 1, 4, 3, 9]).statistic)
    assert correlate({"x": x, "y": y}, PAIR, resamples=10).n == 5


def test_what_cannot_be_told_is_nan():
    rising = np.arange(8.0)
    assert math.isnan(spearman(rising[:3], rising[:3]))
    assert math.isnan(spearman(rising[:4], rising[:4], rising[:4][::-1] ** 2 % 5))  # a control needs one case more
    assert math.isnan(spearman(rising, np.ones(8)))
    assert math.isnan(spearman(np.array([1.0, 4, 2, 3, 6, 5, 8, 7]), np.exp(rising), rising))  # y is its control
    assert spearman(rising, rising**2) == 1.0
    y = np.array([3.0, 1, 2, 5, 4, 8, 6, 7])
    assert spearman(rising, y, np.ones(8)) == pytest.approx(spearman(rising, y))  # a constant explains nothing


@given(
    values=st.lists(st.tuples(*[st.integers(-20, 20)] * 3), min_size=6, max_size=20),
    seed=st.integers(0, 3),
)
@settings(deadline=None, max_examples=60)
def test_nothing_changes_under_rising_maps_and_the_sign_under_falling_ones(values, seed):
    x, y, z = np.array(values, dtype=float).T
    families = [f"family {number % 3}" for number in range(len(x))]

    def numbers(*columns, given=("z",)):
        found = correlate(dict(zip("xyz", columns, strict=True)), Correlation("x", "y", given), families=families,
                          seed=seed, resamples=50)  # fmt: skip
        return [value for value in found if isinstance(value, float)]

    same = numbers(np.exp(x / 7), y**3, 5 * z - 1)
    assert same == pytest.approx(numbers(x, y, z), nan_ok=True, abs=1e-9)
    value, low, high, *_ = numbers(x, y, z)
    turned, turned_low, turned_high, *_ = numbers(-x, y, z)
    assert [turned] == pytest.approx([-value], nan_ok=True, abs=1e-9)
    assert [turned_low, turned_high] == pytest.approx([-high, -low], nan_ok=True, abs=0.2)  # quantiles are values
    assert math.isnan(value) or -1 <= value <= 1


def test_the_interval_is_the_plain_percentile_bootstrap():
    x, y, z = np.random.default_rng(3).normal(size=(3, 24))
    y = y + 0.8 * x
    found = correlate({"x": x, "y": y, "z": z}, Correlation("x", "y", ("z",)), seed=5, resamples=300)
    drawn = np.random.default_rng(5).integers(0, 24, (300, 24))
    plain = sorted(plain_partial(x[row], y[row], z[row]) for row in drawn)
    assert found.low == pytest.approx(plain[math.ceil(0.025 * 300) - 1], abs=1e-9)
    assert found.high == pytest.approx(plain[math.ceil(0.975 * 300) - 1], abs=1e-9)
    assert found.undefined == 0.0
    assert found.low < found.value < found.high


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    truth, inside = 6 / math.pi * math.asin(0.6 / 2), 0  # Spearman of a normal pair with correlation 0.6
    for seed in range(100):
        noise = np.random.default_rng(seed).normal(size=(2, 25))
        x, y = noise[0], 0.6 * noise[0] + 0.8 * noise[1]
        found = correlate({"x": x, "y": y}, PAIR, seed=seed, resamples=400)
        inside += found.low <= truth <= found.high
    assert 0.86 <= inside / 100 <= 0.99


def test_a_difference_is_paired():
    rng = np.random.default_rng(0)
    loss = rng.normal(size=25)
    columns = {"loss": loss, "perp": loss + 0.5 * rng.normal(size=25)}
    columns["error"] = columns["perp"] + 0.02 * rng.normal(size=25)
    found = correlate(columns, Correlation("loss", "perp", minus=("loss", "error")), resamples=500)
    assert found.value == pytest.approx(spearman(loss, columns["perp"]) - spearman(loss, columns["error"]))
    alone = correlate(columns, Correlation("loss", "perp"), resamples=500)
    assert found.high - found.low < 0.5 * (alone.high - alone.low)  # unpaired it would be wider than either


def test_many_undefined_resamples_leave_no_interval():
    x = np.arange(12.0)
    y = np.array([1.0, *[0] * 11])  # a third of the resamples have no variation
    found = correlate({"x": x, "y": y}, PAIR, resamples=400)
    assert 0.25 < found.undefined < 0.45
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert found.value < 0


def test_leaving_out_a_family_shows_what_hangs_on_it():
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(size=20), 10 + np.arange(6)])
    y = np.concatenate([rng.normal(size=20), 10 + np.arange(6)])
    families = ["a"] * 10 + ["b"] * 10 + ["c"] * 6
    found = correlate({"x": x, "y": y}, PAIR, families=families, resamples=100)
    assert (found.n, found.n_families, found.family_of_low) == (26, 3, "c")
    assert found.family_low == pytest.approx(stats.spearmanr(x[:20], y[:20]).statistic)
    assert found.family_high == pytest.approx(
        max(stats.spearmanr(x[keep], y[keep]).statistic for keep in (np.arange(26) >= 10, np.r_[0:10, 20:26]))
    )
    only = correlate({"x": x, "y": y}, PAIR, families=["a"] * 26, resamples=100)
    assert math.isnan(only.family_low)


def test_within_blocks_only_the_order_inside_counts():
    one = {"x": np.array([1.0, 2, 3, 4]), "y": np.array([10.0, 20, 30, 40])}
    other = {"x": np.array([101.0, 102, 103, 104]), "y": np.array([4.0, 3, 2, 1])}
    assert correlate_within([one], [PAIR])[0].value == pytest.approx(1.0)
    assert correlate_within([one, other], [PAIR])[0].value == pytest.approx(0.0)
    assert correlate_within([one, one, other], [PAIR])[0].value == pytest.approx(1 / 3)


def test_within_blocks_is_the_pooled_correlation_of_ranks_within():
    rng = np.random.default_rng(2)
    blocks = [dict(zip("xyz", rng.normal(size=(3, n)), strict=True)) for n in (6, 6, 6)]
    pooled = {name: np.concatenate([stats.rankdata(block[name]) for block in blocks]) for name in "xyz"}
    design = np.column_stack([np.ones(18), pooled["z"]])
    left = [pooled[n] - design @ np.linalg.lstsq(design, pooled[n], rcond=None)[0] for n in "xy"]
    wanted = [Correlation("x", "y", ("z",)), PAIR]
    found = correlate_within(blocks, wanted, families=["a", "a", "b"], resamples=200)[0]
    assert found.value == pytest.approx(np.corrcoef(*left)[0, 1])
    assert (found.n, found.n_families) == (3, 2)
    assert found.low <= found.value <= found.high
    last = correlate_within(blocks[2:], wanted)[0].value
    assert last in (pytest.approx(found.family_low), pytest.approx(found.family_high))


def test_blocks_without_two_cases_are_not_counted():
    whole = {"x": np.arange(5.0), "y": np.arange(5.0)}
    single = {"x": np.array([1.0, np.nan]), "y": np.array([1.0, 2.0])}
    assert correlate_within([whole, single], [PAIR], resamples=10)[0].n == 1
    assert math.isnan(correlate_within([single], [PAIR])[0].value)


def test_quantities_of_different_lengths_are_refused():
    with pytest.raises(DataError, match="different lengths"):
        correlate({"x": np.arange(5.0), "y": np.arange(4.0)}, PAIR)


def test_many_at_once_are_each_as_alone_also_with_gaps_in_one():
    x, y, z = np.random.default_rng(0).normal(size=(3, 14))
    z[3] = np.nan
    columns, families = {"x": x, "y": y, "z": z}, list("aabbccdaabbccd")
    asked = [PAIR, Correlation("x", "z"), Correlation("x", "y", ("z",)), Correlation("x", "y", minus=("x", "z"))]
    options = {"families": families, "resamples": 50}
    assert correlate_all(columns, asked, **options) == [correlate(columns, one, **options) for one in asked]
    assert [one.n for one in correlate_all(columns, asked, **options)] == [14, 13, 13, 13]
    blocks = [{name: values[rows] for name, values in columns.items()} for rows in (slice(6), slice(6, 14))]
    both = correlate_within(blocks, asked, families="ab", resamples=50)
    assert both == [correlate_within(blocks, [one], families="ab", resamples=50)[0] for one in asked]
