"""A synthetic table of compression error: like a real one, with numbers of our choice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from lens_geometry.results import Result

SITES = ("attn", "mlp", "block", "value")
LEVELS = {"attn": 0.30, "mlp": 0.20, "block": 0.15, "value": 0.25}  # |e|/|u|, mean over layers, local
WHOLE = {"loss_base": 3.40, "loss_compressed": 3.52, "loss_change": 0.12, "kl": 0.11, "agreement": 0.86}
ALIGNMENT = {"pearson_perpendicular": 0.999, "spearman_perpendicular": 0.99, "pearson_parallel": 0.41,
             "spearman_parallel": 0.37}  # fmt: skip
META: dict[str, Any] = {
    "model": {"name": "a model", "class": "TransformerBridge", "dtype": "float32", "n_layers": 6, "d_model": 192,
             "fingerprint": "ab" * 32, "compression": None},
    "compressed": {"name": "rounded | <b>4 bits</b>", "class": "TransformerBridge", "dtype": "float32", "n_layers": 6,
                   "d_model": 192, "fingerprint": "cd" * 32},
    "compression": {"method": "rtn", "settings": {"bits": 4, "group_size": 64}, "bits_per_weight": 4.25},
    "data": {"text": "austen", "n_sequences": 8, "n_tokens": 1024, "sequence_length": 128, "tokens_sha256": "ef" * 32},
    "settings": {"sites": list(SITES), "modes": ["local", "propagated"], "seed": 0},
    "seed": 0,
    "versions": {"python": "3.11.2", "torch": "2.13.0", "transformer-lens": "3.9.0"},
    "created": "2025-11-30T08:00:00+00:00",
    "seconds": 12.5,
    "token_mask": "padding and position 0 are out",
    "warnings": ["site value was left out of layer | 3"],
}  # fmt: skip


def compression_table(
    layers: int = 6,
    modes: tuple[str, ...] = ("local", "propagated"),
    sites: tuple[str, ...] = SITES,
    heads: int = 2,
    layer_losses: bool = False,
) -> pd.DataFrame:
    """Every mode, site, layer and metric; the perpendicular error of layer l is level * (1 + l / layers) * share."""
    rows: list[dict[str, Any]] = []
    for mode in modes:
        for site in sites:
            errors = []
            for layer in range(layers):
                error = LEVELS[site] * (1 + layer / layers) * (1.0 if mode == "local" else 2.0)
                errors.append(error)
                found = list(_metrics(error).items())
                for head in [None, *(range(heads) if site == "value" else ())]:
                    rows += [_row(mode, site, layer, head, name, value) for name, value in found]
            rows += [_row(mode, site, None, None, name, value) for name, value in _metrics(np.mean(errors)).items()]
            rows += [_row(mode, site, None, None, name, value) for name, value in ALIGNMENT.items()]
    for site in sites:
        for layer in range(layers):
            dense = {"update_over_reference": 0.4, "reference_cosine_distance": 0.07, "cosine_link": 0.071}
            rows += [_row("dense", site, layer, None, name, value) for name, value in dense.items()]
    if "propagated" in modes:
        rows += [_row("propagated", "", None, None, name, value) for name, value in WHOLE.items()]
    for layer in range(layers if layer_losses else 0):
        rows += [_row("local", "", layer, None, name, 0.01 * layer) for name in ("loss_change", "kl")]
    rows += [_row("weights", "", layer, None, "weight_error", 0.1) for layer in [*range(layers), None]]
    return pd.DataFrame(rows).astype({"layer": "Int64", "head": "Int64"})


def _metrics(error: float) -> dict[str, float]:
    perpendicular = 0.96 * error
    parallel = math.sqrt(error**2 - perpendicular**2)
    return {
        "error": error, "perpendicular_error": perpendicular, "parallel_error": parallel,
        "parallel_shift": -0.3 * parallel,
        "perpendicular_share": 0.96**2, "parallel_share": 1 - 0.96**2, "update_cosine_distance": 0.5 * perpendicular**2,
        "error_over_reference": 0.4 * error, "perpendicular_error_over_reference": 0.4 * perpendicular,
    }  # fmt: skip


def _row(mode: str, site: str, layer: int | None, head: int | None, metric: str, value: float) -> dict[str, Any]:
    return {
        "mode": mode, "site": site, "layer": layer, "head": head, "metric": metric, "mean": value,
        "ci_low": value - 0.1 * abs(value), "ci_high": value + 0.1 * abs(value), "std": 0.3 * abs(value),
        "ratio_of_norms": value, "n_tokens": 1016, "n_infinite": 0, "n_undefined": 0,
    }  # fmt: skip


def changed(table: pd.DataFrame, where: dict[str, Any], **values: Any) -> pd.DataFrame:
    """A copy with columns set in the rows that have these values (None: missing)."""
    chosen = pd.Series(True, table.index)
    for column, value in where.items():
        chosen &= table[column].isna() if value is None else table[column].eq(value).fillna(False).astype(bool)
    assert chosen.any()
    table = table.copy()
    for column, value in values.items():
        table.loc[chosen, column] = value
    return table


def compression(table: pd.DataFrame | None = None, **meta: Any) -> Result:
    """As `compression_report` returns it."""
    return Result("compression", compression_table() if table is None else table, {**META, **meta})
