"""What an edit did to the loss, as columns of a table. Every experiment that counts in losses has these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from lens_geometry.metrics import SequenceLosses
from lens_geometry.stats import bootstrap_interval


def loss_columns(
    found: SequenceLosses, base: SequenceLosses, *, seed: int, edited: bool = True, perplexity: bool = True
) -> dict[str, Any]:
    """Loss (nats per token) and perplexity with their change against the unedited model on the same sequences.

    Changes have 95 % intervals by paired bootstrap over sequences. `status` is "ok", "nonfinite" (the loss is over
    the rest, and there is no interval), or "no_effect" when an edit that should do something changed no loss by a bit.
    """
    finite = (found.counts - found.nonfinite).astype(np.float64)
    all_finite = not found.nonfinite.any()
    idle = edited and all_finite and np.array_equal(found.sums, base.sums)
    samples = [found.sums, finite, base.sums, base.counts.astype(np.float64)]
    loss = float(found.sums.sum() / finite.sum()) if finite.any() else float("nan")
    columns: dict[str, Any] = {"loss": loss, "base_loss": float(base.sums.sum() / base.counts.sum())}
    if perplexity:
        columns["perplexity"] = float(np.exp(loss))
    changes: dict[str, Callable[..., Any]] = {"loss": loss_change, "perplexity": _perplexity_change}
    for name, change in changes.items():
        if name not in columns:
            continue
        low, high = bootstrap_interval(samples, change, seed=seed) if all_finite else (np.nan, np.nan)
        columns |= {
            f"{name}_change": float(change(*samples, 0)),
            f"{name}_change_low": low,
            f"{name}_change_high": high,
        }
    return {
        **columns,
        "n_sequences": len(found.sums),
        "n_tokens": int(found.counts.sum()),
        "n_nonfinite": int(found.nonfinite.sum()),
        "status": "no_effect" if idle else "ok" if all_finite else "nonfinite",
    }


def losses_in_words(skip_position_0: bool) -> str:
    """Which losses count and which positions are edited, as a result's meta says it."""
    edited = "position 0 is not edited" if skip_position_0 else "every position is edited"
    return f"next-token losses of real tokens; {edited}"


def status_counts(table: pd.DataFrame) -> dict[str, int]:
    """How many conditions (rows) there are, and how many of them had losses that are not finite, or no effect."""
    lost, idle = ((table["status"] == status).sum() for status in ("nonfinite", "no_effect"))
    return {"conditions": len(table), "nonfinite_conditions": int(lost), "no_effect_conditions": int(idle)}


def loss_change(sums: Any, counts: Any, base_sums: Any, base_counts: Any, axis: int) -> Any:
    """Mean loss per token minus that of the unedited model, from sums and counts per sequence."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums.sum(axis) / counts.sum(axis) - base_sums.sum(axis) / base_counts.sum(axis)


def _perplexity_change(sums: Any, counts: Any, base_sums: Any, base_counts: Any, axis: int) -> Any:
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.exp(sums.sum(axis) / counts.sum(axis)) - np.exp(base_sums.sum(axis) / base_counts.sum(axis))
