"""Orders in which layers are lowered, and the scales part of the way along them: plain numbers, no model.

A layer's applied strength at scale s is (1 - s) times its strength at 0, so along a path the total grows by known
amounts and can be cut anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Scales = tuple[tuple[int, float], ...]
"""(layer, retained scale) of the layers that are not at 1, by layer."""


class Step(NamedTuple):
    """Lower a layer to a scale."""

    layer: int
    scale: float


def greedy_path(costs: Mapping[int, Mapping[float, float]], strengths: Mapping[int, float]) -> list[Step]:
    """Always the layer whose next lower scale adds the least cost per added strength, until none is left.

    Args:
        costs: by layer and scale (below 1), what that layer alone costs there; at 1 nothing.
        strengths: by layer, the applied strength at scale 0. A layer without any is never lowered, and none is
            lowered to or past a scale whose cost is not finite.

    >>> greedy_path({0: {0.5: 0.1, 0.0: 0.9}, 1: {0.5: 0.2, 0.0: 0.4}}, {0: 0.5, 1: 1.0})
    [Step(layer=0, scale=0.5), Step(layer=1, scale=0.5), Step(layer=1, scale=0.0), Step(layer=0, scale=0.0)]
    """
    at, path = dict.fromkeys(costs, 1.0), list[Step]()
    while True:
        choices = []
        for layer, of_layer in costs.items():
            lower = max((s for s in of_layer if s < at[layer]), default=None)
            if lower is None or not strengths[layer] > 0 or not math.isfinite(of_layer[lower]):
                continue
            added = of_layer[lower] - of_layer.get(at[layer], 0.0)
            choices.append((added / ((at[layer] - lower) * strengths[layer]), layer, lower))
        if not choices:
            return path
        _, layer, lower = min(choices)
        at[layer] = lower
        path.append(Step(layer, lower))


def random_path(strengths: Mapping[int, float], lowest: float, generator: np.random.Generator) -> list[Step]:
    """The layers in random order, each lowered all the way before the next."""
    layers = [layer for layer, strength in strengths.items() if strength > 0]
    return [Step(int(layer), lowest) for layer in generator.permutation(layers)]


def after(path: Iterable[Step]) -> Scales:
    """The scales at the end of a path."""
    return tuple(sorted(dict(path).items()))


def at_strength(path: Sequence[Step], strengths: Mapping[int, float], total: float) -> Scales:
    """The scales along a path where their total strength is `total`; the last step is done in part."""
    at: dict[int, float] = {}
    for layer, lower in path:
        left = total - total_strength(at.items(), strengths)
        partly = round(at.get(layer, 1.0) - left / strengths[layer], 12)
        at[layer] = max(lower, partly)
        if partly >= lower:
            break
    return tuple(sorted((layer, s) for layer, s in at.items() if s < 1))


def uniform(strengths: Mapping[int, float], total: float) -> Scales:
    """The one scale for all layers that has this total strength."""
    scale = round(1.0 - total / math.fsum(strengths.values()), 12) if total > 0 else 1.0
    return tuple((layer, scale) for layer in sorted(strengths)) if scale < 1 else ()


def total_strength(scales: Iterable[tuple[int, float]], strengths: Mapping[int, float]) -> float:
    """Sum over layers of (1 - s) times the strength at 0."""
    return math.fsum((1.0 - scale) * strengths[layer] for layer, scale in scales)
