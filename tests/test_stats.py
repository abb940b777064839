"""Intervals cover, samples are fair, and neither depends on how the stream was cut."""

import numpy as np
import pytest

from lens_geometry.stats import RunningSummary, TokenSample, bootstrap_interval, poisson_weights, quantiles


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng, hits = np.random.default_rng(0), 0
    for seed in range(200):
        low, high = bootstrap_interval(
            [rng.normal(3.0, 1.0, 30)], lambda x, axis: x.mean(axis), seed=seed, resamples=400
        )
        hits += low < 3.0 < high
    assert 0.88 <= hits / 200 <= 0.99


def test_a_paired_interval_is_narrower_than_the_spread_of_its_parts():
    rng = np.random.default_rng(0)
    base = rng.normal(0.0, 10.0, 50)
    low, high = bootstrap_interval([base + 0.5, base], lambda a, b, axis: a.mean(axis) - b.mean(axis))
    assert low == pytest.approx(0.5)
    assert high == pytest.approx(0.5)


def test_one_sequence_has_no_interval():
    low, high = bootstrap_interval([np.ones(1)], lambda x, axis: x.mean(axis))
    assert np.isnan(low)
    assert np.isnan(high)


def test_the_poisson_bootstrap_agrees_with_the_ordinary_one():
    rng = np.random.default_rng(0)
    values = rng.normal(2.0, 1.0, (60, 1, 1))
    summary = RunningSummary(1, 1, 2000)
    for start in range(0, 60, 7):
        rows = range(start, min(start + 7, 60))
        part = values[rows.start : rows.stop]
        summary.add(np.ones_like(part), part, part**2, poisson_weights(rows, 2000, seed=0))
    found = {name: values[0] for name, values in summary.statistics().items()}
    assert found["mean"][0] == pytest.approx(values.mean())
    assert found["std"][0] == pytest.approx(values.std(ddof=1))
    low, high = bootstrap_interval([values.ravel()], lambda x, axis: x.mean(axis))
    assert found["ci_low"][0] == pytest.approx(low, abs=0.04)
    assert found["ci_high"][0] == pytest.approx(high, abs=0.04)


def fill(size, cuts, mask):
    """The sampled tokens' numbers when the stream is cut at `cuts`."""
    sample, kept = TokenSample(size, seed=3), np.full(size, -1)
    for start, end in zip([0, *cuts], [*cuts, len(mask)], strict=True):
        places, slots = sample.add(range(start, end), mask[start:end])
        kept[slots] = start * mask.shape[1] + places
    return set(kept[: len(sample.priorities)].tolist())


def test_the_sample_is_the_same_however_the_stream_is_cut_and_holds_real_tokens_only():
    mask = np.random.default_rng(0).random((12, 10)) < 0.7
    expected = fill(20, [], mask)
    assert len(expected) == 20
    assert expected <= set(np.flatnonzero(mask).tolist())
    for cuts in ([1, 2, 3], [6], [5, 11]):
        assert fill(20, cuts, mask) == expected


def test_a_small_stream_is_sampled_whole():
    mask = np.ones((2, 5), dtype=bool)
    assert fill(64, [1], mask) == set(range(10))


def test_every_token_has_the_same_chance():
    mask, counts = np.ones((30, 4), dtype=bool), np.zeros(120)
    for seed in range(300):
        sample, kept = TokenSample(12, seed), np.zeros(12, dtype=int)
        for start in range(0, 30, 10):
            places, slots = sample.add(range(start, start + 10), mask[start : start + 10])
            kept[slots] = start * 4 + places
        counts[kept] += 1
    assert counts.mean() == 30
    assert counts.std() < 2 * np.sqrt(30)


def test_quantiles_put_infinity_last_and_leave_nan_out():
    values = np.array([[1.0, 2.0, 3.0, np.inf, np.nan], [np.nan] * 5])
    found = quantiles(values)
    assert found[0].tolist() == [1.0, 1.0, 1.0, 2.0, 3.0, np.inf, np.inf]
    assert np.isnan(found[1]).all()
