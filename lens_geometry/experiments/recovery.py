"""How much of a perturbation's damage a repair gives back: rows of a table, from losses per seed and sequence.

    damage = L_perturbed - L_clean        recovery = (L_perturbed - L_repaired) / damage

0 is no help, 1 the clean loss; below 0 the repair harms, above 1 the repaired model is better than the clean one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lens_geometry.metrics import SequenceLosses
from lens_geometry.stats import two_way_interval

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Repaired:
    """The losses of one perturbation, by seed: clean, perturbed, and under each repair.

    Attributes:
        clean: of the unedited model.
        perturbed: one for each seed.
        repaired: pathway to one for each seed, on the same noise and signs.
        impossible: seeds at which a token could not be moved as far as was asked.
    """

    clean: SequenceLosses
    perturbed: Sequence[SequenceLosses]
    repaired: Mapping[str, Sequence[SequenceLosses]]
    impossible: Sequence[bool] = ()

    def seed(self, place: int) -> Repaired:
        """One of the seeds alone."""
        one = {name: found[place : place + 1] for name, found in self.repaired.items()}
        return Repaired(self.clean, self.perturbed[place : place + 1], one, self.impossible[place : place + 1])


def recovery_row(found: Repaired, name: str, parts: Sequence[str] = (), *, seed: int = 0) -> dict[str, Any]:
    """One repair's row: losses in nats per token, damage and recovery with 95 % intervals, and its status.

    Intervals draw sequences anew, and seeds where there are several. `parts` are the repairs that this one is made
    of: `sum_of_singles` adds their recoveries, and `additivity_gap` is this one's recovery less that sum.
    `status` is "ok"; "no_effect" where the repair changed no loss by a bit; "no_damage" where the damage's interval
    reaches 0, so that there is nothing to divide by; "nonfinite"; or "impossible". Recovery is NaN in the last three.
    """
    repaired = found.repaired[name]
    runs = [*found.perturbed, *repaired, *(one for part in parts for one in found.repaired[part])]
    lost = sum(int(one.nonfinite.sum()) for one in repaired)
    row: dict[str, Any] = {
        "clean_loss": _loss([found.clean]),
        "perturbed_loss": _loss(found.perturbed),
        "repaired_loss": _loss(repaired),
        **_measured("damage"),
        **_measured("recovery"),
        "sum_of_singles": np.nan,
        **_measured("additivity_gap"),
        "n_seeds": len(repaired),
        "n_sequences": len(found.clean.sums),
        "n_tokens": int(found.clean.counts.sum()),
        "n_nonfinite": lost,
        "status": "ok",
    }
    if any(found.impossible) or any(one.nonfinite.any() for one in runs):
        return {**row, "status": "impossible" if any(found.impossible) else "nonfinite"}
    clean, perturbed, now = _sums([found.clean]), _sums(found.perturbed), _sums(repaired)
    counts = found.clean.counts.astype(np.float64)[None]
    with np.errstate(divide="ignore", invalid="ignore"):
        row |= _interval("damage", [perturbed, clean, counts], lambda p, c, n: (p - c) / n, seed)
        low = row["damage_low"] if np.isfinite(row["damage_low"]) else row["damage"]
        if not low > 0:
            return {**row, "status": "no_damage"}
        row |= _interval("recovery", [perturbed, now, clean], lambda p, r, c: (p - r) / (p - c), seed)
        if parts:
            singles = [_sums(found.repaired[part]) for part in parts]

            def alone(p: Any, c: Any, *each: Any) -> Any:
                return sum((p - r) / (p - c) for r in each)

            row["sum_of_singles"] = float(alone(*_means([perturbed, clean, *singles])))
            row |= _interval(
                "additivity_gap", [perturbed, clean, now, *singles],
                lambda p, c, r, *each: (p - r) / (p - c) - alone(p, c, *each), seed,
            )  # fmt: skip
    return {**row, "status": "no_effect" if np.array_equal(now, perturbed) else "ok"}


def _sums(runs: Sequence[SequenceLosses]) -> Floats:
    return np.stack([one.sums for one in runs])


def _means(arrays: Sequence[Floats]) -> list[Any]:
    return [array.mean() for array in arrays]


def _loss(runs: Sequence[SequenceLosses]) -> float:
    """Nats per token over all seeds; over the finite ones where some are not."""
    finite = sum(int((one.counts - one.nonfinite).sum()) for one in runs)
    return sum(float(one.sums.sum()) for one in runs) / finite if finite else float("nan")


def _measured(name: str, value: float = np.nan, low: float = np.nan, high: float = np.nan) -> dict[str, float]:
    return {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}


def _interval(name: str, arrays: Sequence[Floats], statistic: Any, seed: int) -> dict[str, float]:
    low, high = two_way_interval(arrays, statistic, seed=seed)
    return _measured(name, statistic(*_means(arrays)), float(low), float(high))
