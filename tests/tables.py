"""Synthetic result tables for the tests of figures and report: like real ones, with numbers of our choice."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from lens_geometry.results import Result

FRACTIONS = {"attn": 0.22, "mlp": 0.33, "block": 0.30, "value": 0.62, "value_excl_self": 0.41}
LOSSES = {  # change of loss at s_par = 0 and at s_perp = 0
    "attn": (1.31, 8.0),
    "mlp": (3.05, 20.4),
    "value": (1.87, 7.6),
    "value_excl_self": (1.20, 7.6),
}
CONTROLS = {"isotropic": 1.6, "gain": 1.1, "random_reference": 0.12, "shuffled_reference": 0.4}
GRIDS = {
    "parallel": (-1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0),
    "perpendicular": (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5),
}
BASE = 3.46
META: dict[str, Any] = {
    "model": {"name": "smollm2-135m", "architecture": "LlamaForCausalLM", "n_layers": 30, "d_model": 576,
              "n_heads": 9, "dtype": "float32"},
    "data": {"text": "austen", "n_sequences": 8, "n_tokens": 2048, "sequence_length": 256},
    "seed": 0,
    "token_mask": "padding and position 0 are out",
    "versions": {"python": "3.11.2", "torch": "2.13.0", "transformer-lens": "3.9.0"},
    "created": "2025-11-30T08:00:00+00:00",
    "seconds": 71.5,
    "warnings": [],
}  # fmt: skip


def profile_table(fractions: dict[str, float] | None = None, layers: int = 30, heads: int = 9) -> pd.DataFrame:
    """Every site, layer and head; `fractions` are the sites' parallel_fraction averaged over layers."""
    rows: list[dict[str, Any]] = []
    for index, (site, level) in enumerate((fractions or FRACTIONS).items()):
        noise = np.random.default_rng(index)
        wave = np.sin(np.arange(layers) / 4 + index)
        for head in [pd.NA, *(range(heads) if site.startswith("value") else ())]:
            shift = 0.0 if head is pd.NA else float(noise.normal(0, 0.08))
            for layer in range(layers):
                centre = 0.25 * level * (wave[layer] - wave.mean())
                fraction = float(np.clip(level + centre + shift, 0.01, 0.99))
                for metric, value in _metrics(fraction, layer, layers, index).items():
                    rows.append(_profile_row(site, layer, head, metric, value))
    return pd.DataFrame(rows).astype({"head": "Int64"})


def _metrics(fraction: float, layer: int, layers: int, index: int) -> dict[str, float]:
    rest, sign = math.sqrt(1 - fraction**2), 1 if index % 2 == 0 or layer < layers // 3 else -1
    size = 0.15 + 2.0 * math.exp(-layer / 2) + 0.02 * index
    return {
        "parallel_fraction": fraction, "perpendicular_fraction": rest, "parallel_energy": fraction**2,
        "perpendicular_energy": rest**2, "parallel_ratio": fraction / rest, "cosine": sign * fraction,
        "alpha": sign * fraction * size, "update_over_reference": size,
    }  # fmt: skip


def _profile_row(site: str, layer: int, head: Any, metric: str, value: float) -> dict[str, Any]:
    spread = 0.35 * abs(value)
    quantiles = {f"q{q:02d}": value + spread * (q - 50) / 45 for q in (5, 10, 25, 50, 75, 90, 95)}
    return {
        "site": site, "layer": layer, "head": head, "metric": metric, "mean": value, "std": spread,
        "ci_low": value - 0.04 * abs(value), "ci_high": value + 0.04 * abs(value), **quantiles,
        "ratio_of_norms": value, "n_tokens": 2040, "n_infinite": 0, "n_undefined": 0,
    }  # fmt: skip


def sweep_table(
    losses: dict[str, tuple[float, float]] | None = None, controls: Sequence[str] = tuple(CONTROLS)
) -> pd.DataFrame:
    """Every site, component and scale; controls at scales 0 and 0.5, only isotropic for both components."""
    rows: list[dict[str, Any]] = []
    for site, removals in (losses or LOSSES).items():
        for component, removal in zip(GRIDS, removals, strict=True):
            rows += [sweep_row(site, component, s, _change(removal, component, s)) for s in GRIDS[component]]
            for control in controls:
                if component == "parallel" or control == "isotropic":
                    whole = max(removals) if control == "gain" else removal
                    changes = {s: CONTROLS[control] * _change(whole, component, s) for s in (0.0, 0.5)}
                    rows += [sweep_row(site, component, s, changes[s], control) for s in changes]
    return pd.DataFrame(rows)


def _change(removal: float, component: str, scale: float) -> float:
    steep = 2.2 if component == "parallel" else 3.0
    return 0.0 if scale == 1 else removal * abs(1 - scale) ** steep - 0.02 * math.sin(math.pi * scale)


def sweep_row(
    site: str, component: str, scale: float, change: float, control: str = "none", half: float | None = None
) -> dict[str, Any]:
    """One condition; the interval is `change` +- `half` (a twentieth when not given, NaN for none)."""
    half = abs(change) / 20 if half is None else half
    row: dict[str, Any] = {"site": site, "layers": "all", "grouping": "each", "control": control,
                           "component": component, "scale": scale}  # fmt: skip
    row["parallel"] = scale if component == "parallel" else 1.0
    row["perpendicular"] = scale if component == "perpendicular" else 1.0
    ends = {"": change, "_low": change - half, "_high": change + half}
    row |= {"loss": BASE + change, "base_loss": BASE, "perplexity": math.exp(BASE + change)}
    row |= {f"loss_change{end}": value for end, value in ends.items()}
    row |= {f"perplexity_change{end}": math.exp(BASE + value) - math.exp(BASE) for end, value in ends.items()}
    return row | {"n_sequences": 8, "n_tokens": 2040, "n_nonfinite": 0, "status": "ok"}


def lose(table: pd.DataFrame, rows: pd.Series) -> pd.DataFrame:
    """The same sweep with some conditions not finite."""
    changed = table.copy()
    numbers = [name for name in table.columns if name.startswith(("loss", "perplexity"))]
    changed.loc[rows, numbers] = math.nan
    changed.loc[rows, "n_nonfinite"] = 3
    changed.loc[rows, "status"] = "nonfinite"
    return changed


def profile(*args: Any, **kwargs: Any) -> Result:
    """A Result of `profile_table`."""
    return Result("profile", profile_table(*args, **kwargs), copy.deepcopy(META))


def sweep(table: pd.DataFrame | None = None, **kwargs: Any) -> Result:
    """A Result of the table, or of `sweep_table`."""
    found = sweep_table(**kwargs) if table is None else table
    return Result("scaling_sweep", found, copy.deepcopy(META))


def without_interval(table: pd.DataFrame) -> pd.DataFrame:
    """The same sweep as one sequence gives it."""
    ends = [name for name in table.columns if name.endswith(("_low", "_high"))]
    return table.assign(**dict.fromkeys(ends, math.nan), n_sequences=1)


def heads() -> Result:
    """A head sweep of 3 layers by 4 heads at one site: head 2 of layer 1 costs most, head 0 of layer 2 gains."""
    rows: list[dict[str, Any]] = []
    for method, gain in (("exact", 1.0), ("first_order", 0.8)):
        for layer in range(3):
            singles = [0.01 * (head + 1) * (layer + 1) for head in range(4)]
            singles[2] += 0.5 * (layer == 1)
            singles[0] -= 0.1 * (layer == 2)
            changes = [("single", head, gain * change) for head, change in enumerate(singles)]
            changes += [("sum_of_singles", pd.NA, gain * sum(singles))]
            changes += [("all", pd.NA, 1.5 * sum(singles))] if method == "exact" else []
            rows += [
                {"site": "value", "grouping": "each", "layer": layer, "head": head, "kind": kind, "method": method,
                 "parallel": 0.0, "perpendicular": 1.0, "loss": BASE + change, "base_loss": BASE, "loss_change": change,
                 "loss_change_low": change - 0.01, "loss_change_high": change + 0.01, "n_sequences": 8,
                 "n_tokens": 1016, "n_nonfinite": 0, "status": "ok"}
                for kind, head, change in changes
            ]  # fmt: skip
    table = pd.DataFrame(rows).astype({"head": "Int64"})
    return Result("head_sweep", table, {**META, "agreement": []})


def strengths() -> Result:
    """Applied strength at two sites of 3 layers: attn is weak and costs little, value strong and costs more."""
    rows: list[dict[str, Any]] = []
    for site, strength, cost in (("attn", 0.25, 0.3), ("value", 0.5, 0.9)):
        for component, s, c in (("parallel", strength, cost), ("perpendicular", 0.9, 5 * cost)):
            for layer in (pd.NA, 0, 1, 2):
                change = c if layer is pd.NA else c / 4
                rows.append(
                    {"site": site, "grouping": "each", "component": component, "scale": 0.0, "layer": layer,
                     "change_over_branch": s, "change_over_branch_low": s - 0.02, "change_over_branch_high": s + 0.02,
                     "change_energy": s * s, "change_energy_low": s * s - 0.01, "change_energy_high": s * s + 0.01,
                     "norm_ratio": 0.9, "norm_ratio_low": 0.85, "norm_ratio_high": 0.95, "n_undefined": 0,
                     "loss": BASE + change, "base_loss": BASE, "loss_change": change, "loss_change_low": change - 0.05,
                     "loss_change_high": change + 0.05, "n_sequences": 8, "n_tokens": 1016, "n_nonfinite": 0,
                     "status": "ok", "loss_per_strength": change / s}
                )  # fmt: skip
    return Result("applied_strength", pd.DataFrame(rows).astype({"layer": "Int64"}), dict(META))


def generation_table(sites: Sequence[str] = ("attn", "value"), layers: int = 4, steps: int = 6) -> pd.DataFrame:
    """A profile over generation steps, the rows without a layer being the means over layers."""
    rows: list[dict[str, Any]] = []
    for index, site in enumerate(sites):
        for layer in [pd.NA, *range(layers)]:
            height = (layers - 1) / 2 if layer is pd.NA else layer
            for step in range(steps):
                fraction = 0.05 + 0.07 * index + 0.3 * height / layers + 0.2 * step / steps
                for metric, value in _metrics(fraction, 0, 3, index).items():
                    rows.append({
                        "site": site, "layer": layer, "step": step, "metric": metric, "mean": value, "std": 0.1,
                        "ci_low": 0.9 * value, "ci_high": 1.1 * value, "n": 3, "n_infinite": 0, "n_undefined": 0,
                    })  # fmt: skip
    return pd.DataFrame(rows).astype({"layer": "Int64"})


def continuations_table(text: str = "once again, <b>again</b>", prompt: str = "It was\n1 < 2") -> pd.DataFrame:
    """One prompt, unedited and under three edits: one that differs in the middle, one not finite, one idle."""
    plain = "once upon a time"
    rows = [
        ("none", 1.0, "always", plain, len(plain), 4, "ok"),
        ("attn", 0.0, "new", text, 5, 1, "ok"),
        ("attn", 3.0, "always", "!!!!", 0, 0, "nonfinite"),
        ("mlp", 0.5, "prompt", plain, len(plain), 4, "no_effect"),
    ]
    names = ("site", "parallel", "when", "text", "agreed_characters", "n_agree", "status")
    table = pd.DataFrame([dict(zip(names, row, strict=True)) for row in rows])
    logprobs = [-0.5, -1.75, math.nan, -0.5]
    more = {"prompt": 0, "prompt_text": prompt, "n_new": 4, "logprob": logprobs, "repetition": [0.0, 0.5, 1.0, 0.0]}
    table = table.assign(**more, logprob_change=[x + 0.5 for x in logprobs], token_ids="1 2 3 4", eos_step=pd.NA)
    return table.astype({"eos_step": "Int64"})
