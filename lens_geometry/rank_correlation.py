"""Rank correlations and partial ones, with intervals: arrays in, numbers out.

Everything goes through the products of centred ranks: the correlation of two quantities given others is read off one
small matrix, so that thousands of resamples are one array operation. "Cannot be told" is NaN: too few cases, a
quantity that does not vary, or one that its controls explain to the last rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from lens_geometry.errors import DataError
from lens_geometry.stats import percentile_interval

Floats = NDArray[np.float64]
LEAST = 4  # cases without which nothing is said; one more for each control
NOTHING_LEFT = 1e-9  # share of a quantity's variation that rounding leaves where its controls explain all of it
MOST_UNDEFINED = 0.1  # of the resamples; beyond it there is no interval


class Correlation(NamedTuple):
    """Which rank correlation is asked for: of two quantities by name, given others; less that of `minus`."""

    one: str
    other: str
    given: tuple[str, ...] = ()
    minus: tuple[str, str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.one, self.other, *self.given, *(self.minus or ()))))


class Estimate(NamedTuple):
    """A rank correlation with its 95 % interval and its range when each family in turn is left out.

    `low` to `high` is the percentile interval over resampled cases. `family_low` to `family_high` are the smallest and
    the largest value without one family, `family_of_low` and `family_of_high` the families whose absence gives them.
    `undefined` is the share of resamples in which it could not be told; they are left out, and where they are more
    than a tenth there is no interval.
    """

    value: float
    low: float
    high: float
    family_low: float
    family_high: float
    family_of_low: str
    family_of_high: str
    n: int
    n_families: int
    undefined: float


def ranks(values: Floats) -> Floats:
    """Ranks along the last axis, from 1, the average of their places for those that are tied; ±inf are the ends."""
    return np.asarray(stats.rankdata(values, axis=-1), dtype=np.float64)


def spearman(one: Floats, other: Floats, *given: Floats) -> float:
    """Rank correlation of two quantities, partial where others are given: all are ranked, and the ranks of the first
    two are correlated after what the controls' ranks explain linearly is taken off. Cases with a NaN are left out.

    NaN with fewer than 4 cases (one more for each control), or where no variation is left.

    >>> round(spearman(np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 4.0, 9.0, 8.0])), 3)
    0.8
    """
    columns = {str(place): values for place, values in enumerate((one, other, *given))}
    return correlate(columns, Correlation("0", "1", tuple(columns)[2:]), resamples=0).value


def correlate(columns: Mapping[str, Floats], wanted: Correlation, **options: Any) -> Estimate:
    """`correlate_all` for one correlation."""
    return correlate_all(columns, [wanted], **options)[0]


def correlate_all(
    columns: Mapping[str, Floats],
    wanted: Sequence[Correlation],
    *,
    families: Sequence[Hashable] | None = None,
    seed: int = 0,
    resamples: int = 2000,
) -> list[Estimate]:
    """Rank correlations over cases, with the interval of resampled cases and the range without each family.

    Cases are drawn with replacement, each with all its quantities, and ranked anew: a case that is drawn twice is a tie
    in every quantity, and ties have average ranks. So the interval is for other cases *like these, drawn one by one*.
    Variants of one method are not: they come in families, and an interval that treats them as independent is too
    narrow. Hence the range beside it: the value without each family in turn. What holds for compression in general
    stays when any one family is gone.

    Cases with a NaN in one of the quantities used are left out. With the same seed and the same cases, two calls draw
    the same resamples. Raises DataError for quantities of different lengths.
    """
    _check_lengths(columns)
    known: dict[bytes, _Cases] = {}
    found = []
    for one in wanted:
        whole = _whole_cases([columns[name] for name in one.names])
        if whole.tobytes() not in known:
            known[whole.tobytes()] = _Cases(columns, whole, families, seed, resamples)
        found.append(known[whole.tobytes()].estimate(one))
    return found


class _Cases:
    """Some of the cases: all of them, as they are drawn, and without each family; every quantity is ranked once."""

    def __init__(
        self,
        columns: Mapping[str, Floats],
        whole: NDArray[np.bool_],
        families: Sequence[Hashable] | None,
        seed: int,
        resamples: int,
    ) -> None:
        self.columns, self.n = columns, int(whole.sum())
        cases = np.flatnonzero(whole)
        drawn = np.random.default_rng(seed).integers(0, max(self.n, 1), (resamples if self.n > 1 else 0, self.n))
        self.sets = {"": cases[np.concatenate([np.arange(self.n)[None], drawn])]}
        groups = [] if families is None else [str(families[int(case)]) for case in cases]
        self.families = list(dict.fromkeys(groups))
        for family in self.families:
            kept = [case for case, group in zip(cases, groups, strict=True) if group != family]
            self.sets[f"without {family}"] = np.asarray(kept, dtype=np.intp)[None]
        self.ranked: dict[tuple[str, str], Floats] = {}

    def estimate(self, wanted: Correlation) -> Estimate:
        values = self._values("", wanted)
        low, high, undefined = _interval(values[1:])
        without = {name: float(self._values(f"without {name}", wanted)[0]) for name in self.families}
        return Estimate(float(values[0]), low, high, *_range(without), self.n, len(self.families), undefined)

    def _values(self, which: str, wanted: Correlation) -> Floats:
        sets = self.sets[which]
        if sets.shape[1] < LEAST + len(wanted.given):
            return np.full(len(sets), np.nan)
        for name in wanted.names:
            if (which, name) not in self.ranked:
                values = np.asarray(self.columns[name], dtype=np.float64)[sets]
                self.ranked[which, name] = ranks(values) - (sets.shape[1] + 1) / 2
        centred = np.stack([self.ranked[which, name] for name in wanted.names], 1)
        return _of_products(centred @ np.swapaxes(centred, 1, 2), list(wanted.names), wanted)


def correlate_within(
    blocks: Sequence[Mapping[str, Floats]],
    wanted: Sequence[Correlation],
    *,
    families: Sequence[Hashable] | None = None,
    seed: int = 0,
    resamples: int = 2000,
) -> list[Estimate]:
    """Rank correlations over cases ranked within their own block (the layers of one variant), pooled over blocks.

    Ranks run from -1/2 to 1/2 in every block, so that what is compared is the order of the layers within a variant and
    never a variant with another. Blocks, not cases, are resampled (the layers of a variant depend on each other), and
    families of blocks are left out in turn. A block with fewer than two whole cases says nothing and is not counted.
    `n` counts the blocks.
    """
    for block in blocks:
        _check_lengths(block)
    products: dict[tuple[int, bytes], tuple[list[str], Floats]] = {}

    def of_block(place: int, names: Sequence[str]) -> Floats | None:
        block = blocks[place]
        whole = _whole_cases([block[name] for name in names])
        if whole.sum() < 2:
            return None
        key = place, whole.tobytes()
        if key not in products:
            usable = [name for name, values in block.items() if not np.isnan(np.asarray(values)[whole]).any()]
            centred = ranks(np.stack([np.asarray(block[name], dtype=np.float64)[whole] for name in usable]))
            centred -= (whole.sum() + 1) / 2
            products[key] = usable, centred @ centred.T / whole.sum() ** 2
        usable, found = products[key]
        chosen = [usable.index(name) for name in names]
        return found[np.ix_(chosen, chosen)]

    return [_pooled(one, blocks, of_block, families, seed, resamples) for one in wanted]


def _pooled(
    wanted: Correlation,
    blocks: Sequence[Mapping[str, Floats]],
    of_block: Callable[[int, Sequence[str]], Floats | None],
    families: Sequence[Hashable] | None,
    seed: int,
    resamples: int,
) -> Estimate:
    names = list(wanted.names)
    found = {place: of_block(place, names) for place in range(len(blocks))}
    kept = {place: one for place, one in found.items() if one is not None}
    stacked = np.stack([*kept.values()]) if kept else np.zeros((0, len(names), len(names)))
    cases = sum(int(_whole_cases([blocks[place][name] for name in names]).sum()) for place in kept)

    def values(weights: Floats) -> Floats:
        if cases < LEAST + len(wanted.given):
            return np.full(len(weights), np.nan)
        return _of_products(np.tensordot(weights, stacked, 1), names, wanted)

    n = len(kept)
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), resamples) if n > 1 else np.empty((0, n))
    low, high, undefined = _interval(values(drawn.astype(np.float64)))
    groups = np.array([] if families is None else [str(families[place]) for place in kept], dtype=object)
    named = list(dict.fromkeys(groups))
    without = {name: float(values((groups != name).astype(np.float64)[None])[0]) for name in named}
    return Estimate(float(values(np.ones((1, n)))[0]), low, high, *_range(without), n, len(named), undefined)


def _of_products(products: Floats, names: list[str], wanted: Correlation) -> Floats:
    """What is wanted, from products of centred ranks [..., quantity, quantity]."""
    found = _partial(products, names.index(wanted.one), names.index(wanted.other), [*map(names.index, wanted.given)])
    if wanted.minus is not None:
        found = found - _partial(products, names.index(wanted.minus[0]), names.index(wanted.minus[1]), [])
    return found


def _partial(products: Floats, one: int, other: int, given: list[int]) -> Floats:
    """Correlation of two quantities once the controls are swept out, each in turn; NaN where nothing is left."""
    left = products.copy()
    before = np.diagonal(products, axis1=-2, axis2=-1)
    for control in given:
        pivot = left[..., control, control]
        varies = pivot > NOTHING_LEFT * before[..., control]  # one that does not vary explains nothing
        share = left[..., :, control] / np.where(varies, pivot, np.inf)[..., None]
        left = left - share[..., :, None] * left[..., None, control, :]
    one_left, other_left = left[..., one, one], left[..., other, other]
    told = (one_left > NOTHING_LEFT * before[..., one]) & (other_left > NOTHING_LEFT * before[..., other])
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.where(told, left[..., one, other] / np.sqrt(one_left * other_left), np.nan)
    return np.clip(found, -1.0, 1.0)


def _check_lengths(columns: Mapping[str, Floats]) -> None:
    lengths = {name: len(values) for name, values in columns.items()}
    if len({*lengths.values()}) != 1:
        raise DataError(f"the quantities have different lengths: {lengths}", cure="give one number per case to each")


def _whole_cases(values: Sequence[Floats]) -> NDArray[np.bool_]:
    """Which cases have no NaN in any of the quantities."""
    missing = np.isnan(np.stack([np.asarray(one, dtype=np.float64) for one in values]))
    return np.asarray(missing.sum(0) == 0)


def _interval(draws: Floats) -> tuple[float, float, float]:
    """Ends of the interval, and the share of resamples in which the value could not be told."""
    if not len(draws):
        return math.nan, math.nan, math.nan
    undefined = float(np.isnan(draws).mean())
    if undefined > MOST_UNDEFINED:
        return math.nan, math.nan, undefined
    low, high = percentile_interval(draws)
    return float(low), float(high), undefined


def _range(without: Mapping[str, float]) -> tuple[float, float, str, str]:
    """The smallest and the largest value without one family, and which these are; NaN with fewer than two families."""
    told = {name: value for name, value in without.items() if not math.isnan(value)}
    if len(without) < 2 or not told:
        return math.nan, math.nan, "", ""
    lowest, highest = min(told, key=lambda name: told[name]), max(told, key=lambda name: told[name])
    return told[lowest], told[highest], lowest, highest
