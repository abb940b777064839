"""The rows of a compression study: what each variant's errors are, beside what it does to the output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from lens_geometry.results import Result

PREDICTORS = (
    "perpendicular_error",
    "parallel_error",
    "error",
    "update_cosine_distance",
    "perpendicular_error_over_reference",
    "error_over_reference",
)
WEIGHTS = "weight_error"
OUTPUTS = ("loss_change", "kl")
ENDS = {"": "mean", "_low": "ci_low", "_high": "ci_high"}
NUMBERS = ("value", *OUTPUTS)


def study_rows(variant: str, family: str, report: Result) -> Iterator[dict[str, Any]]:
    """The rows of one variant from its `compression_report`.

    For each mode and site the mean over layers of every predictor, then that of all sites together ("pooled": the mean
    over sites, its interval the mean of theirs, which is right where the sites' errors move together and else too
    wide), and the error of the weights; all beside the change of loss and the divergence of the whole variant. With
    single layers' losses in the report, also a row for each layer, beside the losses of that layer alone.
    """
    table = report.table
    kept = table[table["head"].isna() & table["metric"].isin((*PREDICTORS, WEIGHTS, *OUTPUTS))]
    outputs: dict[Any, dict[str, dict[str, Any]]] = {}
    errors: dict[Any, list[dict[str, Any]]] = {}
    for row in kept.to_dict("records"):
        layer = None if pd.isna(row["layer"]) else int(row["layer"])
        if row["metric"] in OUTPUTS:
            outputs.setdefault(layer, {})[row["metric"]] = row
        elif layer is None or row["mode"] != "propagated":
            errors.setdefault(layer, []).append(row)
    whole = _outputs(outputs[None])
    lost = sum(int(row["n_infinite"] + row["n_undefined"]) for row in outputs[None].values())
    idle = whole["loss_change"] == 0 and whole["kl"] == 0
    about = record_of(report)
    shared = {
        "variant": variant,
        "family": family,
        "status": "nonfinite" if lost or not math.isfinite(whole["loss_change"]) else "no_effect" if idle else "ok",
        "reason": f"{lost} losses or divergences are not finite" if lost else "",
        "bits_per_weight": _number(about.get("bits_per_weight")),
        "size_bytes": _number(about.get("size_bytes")),
        "n_tokens": int(outputs[None]["loss_change"]["n_tokens"]),
    }
    pooled: dict[tuple[str, str], list[dict[str, float]]] = {}
    for row in errors[None]:
        yield {**shared, **_at(row["mode"], row["site"], row["metric"]), **_value(row), **whole}
        if row["metric"] in PREDICTORS:
            pooled.setdefault((row["mode"], row["metric"]), []).append(_value(row))
    for (mode, metric), values in pooled.items():
        mean = {name: math.fsum(value[name] for value in values) / len(values) for name in values[0]}
        yield {**shared, **_at(mode, "pooled", metric), **mean, **whole}
    for layer in filter(lambda at: at is not None and at in errors, outputs):
        for row in errors[layer]:
            yield {
                **shared,
                **_at(row["mode"], row["site"], row["metric"], layer),
                **_value(row),
                **_outputs(outputs[layer]),
            }


def lost_row(variant: str, family: str, status: str, reason: str) -> dict[str, Any]:
    """The row of a variant that could not be made or measured."""
    nothing = {f"{name}{end}": math.nan for name in NUMBERS for end in ENDS}
    return {
        "variant": variant,
        "family": family,
        "status": status,
        "reason": reason,
        **_at("", "", ""),
        **nothing,
        "bits_per_weight": math.nan,
        "size_bytes": math.nan,
        "n_tokens": 0,
    }


def study_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The rows of all variants as a table, its columns in order."""
    columns = [
        *("variant", "family", "status", "mode", "site", "layer", "predictor"),
        *(f"{name}{end}" for name in NUMBERS for end in ENDS),
        *("bits_per_weight", "size_bytes", "n_tokens", "reason"),
    ]
    return pd.DataFrame(rows, columns=columns).astype({"layer": "Int64"})


def label_of(report: Result) -> tuple[str, str]:
    """`(variant, family)` of a report by itself: what its compressed model says was done to it, or its name."""
    about = record_of(report)
    name = str((report.meta.get("compressed") or {}).get("name") or "compressed")
    if not about:
        return name, name
    settings = ",".join(f"{key}={value}" for key, value in (about.get("settings") or {}).items() if value is not None)
    return f"{about['method']}:{settings}" if settings else str(about["method"]), str(about["method"])


def record_of(report: Result) -> Mapping[str, Any]:
    """What the compressed model of a report says was done to it; empty where it says nothing."""
    compressed = report.meta.get("compressed") or {}
    return report.meta.get("compression") or compressed.get("compression") or {}


def _at(mode: Any, site: Any, predictor: Any, layer: Any = None) -> dict[str, Any]:
    return {"mode": mode, "site": site, "layer": layer, "predictor": predictor}


def _value(row: Mapping[str, Any]) -> dict[str, float]:
    return {f"value{end}": float(row[name]) for end, name in ENDS.items()}


def _outputs(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Change of loss and divergence with their intervals."""
    return {
        f"{name}{end}": float(rows[name][column]) if name in rows else math.nan
        for name in OUTPUTS
        for end, column in ENDS.items()
    }


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
