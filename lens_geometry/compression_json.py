"""Compression error as JSON for machines: verdict, bounds, offending layers, every number of a layer, provenance.

Numbers that are not finite are null; the counts beside them, and an offending row's reason, say why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from lens_geometry.compression_gate import Verdict, measured
from lens_geometry.compression_markdown import base_name, compressed_name
from lens_geometry.results import Result, jsonable, replace_file

FORMAT = 1


def report_json(compared: Sequence[tuple[Result, Verdict]]) -> dict[str, Any]:
    """The whole document, in JSON's own types.

        {"format": 1, "verdict": "failed", "bounds": {...}, "offending": [...], "comparisons": [
            {"base": ..., "compressed": ..., "verdict": ..., "offending": [...], "whole_model": {"loss_change": {...}},
             "sites": [...], "layers": [...], "weights": [...], "meta": {...}}]}

    `verdict` is "passed", "failed", or "no bounds", of all models together and of each. `layers` has a row for every
    mode, site, layer and metric; the rows of single heads are in the result's table alone.
    """
    failed = any(not verdict.passed for _, verdict in compared)
    bounds = compared[0][1].bounds
    comparisons = [_comparison(result, verdict) for result, verdict in compared]
    document = {
        "format": FORMAT,
        "verdict": "failed" if failed else "passed" if bounds else "no bounds",
        "bounds": bounds,
        "gate_mode": compared[0][1].mode,
        "offending": [
            {"compressed": found["compressed"], **offence} for found in comparisons for offence in found["offending"]
        ],
        "comparisons": comparisons,
    }
    return _finite(document)


def write_json(compared: Sequence[tuple[Result, Verdict]], path: Path) -> None:
    """Write the document in one step."""
    text = json.dumps(report_json(compared), indent=1, ensure_ascii=False, allow_nan=False)
    replace_file(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))


def _comparison(result: Result, verdict: Verdict) -> dict[str, Any]:
    table = result.table
    pooled = table[table["head"].isna()]
    single, over = pooled["layer"].notna(), pooled["layer"].isna()
    whole = pooled[over & (pooled["site"] == "") & (pooled["mode"] == "propagated")]
    return {
        "base": base_name(result),
        "compressed": compressed_name(result),
        "verdict": verdict.word,
        "checked": verdict.checked,
        "offending": [asdict(offence) for offence in verdict.offending],
        "whole_model": {row["metric"]: _numbers(row) for row in whole.to_dict("records")},
        "sites": [
            {
                "mode": mode,
                "site": site,
                "over_layers": {
                    row["metric"]: _numbers(row)
                    for row in pooled[over & (pooled["site"] == site) & (pooled["mode"] == mode)].to_dict("records")
                },
            }
            for mode, site in measured(table)
        ],
        "layers": _rows(pooled[single & (pooled["mode"] != "weights")]),
        "weights": _rows(pooled[pooled["mode"] == "weights"]),
        "meta": jsonable(result.meta),
    }


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    kept = ("mean", "ci_low", "ci_high", "n_tokens", "n_infinite", "n_undefined")
    return {name: _value(row[name]) for name in kept}


def _rows(rows: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {name: _value(value) for name, value in row.items()} for row in rows.drop(columns="head").to_dict("records")
    ]


def _value(value: Any) -> Any:
    return None if pd.isna(value) else value.item() if hasattr(value, "item") else value


def _finite(value: Any) -> Any:
    """The same with null for numbers that are not finite."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
