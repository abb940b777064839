"""One choice for each layer under a budget of size: the best one, an even one, and the same mix in another order.

Arrays in, numbers of choices out: [layer] of indices into the choices (the widths of a ladder, say).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from lens_geometry.errors import DataError

Choices = tuple[int, ...]
TRIES = 1000  # shuffles, until one fits


def allocate(costs: ArrayLike, sizes: ArrayLike, budget: int) -> Choices:
    """The choice for each layer with the least total cost whose total size is within the budget.

    The multiple-choice knapsack, solved to proven optimality as a mixed-integer program. `costs` [layer, choice] may be
    below zero; one that is not finite is never chosen. `sizes` [layer, choice] are whole numbers (bytes, bits).

    Raises DataError where even the smallest choices are too large for the budget, or a layer has none.

    >>> allocate([[9.0, 1.0, 0.0], [4.0, 3.0, 0.0]], [[1, 2, 4], [1, 2, 4]], 4)
    (1, 1)
    """
    cost, size = np.asarray(costs, dtype=np.float64), np.asarray(sizes, dtype=np.int64)
    open_ = np.isfinite(cost)
    if not open_.any(1).all():
        raise DataError(
            f"layer {int(np.flatnonzero(~open_.any(1))[0])} has no choice with a finite cost",
            cure="leave the layer out, or offer it a larger choice",
        )
    check_budget(np.where(open_, size, np.iinfo(np.int64).max // 2 // max(1, len(size))), budget)
    layers, choices = cost.shape
    unit = int(np.gcd.reduce(size.ravel())) or 1
    room, share = budget // unit, np.asarray(size // unit, dtype=np.float64)
    kept = np.where(open_, cost, 0.0)
    kept = kept - kept.min(1, keepdims=True)  # a constant for each layer
    kept = kept * (1e6 / (kept.max() or 1.0))  # far above the solver's absolute tolerances
    one_each = csr_array(np.kron(np.eye(layers), np.ones(choices)))
    found = milp(
        kept.ravel(),
        integrality=np.ones(cost.size),
        bounds=Bounds(0, open_.ravel().astype(np.float64)),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(share.reshape(1, -1), -np.inf, room),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        raise DataError(f"no allocation was found: {found.message}", cure="give a larger budget")
    chosen = tuple(int(c) for c in found.x.reshape(cost.shape).argmax(1))
    if total(size, chosen) > budget:
        raise DataError(
            f"the solver's allocation of {total(size, chosen):,} is over the budget of {budget:,}",
            cure="give a budget that differs from it by more than a rounding",
        )
    return chosen


def total(sizes: ArrayLike, chosen: Sequence[int]) -> int:
    """Size of an allocation."""
    size = np.asarray(sizes, dtype=np.int64)
    return int(sum(int(size[layer, choice]) for layer, choice in enumerate(chosen)))


def check_budget(sizes: ArrayLike, budget: int) -> bool:
    """Whether the budget binds: False where it has room for the largest choice in every layer.

    Raises DataError where even the smallest choices do not fit.
    """
    size = np.asarray(sizes, dtype=np.int64)
    least, most = int(size.min(1).sum()), int(size.max(1).sum())
    if least > budget:
        raise DataError(
            f"the budget of {budget:,} cannot be met: the smallest choice in every layer takes {least:,}",
            cure="give a larger budget, or add a smaller choice",
        )
    return budget < most


def even(sizes: ArrayLike, budget: int) -> Choices:
    """One choice for all layers where that uses the budget up; else the next larger one in some, evenly over depth.

    Choices are compared by their total size over all layers. Raises DataError where none fits everywhere.
    """
    size = np.asarray(sizes, dtype=np.int64)
    check_budget(size, budget)
    layers, totals = len(size), size.sum(0)
    order = [int(c) for c in np.argsort(totals, kind="stable") if totals[c] <= budget]
    if not order:
        raise DataError("no one choice fits in every layer", cure="give a larger budget, or add a smaller choice")
    base = order[-1]
    larger = [int(c) for c in np.argsort(totals, kind="stable") if totals[c] > totals[base]]
    for number in range(layers - 1, 0, -1) if larger else ():
        raised = {round((place + 0.5) * layers / number - 0.5) for place in range(number)}
        mixed = tuple(larger[0] if layer in raised else base for layer in range(layers))
        if len(raised) == number and total(size, mixed) <= budget:
            return mixed
    return (base,) * layers


def shuffled(chosen: Sequence[int], sizes: ArrayLike, budget: int, generator: np.random.Generator) -> Choices | None:
    """The same choices given to other layers at random, within the budget; None where no other order was found.

    Where layers are alike it has the same size; where they are not, it is at least within the budget.
    """
    for _ in range(TRIES):
        found = tuple(int(c) for c in generator.permutation(np.asarray(chosen)))
        if found != tuple(chosen) and total(sizes, found) <= budget:
            return found
    return None
