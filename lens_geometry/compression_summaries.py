"""What `compare` prints: the whole model's numbers, a row for each site and mode, the gate's answer."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from lens_geometry.axes import interval, number
from lens_geometry.compression_gate import (
    LOSS,
    PERPENDICULAR,
    Verdict,
    bound_words,
    measured,
    site_row,
    whole_row,
    worst_layers,
)
from lens_geometry.compression_markdown import compressed_name
from lens_geometry.results import Result


def compression_summary(table: pd.DataFrame) -> str:
    """Loss, KL and agreement; then means over layers with the worst layer, local before propagated."""
    lines = []
    change = whole_row(table, LOSS)
    if change is not None:
        ends = [_value(table, name) for name in ("loss_base", "loss_compressed")]
        found = interval(*(float(change[name]) for name in ("mean", "ci_low", "ci_high")), signed=True)
        lines.append(f"loss {ends[0]} -> {ends[1]} nats per token, change {found}")
        lines.append(f"KL(base || compressed) {_value(table, 'kl')} nats, same top token {_value(table, 'agreement')}")
    rows = []
    for mode, site in measured(table):
        layer, value = worst_layers(table, mode, site, 1)[0]
        means = {
            name: _mean(site_row(table, mode, site, metric))
            for name, metric in (
                ("|e|/|u|", "error"),
                ("|e_perp|/|u|", PERPENDICULAR),
                ("|e_par|/|u|", "parallel_error"),
                ("perpendicular share", "perpendicular_share"),
            )
        }
        rows.append({"mode": mode, "site": site, **means, "worst layer": f"{layer} ({number(value)})"})
    lines.append("error of a layer's update, mean over tokens, then over layers; 'worst' is by |e_perp|/|u|")
    return "\n".join([*lines, pd.DataFrame(rows).to_string(index=False)])


def models_summary(compared: Sequence[tuple[Result, Verdict]]) -> str:
    """Several compressed models beside each other, a row for each."""
    rows = []
    for result, verdict in compared:
        table = result.table
        pairs = measured(table)
        first = [pair for pair in pairs if pair[0] == pairs[0][0]]
        errors = {f"{site} ({mode})": _mean(site_row(table, mode, site, PERPENDICULAR)) for mode, site in first}
        about = {"model": compressed_name(result), "change of loss": _value(table, LOSS, signed=True)}
        rows.append({**about, "KL": _value(table, "kl"), **errors, "verdict": verdict.word})
    return "|e_perp|/|u|, mean over tokens, then over layers\n" + pd.DataFrame(rows).to_string(index=False)


def verdict_summary(verdict: Verdict, name: str = "") -> str:
    """Which bounds hold, or every offending layer with its value and bound."""
    of = f"{name}: " if name else ""
    bounds = " and ".join(
        f"--max-{'loss-change' if metric == LOSS else 'perpendicular'} {bound_words(metric, bound)}"
        for metric, bound in verdict.bounds.items()
    )
    if verdict.passed:
        return f"{of}passed: {verdict.checked:,} numbers within {bounds}" if bounds else ""
    head = f"{of}failed: {len(verdict.offending):,} of {verdict.checked:,} numbers are not within {bounds}"
    return "\n".join([head, *(f"  {offence.words}" for offence in verdict.offending)])


def _value(table: pd.DataFrame, metric: str, *, signed: bool = False) -> str:
    row = whole_row(table, metric)
    return "not measured" if row is None else number(float(row["mean"]), signed=signed)


def _mean(row: pd.Series | None) -> str:
    return "not measured" if row is None else number(float(row["mean"]))
