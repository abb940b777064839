"""Paired tests and corrections against textbook numbers; intervals over seeds and items against plain loops."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from lens_geometry.paired_tests import bonferroni, holm, paired_test
from lens_geometry.stats import percentile_interval, two_way_interval, two_way_means

BEFORE, AFTER = [10.0, 12.0, 9.0, 11.0, 13.0], [8.0, 11.0, 8.0, 7.0, 11.0]  # differences 2, 1, 1, 4, 2


def test_t_d_and_p_are_those_computed_by_hand():
    found = paired_test(BEFORE, AFTER)
    spread = math.sqrt((0.0 + 1.0 + 1.0 + 4.0 + 0.0) / 4)  # around the mean difference 2
    assert found.n == 5
    assert found.difference == 2.0
    assert found.cohens_d == pytest.approx(2 / spread)
    assert found.t == pytest.approx(2 / (spread / math.sqrt(5)))
    assert found.p == pytest.approx(2 * scipy_stats.t.sf(found.t, 4))
    assert paired_test(AFTER, BEFORE).t == -found.t


def test_the_signed_rank_p_is_exact_for_few_differences():
    assert paired_test([1.0, 2.5, 3.0, 4.5, 5.5], [0.0, 0.5, 2.7, 0.5, 0.5]).p_wilcoxon == pytest.approx(2 / 2**5)


def test_what_cannot_be_told_is_nan_and_warns_nobody(recwarn):
    for one, other in (
        ([1.0], [0.5]),
        ([], []),
        ([1.0, 2.0, 3.0], [0.0, 1.0, 2.0]),
        ([0.1, 0.2, 0.3], [0.0, 0.1, 0.2]),
    ):
        found = paired_test(one, other)
        assert np.isnan([found.t, found.p, found.cohens_d]).all()
    assert math.isnan(paired_test([1.0, 1.0], [1.0, 1.0]).p_wilcoxon)
    assert paired_test([1.0, 1.0], [1.0, 1.0]).difference == 0.0
    assert not recwarn.list


def test_pairs_with_something_missing_are_left_out_and_not_counted():
    found = paired_test([*BEFORE, math.nan, 7.0], [*AFTER, 3.0, math.inf])
    assert found == paired_test(BEFORE, AFTER)


def test_holm_and_bonferroni_are_the_textbooks():
    p = [0.01, 0.04, 0.03, 0.005]
    assert bonferroni(p) == pytest.approx([0.04, 0.16, 0.12, 0.02])
    assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert (holm(p) <= bonferroni(p)).all()
    assert holm([0.5, 0.9]).tolist() == [1.0, 1.0]


def test_a_test_that_was_not_made_is_not_corrected_for():
    p = [0.01, math.nan, 0.04]
    assert bonferroni(p).tolist() == pytest.approx([0.02, math.nan, 0.08], nan_ok=True)
    assert holm(p).tolist() == pytest.approx([0.02, math.nan, 0.04], nan_ok=True)
    assert np.isnan(holm([math.nan])).all()
    assert holm([]).tolist() == []


def test_crossed_means_are_those_of_a_plain_loop_over_the_same_draws():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(2, 3, 7)), rng.random((1, 7))
    means, of_weights = two_way_means([values, weights], seed=5, resamples=20)
    seeds = np.random.default_rng((5, 0)).multinomial(3, [1 / 3] * 3, 20)
    items = np.random.default_rng((5, 1, 0)).multinomial(7, [1 / 7] * 7, 20)
    further = [math.sqrt(n / (n - 1)) * scipy_stats.t.ppf(0.975, n - 1) / 1.959964 for n in (3, 7)]
    for draw in range(20):
        total, of_items = np.zeros(2), 0.0
        for item in range(7):
            often = 1 + further[1] * (items[draw, item] - 1)
            of_items += often * weights[0, item] / 7
            for one in range(3):
                total += (1 + further[0] * (seeds[draw, one] - 1)) * often * values[:, one, item] / 21
        assert means[draw] == pytest.approx(total)
        assert of_weights[draw] == pytest.approx(of_items)


@pytest.mark.parametrize("n", [3, 5, 30])
def test_the_interval_of_a_few_numbers_is_about_students(n):
    values = np.random.default_rng(n).normal(size=(n, 1))
    low, high = two_way_interval([values], lambda mean: mean, resamples=8000)
    expected = scipy_stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / math.sqrt(n)
    assert (high - low) / 2 == pytest.approx(expected, rel=0.12)


def test_populations_are_drawn_apart_and_seeds_together():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4, 9))
    one, same, other = two_way_means([values, values, values], [0, 0, 1], seed=1, resamples=50)
    assert (one == same).all()
    assert not (one == other).any()
    of_seeds = np.arange(4.0)[:, None] * np.ones((4, 9))
    one, other = two_way_means([of_seeds, of_seeds], [0, 1], resamples=50)
    assert one == pytest.approx(other)


def test_the_spread_is_that_of_seeds_and_items_together():
    rng = np.random.default_rng(0)
    seeds, items = rng.normal(size=(40, 1)), rng.normal(size=(1, 60))
    (means,) = two_way_means([seeds + items], resamples=20_000)
    expected = math.sqrt(seeds.var(ddof=1) / 40 + items.var(ddof=1) / 60)
    assert means.std() == pytest.approx(expected * 1.03, rel=0.02)  # as t adds to a normal interval of 40 and of 60


@pytest.mark.parametrize("shape", [(1, 30), (30, 1)])
def test_with_one_seed_items_are_drawn_and_with_one_item_seeds(shape):
    values = np.random.default_rng(0).normal(size=shape)
    low, high = two_way_interval([values], lambda mean: mean, resamples=4000)
    expected = 2.05 * values.std(ddof=1) / math.sqrt(30)
    assert (high - low) / 2 == pytest.approx(expected, rel=0.06)


def test_one_seed_and_one_item_have_no_interval_nor_has_what_is_not_finite():
    assert np.isnan(two_way_interval([np.ones((1, 1))], lambda mean: mean)).all()
    values = np.ones((2, 3, 4))
    values[1, 0, 2] = math.nan
    low, high = two_way_interval([values], lambda mean: mean)
    assert low[0] == high[0] == 1.0
    assert np.isnan([low[1], high[1]]).all()


def test_the_crossed_interval_covers_about_as_often_as_it_says():
    rng, hits = np.random.default_rng(1), 0
    for seed in range(300):
        values = 3.0 + rng.normal(size=(5, 1)) + rng.normal(size=(1, 20)) + rng.normal(size=(5, 20))
        low, high = two_way_interval([values], lambda mean: mean, seed=seed, resamples=300)
        hits += bool(low < 3.0 < high)
    assert 0.91 <= hits / 300 <= 0.99


def test_infinite_draws_are_the_largest():
    low, high = percentile_interval(np.array([1.0] * 90 + [math.inf] * 10))
    assert (low, high) == (1.0, math.inf)
