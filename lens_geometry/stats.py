"""Intervals and running summaries.

Sequences, not tokens, are what is resampled: the tokens of one text depend on each other.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
QUANTILES = (0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95)


def bootstrap_interval(
    samples: Sequence[Floats],
    statistic: Callable[..., Floats],
    *,
    seed: int = 0,
    resamples: int = 2000,
    confidence: float = CONFIDENCE,
) -> tuple[float, float]:
    """Percentile interval (95 %) of a statistic of paired samples, by resampling their common first axis.

    `statistic(*samples, axis)` reduces `axis`. With fewer than two items there is no interval: (nan, nan).

    >>> low, high = bootstrap_interval([np.arange(10.0)], lambda x, axis: x.mean(axis))
    >>> low < 4.5 < high
    True
    """
    if len(samples[0]) < 2:
        return float("nan"), float("nan")
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # all resamples alike: the interval is a point
        found = stats.bootstrap(
            samples, statistic, paired=True, vectorized=True, n_resamples=resamples, confidence_level=confidence,
            method="percentile", rng=np.random.default_rng(seed),
        )  # fmt: skip
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def resampled_interval(
    items: int, statistic: Callable[[NDArray[np.intp]], float], *, seed: int = 0, resamples: int = 400
) -> tuple[float, float]:
    """Percentile interval (95 %) of a statistic of item numbers, drawn with replacement.

    With fewer than two items there is no interval: (nan, nan).
    """
    if items < 2:
        return float("nan"), float("nan")
    drawn = np.random.default_rng(seed).integers(0, items, (resamples, items))
    with np.errstate(all="ignore"):
        found = np.array([statistic(row) for row in drawn])
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.nanpercentile(found, (tail, 100 - tail))
    return float(low), float(high)


class TokenSample:
    """A uniform sample of at most `size` tokens from a stream of sequences; the same whatever the batches.

    Each token gets a random priority from its sequence's own generator, and the lowest ones stay. `add`
    says which tokens of a batch enter the sample and in which slot.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.priorities = np.empty(0)

    def add(self, sequences: Sequence[int], mask: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """`(places, slots)`: flat indices into [sequence, pos] of the tokens that enter, and their slots."""
        drawn = [np.random.default_rng((self.seed, 0, s)).random(mask.shape[1]) for s in sequences]
        places = np.flatnonzero(mask)
        fresh = np.stack(drawn).reshape(-1)[places]
        kept = len(self.priorities)
        merged = np.concatenate([self.priorities, fresh])
        stay = np.sort(np.argsort(merged, kind="stable")[: self.size])
        entering = stay[stay >= kept] - kept
        free = np.setdiff1d(np.arange(min(self.size, len(merged))), stay[stay < kept])
        self.priorities = np.concatenate([self.priorities, np.empty(len(free) - (kept - (stay < kept).sum()))])
        self.priorities[free] = fresh[entering]
        return places[entering], free


def poisson_weights(sequences: Sequence[int], replicates: int, seed: int) -> Floats:
    """How often each sequence stands in each bootstrap replicate, [replicate, sequence].

    The bootstrap of a stream: counts that are Poisson(1) per sequence stand for drawing with replacement,
    and need neither the number of sequences nor the sequences themselves.
    """
    rows = [np.random.default_rng((seed, 1, s)).poisson(1.0, replicates) for s in sequences]
    return np.stack(rows, 1).astype(np.float64)


class RunningSummary:
    """Mean, spread and bootstrap interval of per-token numbers, in memory that does not grow with them.

    Fed with sums per sequence; all arrays are [sequence, group, metric].
    """

    def __init__(self, groups: int, metrics: int, replicates: int) -> None:
        self.count, self.total, self.square = (np.zeros((groups, metrics)) for _ in range(3))
        self.infinite, self.undefined = (np.zeros((groups, metrics), dtype=np.int64) for _ in range(2))
        self.sequences = 0
        self.replicate_count, self.replicate_total = (np.zeros((replicates, groups, metrics)) for _ in range(2))

    def add(self, counts: Floats, totals: Floats, squares: Floats, weights: Floats) -> None:
        """Add a batch: per sequence how many finite numbers, their sum, the sum of their squares."""
        self.sequences += len(counts)
        self.count += counts.sum(0)
        self.total += totals.sum(0)
        self.square += squares.sum(0)
        self.replicate_count += np.tensordot(weights, counts, 1)
        self.replicate_total += np.tensordot(weights, totals, 1)

    def means(self) -> tuple[Floats, Floats]:
        """The mean, [1 + group, metric], and that of each replicate, [replicate, 1 + group, metric]; pooled first."""
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = _pooled_first(self.total) / _pooled_first(self.count)
            replicates = _pooled_first(self.replicate_total, 1) / _pooled_first(self.replicate_count, 1)
        if self.sequences < 2:
            replicates = np.full_like(replicates, np.nan)  # one sequence says nothing of how sequences differ
        return mean, replicates

    def statistics(self) -> dict[str, Floats]:
        """mean, std, ci_low and ci_high, each [1 + group, metric]: all groups pooled, then each by itself."""
        mean, replicates = self.means()
        n, square = _pooled_first(self.count), _pooled_first(self.square)
        with np.errstate(invalid="ignore", divide="ignore"):
            variance = np.maximum(square / n - mean**2, 0.0) * n / (n - 1)
        low, high = percentile_interval(replicates)
        return {"mean": mean, "std": np.sqrt(variance), "ci_low": low, "ci_high": high}


def _pooled_first(x: Floats, axis: int = 0) -> Floats:
    """The sum over groups, put before the groups."""
    return np.concatenate([x.sum(axis, keepdims=True), x], axis)


def quantiles(values: Floats, which: Sequence[float] = QUANTILES) -> Floats:
    """Quantiles along the last axis, by default `QUANTILES`; [..., values] gives [..., quantiles].

    They are values that occur (no interpolation, which inf would spoil): inf counts as the largest number,
    NaN is left out, and where all are NaN so is the quantile.
    """
    ordered = np.sort(values, axis=-1)  # NaN goes last
    n = (~np.isnan(values)).sum(-1)
    places = np.clip(np.ceil(np.asarray(which) * n[..., None]).astype(np.intp) - 1, 0, None)
    return np.take_along_axis(ordered, places, -1)


def bootstrap_means(values: Floats, *, seed: int = 0, resamples: int = 400) -> dict[str, Floats]:
    """mean, std, ci_low and ci_high over the last axis, whose items are resampled together for all the others.

    What is not finite is left out. With fewer than two items there is no interval: NaN.

    >>> {name: x.tolist() for name, x in bootstrap_means(np.array([[1.0, 3.0, np.nan]])).items() if name == "mean"}
    {'mean': [2.0]}
    """
    items = values.shape[-1]
    weights = np.random.default_rng(seed).multinomial(items, np.full(items, 1 / items), resamples).astype(np.float64)
    finite = np.isfinite(values).astype(np.float64)
    kept = np.where(np.isfinite(values), values, 0.0)
    n = finite.sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = kept.sum(-1) / n
        variance = ((kept - mean[..., None]) ** 2 * finite).sum(-1) / (n - 1)
        means = (kept @ weights.T) / (finite @ weights.T)
    if items < 2:
        means = np.full_like(means, np.nan)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.moveaxis(quantiles(means, (tail, 1 - tail)), -1, 0)
    return {"mean": mean, "std": np.sqrt(variance), "ci_low": low, "ci_high": high}


def paired_interval(
    one: Sequence[Any], other: Sequence[Any], combine: Callable[..., Any], *, seed: int = 0, resamples: int = 2000
) -> tuple[float, float]:
    """Percentile interval (95 %) of `combine(one) - combine(other)`, by resampling their common items.

    For scores that are not means of numbers, such as F1 or a perplexity, which `combine` makes from a list of items.
    Scores of texts (corpus BLEU and the like), which take long, are resampled a tenth as often. With fewer than two
    items there is no interval: (nan, nan).

    >>> low, high = paired_interval([3.0, 5.0, 4.0], [1.0, 2.0, 3.0], max)
    >>> low, high
    (1.0, 3.0)
    """
    resamples = resamples // 10 if len(one) and _has_text(one[0]) else resamples

    def difference(rows: NDArray[np.intp]) -> float:
        return float(combine([one[i] for i in rows]) - combine([other[i] for i in rows]))

    return resampled_interval(len(one), difference, seed=seed, resamples=resamples)


def _has_text(item: Any) -> bool:
    return isinstance(item, str) or (isinstance(item, list | tuple) and any(map(_has_text, item)))


def two_way_means(
    arrays: Sequence[Floats], populations: Sequence[int] | None = None, *, seed: int = 0, resamples: int = 2000
) -> list[Floats]:
    """Means over seeds and items when both are drawn anew: [..., seed, item] gives [resample, ...] for each array.

    Seeds and items are drawn independently of each other (crossed) and alike for all arrays. An array with one seed is
    the same for all seeds. `populations` says which arrays share their items; by default all do. Items are not drawn
    where a population has only one, nor seeds where there is only one; with one of each there is nothing to draw and
    the means are NaN. An array with a NaN has NaN means.
    """
    populations = [0] * len(arrays) if populations is None else populations
    seeds = max(array.shape[-2] for array in arrays)
    seed_weights = _drawn_weights(seeds, (seed, 0), resamples)
    sizes = {population: array.shape[-1] for array, population in zip(arrays, populations, strict=True)}
    item_weights = {name: _drawn_weights(size, (seed, 1, name), resamples) for name, size in sizes.items()}
    found = []
    for array, population in zip(arrays, populations, strict=True):
        weights = item_weights[population]
        by_seed = array @ weights.T / weights.shape[1]  # [..., seed, resample]
        drawn = seed_weights if array.shape[-2] == seeds else np.ones((resamples, 1))
        means = np.einsum("...sr,rs->r...", by_seed, drawn) / drawn.shape[1]
        found.append(np.full_like(means, np.nan) if max(seeds, weights.shape[1]) < 2 else means)
    return found


def _drawn_weights(n: int, key: tuple[int, ...], resamples: int) -> Floats:
    """How often each of `n` is drawn when `n` are drawn with replacement, [resample, n], further from 1 for small n.

    The counts' distances from 1 are stretched by what Student's t adds to a normal interval of n numbers: five seeds
    drawn plainly give a 95 % interval that covers 85 %.
    """
    if n < 2:
        return np.ones((resamples, n))
    tail = (1 - CONFIDENCE) / 2
    stretch = math.sqrt(n / (n - 1)) * stats.t.isf(tail, n - 1) / stats.norm.isf(tail)
    counts = np.random.default_rng(key).multinomial(n, np.full(n, 1 / n), resamples)
    return np.asarray(1.0 + stretch * (counts - 1.0))


def percentile_interval(draws: Floats) -> tuple[Floats, Floats]:
    """Ends of the 95 % interval over the first axis, [resample, ...]: values that occur, inf the largest, no NaN."""
    tail = (1 - CONFIDENCE) / 2
    ends = quantiles(np.moveaxis(np.asarray(draws), 0, -1), (tail, 1 - tail))
    return ends[..., 0], ends[..., 1]


def two_way_interval(
    arrays: Sequence[Floats], statistic: Callable[..., Floats], *, seed: int = 0, resamples: int = 2000
) -> tuple[Floats, Floats]:
    """Percentile interval (95 %) of a statistic of means, by drawing seeds and items anew, independently (crossed).

    `statistic` gets the means of each array [..., seed, item] as [resample, ...]; see `two_way_means`. The interval is
    for other seeds *and* other items of the same kind; it is a little too wide where seed and item act only together.

    >>> low, high = two_way_interval([np.arange(20.0).reshape(2, 10)], lambda mean: mean)
    >>> bool(low < 9.5 < high)
    True
    """
    return percentile_interval(statistic(*two_way_means(arrays, seed=seed, resamples=resamples)))
