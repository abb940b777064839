"""What perturbations cost, from losses and margins by displacement, seed and item; and how two costs compare."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lens_geometry import edits
from lens_geometry.stats import Floats, two_way_means

KINDS: tuple[str, ...] = edits.KINDS
QUANTITIES = ("loss", "margin", "accuracy")
STATUSES = ("ok", "no_effect", "nonfinite", "impossible", "not_reached")  # the worst last


@dataclass(frozen=True)
class Doses:
    """What was run for one variant of the perturbation and one set of layers.

    Attributes:
        displacements, seeds: of every kind.
        sums: kind to [displacement, seed, sequence], the summed losses of each text sequence under the perturbation in
            nats; NaN where that was not run or is not finite.
        base_sums, counts: [sequence], the unperturbed summed losses, and how many losses were summed.
        margins: kind to [displacement, seed, pair], log p(good) - log p(bad) in nats, NaN likewise; may be empty.
        base_margins: [pair], unperturbed.
        measured: kind to [displacement][seed], what the perturbation really did: `displacement_mean`,
            `displacement_max_error` (relative), `n_clipped`, `n_flipped`, `n_places`, and `status`: "ok",
            "nonfinite", "no_effect" or "impossible".
    """

    displacements: tuple[float, ...]
    seeds: tuple[int, ...]
    sums: Mapping[str, Floats]
    base_sums: Floats
    counts: Floats
    margins: Mapping[str, Floats]
    base_margins: Floats
    measured: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]


class Damage:
    """What one quantity loses, by kind: the mean of `changes` over the mean of `weights`. Points up.

    Attributes:
        levels, changes: kind to [displacement, seed, item]: the quantity under the perturbation (summed over an item),
            and what it lost. Items are sequences for the loss, pairs for margin and accuracy.
        weights: [item], the tokens of a sequence, or 1.
        base: the unperturbed quantity.
        status: kind to [displacement][seed].
        comparable: [displacement], whether every condition of both kinds is "ok".
        by_seed: kind to [displacement, seed], the damage.
        draws, draws_by_seed: kind to [resample, displacement] over seeds and items drawn anew, and to [resample,
            displacement, seed] over items alone; see `draw`.
    """

    def __init__(self, doses: Doses, quantity: str) -> None:
        self.quantity, self.population = quantity, int(quantity != "loss")
        levels, base = (doses.sums, doses.base_sums) if quantity == "loss" else (doses.margins, doses.base_margins)
        read = _correct if quantity == "accuracy" else _floats
        self.levels = {kind: read(levels[kind]) for kind in KINDS}
        sign = 1.0 if quantity == "loss" else -1.0
        self.changes = {kind: sign * (self.levels[kind] - read(base)) for kind in KINDS}
        self.weights = _floats(doses.counts) if quantity == "loss" else np.ones(len(base))
        self.base = float(read(base).sum() / self.weights.sum())
        self.status = {kind: self._statuses(doses, kind) for kind in KINDS}
        ok = [np.array(self.status[kind]) == "ok" for kind in KINDS]
        self.comparable = np.logical_and(*ok).all(1)
        self.by_seed = {kind: self.changes[kind].sum(-1) / self.weights.sum() for kind in KINDS}
        self.draws: dict[str, Floats] = {}
        self.draws_by_seed: dict[str, Floats] = {}

    def _statuses(self, doses: Doses, kind: str) -> list[list[str]]:
        """As measured, and "nonfinite" where this quantity is not finite."""
        finite: Any = np.isfinite(self.changes[kind]).all(-1)
        return [
            [
                str(one["status"]) if one["status"] != "ok" or good else "nonfinite"
                for one, good in zip(*row, strict=True)
            ]
            for row in zip(doses.measured[kind], finite, strict=True)
        ]

    def values(self, kind: str) -> Floats:
        """[displacement], over all seeds; NaN where anything is not finite."""
        changes = self.changes[kind]  # summed before they are divided: what cancels leaves exactly 0
        return changes.sum((-2, -1)) / (changes.shape[-2] * self.weights.sum())

    def by_item(self, kind: str, places: list[int]) -> Floats:
        """Damage of each sequence (per token) or pair, averaged over seeds and these displacements."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.changes[kind][places].mean((0, 1)) / self.weights

    def kept(self, places: list[int]) -> list[int]:
        """Those of these displacements that can be compared."""
        return [place for place in places if self.comparable[place]]

    def finite(self, kind: str, place: int, seeds: slice) -> dict[str, Any]:
        """Damage and level at a displacement over the finite items alone, and how many seeds and items those are of."""
        changes, levels = self.changes[kind][place, seeds], self.levels[kind][place, seeds]
        there = np.isfinite(changes)
        weight = float((there * self.weights).sum())
        value, level = (
            float(np.where(there, x, 0.0).sum()) / weight if weight else math.nan for x in (changes, levels)
        )
        return {"value": value, "level": level, "n_seeds": int(there.any(1).sum()), "n_items": int(there.any(0).sum())}


def draw(damages: Sequence[Damage], *, seed: int, resamples: int) -> None:
    """Fill in the draws: seeds are drawn alike for all quantities, and so are the sequences, and the pairs."""
    arrays = [[*(one.changes[kind] for kind in KINDS), one.weights[None]] for one in damages]
    populations = [one.population for one in damages for _ in range(len(KINDS) + 1)]
    drawn = iter(two_way_means([x for own in arrays for x in own], populations, seed=seed, resamples=resamples))
    alone = iter(
        two_way_means([x[..., None, :] for own in arrays for x in own], populations, seed=seed, resamples=resamples)
    )
    for one in damages:
        for found, means in ((one.draws, drawn), (one.draws_by_seed, alone)):
            changes, weights = {kind: next(means) for kind in KINDS}, next(means)
            found |= {kind: x / weights.reshape(-1, *[1] * (x.ndim - 1)) for kind, x in changes.items()}


def contrast(angular: Floats, magnitude: Floats) -> Floats:
    """(a - m) / (|a| + |m|), from -1 (only magnitude hurts) to 1 (only angular hurts); 0 where both are 0."""
    size = np.abs(angular) + np.abs(magnitude)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(size == 0, 0.0, (angular - magnitude) / size)


def ratio(angular: Floats, magnitude: Floats, undefined: float = math.nan) -> Floats:
    """a / m where m is above 0; without that, infinite where a is above 0, and `undefined` where neither hurts."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.where(magnitude > 0, angular / magnitude, np.where(angular > 0, np.inf, undefined))
    return np.where(np.isnan(angular) | np.isnan(magnitude), np.nan, found)


def worst(statuses: Sequence[str]) -> str:
    """The worst of some statuses, in the order of `STATUSES`; one that is not known is worst of all."""
    return max(statuses, key=lambda name: STATUSES.index(name) if name in STATUSES else len(STATUSES))


def _floats(values: Any) -> Floats:
    return np.asarray(values, dtype=np.float64)


def _correct(margins: Any) -> Floats:
    margins = _floats(margins)
    return np.where(np.isnan(margins), np.nan, margins > 0)
