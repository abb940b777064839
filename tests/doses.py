"""Losses and margins with a built-in answer: what each kind of perturbation costs, plus noise of seeds and items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from lens_geometry.experiments.dissociation_rows import Doses, as_table, rows
from lens_geometry.results import Result

__all__ = ["Doses", "Result", "as_table", "replace", "rows"]

DISPLACEMENTS = (0.05, 0.1, 0.2, 0.4)
STEEP, FLAT = (0.02, 0.15, 0.9, 5.0), (0.004, 0.06, 0.5, 3.0)
COSTS = {  # angular and magnitude, of the loss and of the margin, at each displacement
    "dissociation": ((STEEP, FLAT), (FLAT, STEEP)),
    "reversed": ((FLAT, STEEP), (STEEP, FLAT)),
    "one-sided": ((STEEP, FLAT), (STEEP, FLAT)),
    "none": ((FLAT, FLAT), (FLAT, FLAT)),
}


def doses(
    answer: str = "dissociation",
    *,
    seeds: int = 5,
    sequences: int = 40,
    pairs: int = 80,
    noise: float = 0.3,
    seed: int = 0,
    displacements: Sequence[float] = DISPLACEMENTS,
) -> Doses:
    """Damages around those of `COSTS`, all statuses "ok"; `pairs` 0 for none."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(20, 64, sequences).astype(float)
    base, base_margins = counts * rng.normal(4.05, 0.4, sequences), rng.normal(2.0, 2.0, pairs)
    of_loss, of_margin = (dict(zip(("angular", "magnitude"), cost, strict=True)) for cost in COSTS[answer])

    def around(costs: Sequence[float], items: int) -> Any:
        shape = (len(costs), seeds, items)
        wave = 1 + noise * (
            rng.normal(size=shape) + rng.normal(size=(1, seeds, 1)) / 2 + rng.normal(size=shape[::2])[:, None]
        )
        return np.array(costs)[:, None, None] * wave

    costs = {kind: cost[: len(displacements)] for kind, cost in of_loss.items()}
    sums = {kind: base + counts * around(cost, sequences) for kind, cost in costs.items()}
    costs = {kind: cost[: len(displacements)] for kind, cost in of_margin.items()}
    margins = {kind: base_margins - around(cost, pairs) for kind, cost in costs.items()} if pairs else {}
    measured = {kind: [[ran(d, int(counts.sum())) for _ in range(seeds)] for d in displacements] for kind in sums}
    return Doses(tuple(displacements), tuple(range(seeds)), sums, base, counts, margins, base_margins, measured)


def ran(displacement: float, places: int, status: str = "ok") -> dict[str, Any]:
    """What a perturbation did that went as it should."""
    return {
        "displacement_mean": displacement, "displacement_max_error": 4e-7, "n_clipped": 0, "n_flipped": 0,
        "n_places": places, "status": status,
    }  # fmt: skip


def table(answers: Mapping[str, str] | None = None, **changes: Any) -> pd.DataFrame:
    """A table of variants, each with its own answer."""
    answers = {"default": "dissociation"} if answers is None else answers
    parts = [
        as_table(rows(doses(answer, seed=place, **changes), resamples=400)).assign(variant=name, layers="10-17")
        for place, (name, answer) in enumerate(answers.items())
    ]
    found = pd.concat(parts, ignore_index=True).assign(model="tiny", normalization="RMS")
    first = ["model", "normalization", "variant", "layers"]
    return found[first + [name for name in found if name not in first]]


def dissociation(answers: Mapping[str, str] | None = None, **changes: Any) -> Result:
    """A Result of `table`."""
    meta = {"model": {"name": "tiny"}, "data": {"text": "austen", "n_sequences": 40}, "seed": 0, "warnings": []}
    return Result("dissociation", table(answers, **changes), meta)
