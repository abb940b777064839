"""Change of loss under one condition with the intervals that a search decides by, and what a search may go on from."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from lens_geometry.data import Tokens
from lens_geometry.errors import DataError
from lens_geometry.experiments.columns import loss_change
from lens_geometry.metrics import SequenceLosses
from lens_geometry.runner import RunSettings, identity_of_run
from lens_geometry.stats import bootstrap_interval

ONE_SIDED = 0.95  # of the upper end that decides


class Change(NamedTuple):
    """Change of loss under one condition, in nats per token, against the unedited run on the same sequences.

    `low` to `high` is the 95 % interval by paired bootstrap over sequences, `upper` the upper end of the one-sided
    one. Not finite when some losses are not: `status` is then "nonfinite"; "no_effect" changed no loss by a bit.
    """

    value: float
    low: float
    high: float
    upper: float
    n_nonfinite: int
    status: str

    def surely_under(self, bound: float) -> bool:
        """Whether the change and its one-sided 95 % upper end are under a bound."""
        return self.under(bound) and self.upper < bound

    def under(self, bound: float) -> bool:
        """Whether the change itself is under a bound and every loss finite."""
        return self.status != "nonfinite" and self.value < bound

    def columns(self) -> dict[str, Any]:
        """As a table has it."""
        return {
            "loss_change": self.value,
            "loss_change_low": self.low,
            "loss_change_high": self.high,
            "loss_change_upper": self.upper,
            "n_nonfinite": self.n_nonfinite,
            "status": self.status,
        }


NO_CHANGE = Change(0.0, 0.0, 0.0, 0.0, 0, "ok")


def change(found: SequenceLosses, base: SequenceLosses, seed: int) -> Change:
    """Change of loss between two runs of the same sequences, with its intervals."""
    n_nonfinite = int(found.nonfinite.sum() + base.nonfinite.sum())
    finite, base_finite = ((run.counts - run.nonfinite).astype(np.float64) for run in (found, base))
    value = float(loss_change(found.sums, finite, base.sums, base_finite, 0))
    if n_nonfinite:
        return Change(value, math.nan, math.nan, math.nan, n_nonfinite, "nonfinite")
    samples = [found.sums, finite, base.sums, base_finite]
    low, high = bootstrap_interval(samples, loss_change, seed=seed)
    _, upper = bootstrap_interval(samples, loss_change, seed=seed, confidence=2 * ONE_SIDED - 1)
    return Change(value, low, high, upper, 0, "no_effect" if np.array_equal(found.sums, base.sums) else "ok")


def identity_of_losses(model: Any, tokens: Tokens, settings: Any) -> dict[str, Any]:
    """What losses depend on beside the condition's key: a search may go on with other bounds, sites and layers."""
    shared = RunSettings(**{field.name: getattr(settings, field.name) for field in fields(RunSettings)})
    return identity_of_run(model, tokens, shared) | {"settings.skip_position_0": settings.skip_position_0}


def check_positive(settings: Any, *names: str) -> None:
    """Raise DataError for a setting that is no finite number above 0."""
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise DataError(f"{name} is {value!r}", cure="give a finite number above 0")
