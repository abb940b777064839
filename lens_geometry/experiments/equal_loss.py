"""Which displacement costs a given loss? Read off a dose-response curve."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np


def displacement_at(target: float, displacements: Sequence[float], damages: Sequence[float]) -> float:
    """The smallest displacement with this damage, interpolated in logarithms between two neighbours; NaN where none is.

    Doses whose damage is not above 0, or not finite, tell nothing of logarithms and are left out. Nothing is
    extrapolated but below the first dose, where damage is taken to grow with the square of the displacement.

    >>> round(displacement_at(0.4, [0.1, 0.2, 0.4], [0.1, 0.4, 1.6]), 3)
    0.2
    """
    pairs = sorted(zip(displacements, damages, strict=True))
    found = [(dose, damage) for dose, damage in pairs if np.isfinite(damage) and damage > 0]
    for (low, at_low), (high, at_high) in pairwise(found):
        if at_low <= target <= at_high and at_low < at_high:
            share = np.log(target / at_low) / np.log(at_high / at_low)
            return float(low * (high / low) ** share)
    if found and target < found[0][1]:
        dose, damage = found[0]
        return float(dose * (target / damage) ** 0.5)
    return float("nan")
