"""What lies between a push and its damage, as numbers: how displacements grow, how much of the damage is explained.

Knows no model: arrays in, arrays out. The last axis is the one that is fitted over; all others are batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
FEWEST_POINTS = 10  # below that a share of explained variance says nothing


def growth_exponent(sizes: ArrayLike) -> Floats:
    """The exponent p of sizes ~ n^p, n = 1, 2, ...: the least-squares slope of log size on log n.

    1 where each of n equal pushes adds its whole length (all in one direction), 0.5 where they are independent (a
    random walk), less where they cancel, more where what was pushed grows by itself. Sizes are [..., n]; with
    fewer than two of them, or one that is not above zero, it is NaN.

    >>> float(growth_exponent([2.0, 4.0, 6.0, 8.0]).round(6)), float(growth_exponent([1.0, 2**0.5, 3**0.5]).round(6))
    (1.0, 0.5)
    """
    sizes = np.asarray(sizes, np.float64)
    steps = np.log(np.arange(1, sizes.shape[-1] + 1))
    centred = steps - steps.mean() if len(steps) else steps
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.where(sizes > 0, np.log(sizes), np.nan)
        slope: Floats = (logs * centred).sum(-1) / (centred**2).sum()
    return slope


def explained(mediator: ArrayLike, damage: ArrayLike, weights: ArrayLike | None = None) -> Floats:
    """R^2 of the straight line from a mediator's change to the damage: the share of its variance over the points.

    Both are [point]; `weights` [..., point] say how often each point counts (a resample, or 0 for one that is left out)
    and give as many shares. NaN where one of the two does not vary.
    """
    w = _weights(mediator, weights)
    return _correlation(_floats(mediator), _floats(damage), w) ** 2


def explained_in_rank(mediator: ArrayLike, damage: ArrayLike, weights: ArrayLike | None = None) -> Floats:
    """Spearman's correlation, squared: as `explained`, of the ranks, for relations that are no straight lines."""
    w = _weights(mediator, weights)
    return _correlation(_ranks(_floats(mediator), w), _ranks(_floats(damage), w), w) ** 2


def explained_beyond(
    mediator: ArrayLike, damage: ArrayLike, known: ArrayLike, weights: ArrayLike | None = None
) -> Floats:
    """How much R^2 grows when the mediator is fitted beside `known`: its share beyond what that explains by itself.

        R^2(damage ~ known + mediator) - R^2(damage ~ known)

    As `explained`; NaN also where the mediator says what `known` does.
    """
    m, y, k = _floats(mediator), _floats(damage), _floats(known)
    w = _weights(mediator, weights)
    with_known = _correlation(m, k, w)
    left = 1.0 - with_known**2
    with np.errstate(invalid="ignore", divide="ignore"):
        return (_correlation(m, y, w) - _correlation(k, y, w) * with_known) ** 2 / np.where(left > 1e-9, left, np.nan)


def _floats(values: ArrayLike) -> Floats:
    return np.asarray(values, np.float64)


def _weights(values: ArrayLike, weights: ArrayLike | None) -> Floats:
    return np.ones(len(_floats(values))) if weights is None else _floats(weights)


def _correlation(one: Floats, other: Floats, weights: Floats) -> Floats:
    """Pearson's, over points that count `weights` times; NaN where one of the two is the same for all that count."""
    total = weights.sum(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        a, b = (x - (weights * x).sum(-1, keepdims=True) / total for x in (one, other))
        sizes = [np.sqrt((weights * x**2).sum(-1)) for x in (a, b)]
        scales = [np.sqrt((weights * x**2).sum(-1)) for x in (one, other)]
        found = (weights * a * b).sum(-1) / (sizes[0] * sizes[1])
    flat = np.logical_or(*(size <= 1e-9 * scale for size, scale in zip(sizes, scales, strict=True)))
    return np.clip(np.where(flat, np.nan, found), -1.0, 1.0)


def _ranks(values: Floats, weights: Floats) -> Floats:
    """The mean rank of each point among those that count, [..., point]; ties share theirs."""
    below, same = values[None, :] < values[:, None], values[None, :] == values[:, None]
    return weights @ (below + 0.5 * same).T + 0.5
