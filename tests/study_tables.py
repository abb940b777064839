"""Reports of compressed variants with numbers of our choice, in the shape that `compression_report` returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from lens_geometry.experiments.study_rows import study_rows, study_table
from lens_geometry.results import Result

SITES = ("attn", "mlp", "block", "value")
FAMILIES = ("rtn", "magnitude", "wanda", "low-rank", "gptq", "blank")


def report(
    perpendicular: Any, parallel: Any, loss: float, *, kl: float | None = None, layer_losses: Any = None, lost: int = 0
) -> Result:
    """A report with those errors in each layer, at every site and mode alike."""
    e_perp, e_par = np.asarray(perpendicular, dtype=float), np.asarray(parallel, dtype=float)
    turned = 1 - (1 - e_par) / np.maximum(np.hypot(1 - e_par, e_perp), 1e-9)
    metrics = {
        "perpendicular_error": e_perp, "parallel_error": e_par, "error": np.hypot(e_perp, e_par),
        "update_cosine_distance": turned,
    }  # fmt: skip
    metrics |= {f"{name}_over_reference": 0.3 * metrics[name] for name in ("perpendicular_error", "error")}
    rows = []
    for mode in ("local", "propagated"):
        for site in SITES:
            for name, values in metrics.items():
                rows += [_row(mode, site, layer, name, value) for layer, value in enumerate(values)]
                rows.append(_row(mode, site, None, name, float(values.mean())))
    rows += [_row("propagated", "", None, "loss_change", loss, n_undefined=lost)]
    rows += [_row("propagated", "", None, "kl", abs(loss) if kl is None else kl)]
    rows += [_row("weights", "", None, "weight_error", float(metrics["error"].mean()) ** 0.5)]
    for layer, value in enumerate([] if layer_losses is None else layer_losses):
        rows += [_row("local", "", layer, "loss_change", value), _row("local", "", layer, "kl", abs(value))]
        rows += [_row("weights", "", layer, "weight_error", float(metrics["error"][layer]))]
    table = pd.DataFrame(rows).astype({"layer": "Int64", "head": "Int64"})
    meta: dict[str, Any] = {"model": {"fingerprint": "b", "name": "base"}, "data": {"tokens_sha256": "t", "text": "t"}}
    return Result("compression", table, meta)


def _row(mode: str, site: str, layer: Any, metric: str, mean: float, *, n_undefined: int = 0) -> dict[str, Any]:
    ends = {"mean": mean, "ci_low": mean - 0.1 * abs(mean), "ci_high": mean + 0.1 * abs(mean), "std": np.nan}
    at = {"mode": mode, "site": site, "layer": layer, "head": None, "metric": metric}
    return {**at, **ends, "ratio_of_norms": mean, "n_tokens": 100, "n_infinite": 0, "n_undefined": n_undefined}


def reports(n: int = 24, *, noise: float = 0.1, of: str = "error", seed: int = 0) -> dict[str, Result]:
    """Variants of six families whose loss goes with one of the quantities, but for noise in its logarithm."""
    rng, found = np.random.default_rng(seed), {}
    for number in range(n):
        size = np.exp(rng.normal(-1.5, 1))
        e_perp, e_par = size * rng.uniform(0.5, 1, 4), size * rng.uniform(0.05, 0.7, 4)
        what = {"error": np.hypot(e_perp, e_par), "perpendicular_error": e_perp, "parallel_error": e_par}[of]
        alone = (what * np.exp(noise * rng.normal(size=4))) ** 2
        loss = float((what**2).sum() * np.exp(noise * rng.normal()))
        label = f"{FAMILIES[number % len(FAMILIES)]}:number={number}"
        found[label] = report(e_perp, e_par, loss, layer_losses=alone)
    return found


def study(*more: dict[str, Any], **options: Any) -> Result:
    """A study of such variants, with further rows."""
    made = reports(**options)
    rows = [row for label, one in made.items() for row in study_rows(label, label.split(":")[0], one)]
    meta = {"model": {"name": "base"}, "data": {"text": "t", "n_sequences": 4, "n_tokens": 400}, "seed": 0}
    return Result("compression_study", study_table([*rows, *more]), meta)
