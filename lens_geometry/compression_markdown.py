"""Compression error as Markdown: short enough for a pull-request comment, and safe to paste whatever names hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lens_geometry.axes import interval, number
from lens_geometry.compression_gate import (
    LOSS,
    NAMES,
    PERPENDICULAR,
    Verdict,
    bound_words,
    layer_rows,
    measured,
    site_row,
    whole_row,
    worst_layers,
)
from lens_geometry.results import Result, jsonable

LIMIT = 65_536  # characters of a comment on GitHub
MOST_OFFENDING = 40  # layers listed
MARKS = {"passed": "✅", "failed": "❌", "no bounds": "📏"}
PROVENANCE = (
    "model", "compressed", "calibration", "data", "settings", "token_mask", "versions", "created", "seconds",
)  # fmt: skip
LOCAL = (".path", ".source")  # of no use on another machine
Compared = tuple[Result, Verdict]


def summary_markdown(compared: Sequence[Compared], *, limit: int = LIMIT) -> str:
    """One or several compressed models against their base: verdict first, numbers, offending layers, provenance folded.

    What would not fit into `limit` characters is left out from the end, and the text says so.
    """
    return _fitted(_blocks(compared), limit)


def _blocks(compared: Sequence[Compared]) -> Iterator[str]:
    several = len(compared) > 1
    yield _heading(compared)
    if several:
        yield _overview(compared)
    for result, verdict in compared:
        yield from _sections(result, verdict, max(5, MOST_OFFENDING // len(compared)), several=several)
    for result, _ in compared:
        yield _provenance(result, several=several)


def _fitted(blocks: Iterable[str], limit: int) -> str:
    note = "*More does not fit here; the JSON and the table have all of it.*\n"
    kept, used = [], 0
    for block in blocks:
        if used + len(block) + 2 > limit - len(note) - 2:
            kept.append(note.rstrip("\n"))
            break
        kept.append(block)
        used += len(block) + 2
    return ("\n\n".join(kept) + "\n")[:limit]


def _heading(compared: Sequence[Compared]) -> str:
    if len(compared) == 1:
        result, verdict = compared[0]
        return f"{_verdict_line(verdict)}\n\n{code(compressed_name(result))} against {code(base_name(result))}"
    failed = sum(not verdict.passed for _, verdict in compared)
    bounds = compared[0][1].bounds
    word = "failed" if failed else "passed" if bounds else "no bounds"
    counts = f"{failed:,} of {len(compared):,} models are over a bound" if bounds else "no bounds were given"
    return f"**{MARKS[word]} Compression error: {word}**: {counts}\n\nAgainst {code(base_name(compared[0][0]))}"


def _verdict_line(verdict: Verdict) -> str:
    """The first line: what was decided, by which bounds."""
    bounds = "; ".join(
        f"{_name(name)} ≤ {bound_words(name, bound)}"
        + (f" in every layer ({verdict.mode}, at {', '.join(verdict.sites)})" if name == PERPENDICULAR else "")
        for name, bound in verdict.bounds.items()
    )
    start = f"**{MARKS[verdict.word]} Compression error: {verdict.word}**"
    if not verdict.bounds:
        return f"{start} were given"
    if verdict.passed:
        return f"{start}: {verdict.checked:,} numbers within {bounds}"
    return f"{start}: {len(verdict.offending):,} of {verdict.checked:,} numbers are not within {bounds}"


def _overview(compared: Sequence[Compared]) -> str:
    rows = [
        [
            code(compressed_name(result), table=True),
            f"{MARKS[verdict.word]} {verdict.word}",
            whole_words(result.table, LOSS, signed=True),
            whole_words(result.table, "kl"),
            _worst(result.table, *pair, most=1) if (pair := _worst_pair(result.table)) else "not measured",
        ]
        for result, verdict in compared[:100]
    ]
    more = f"\n\nand {len(compared) - 100:,} more" if len(compared) > 100 else ""
    return _grid(["model", "verdict", "change of loss", "KL", "worst layer"], rows) + more


def _worst_pair(table: pd.DataFrame) -> tuple[str, str] | None:
    """Mode and site of the largest perpendicular error; of the first mode that was run."""
    modes = [mode for mode, _ in measured(table)]
    rows = layer_rows(table, modes[0], PERPENDICULAR) if modes else pd.DataFrame()
    rows = rows[np.isfinite(rows["mean"].astype(float))] if len(rows) else rows
    return None if rows.empty else (modes[0], str(rows.loc[rows["mean"].idxmax(), "site"]))


def _sections(result: Result, verdict: Verdict, most: int, *, several: bool) -> Iterator[str]:
    if several:
        yield f"#### {code(compressed_name(result))}\n\n{_verdict_line(verdict)}"
    if verdict.offending:
        yield _offending(verdict, most)
    whole = [
        ["loss, base", whole_words(result.table, "loss_base")],
        ["loss, compressed", whole_words(result.table, "loss_compressed")],
        ["change of loss (nats per token)", whole_words(result.table, LOSS, signed=True)],
        ["KL of base and compressed (nats per token)", whole_words(result.table, "kl")],
        ["same most likely token", whole_words(result.table, "agreement", percent=True)],
    ]
    if whole_row(result.table, LOSS) is not None:
        yield _grid(["whole model", "mean [95 %]"], whole)
    if measured(result.table):
        yield _sites(result.table)
    warnings = [f"- {plain(line)}" for line in dict.fromkeys(map(str, result.meta.get("warnings") or []))]
    if warnings:
        more = [f"- and {len(warnings) - 10:,} more"] if len(warnings) > 10 else []
        yield "\n".join(["Take note:", "", *warnings[:10], *more])


def _offending(verdict: Verdict, most: int) -> str:
    rows = []
    for found in verdict.offending[:most]:
        signed = found.metric == LOSS
        value = interval(found.value, found.low, found.high, signed=signed)
        reason = "" if found.reason == "over the bound" else f"; {found.reason}"
        bound = bound_words(found.metric, found.bound)
        rows.append([plain(found.place, table=True), _name(found.metric, table=True), f"{value}{reason}", bound])
    more = len(verdict.offending) - most
    note = f"\n\nand {more:,} more, all less far over the bound" if more > 0 else ""
    return _grid(["offending", "number", "value [95 %]", "bound"], rows) + note


def _sites(table: pd.DataFrame) -> str:
    rows = []
    for mode, site in measured(table):
        means = [site_words(table, mode, site, name) for name in (PERPENDICULAR, "parallel_error")]
        share = site_words(table, mode, site, "perpendicular_share", percent=True)
        rows.append([plain(site, table=True), mode, *means, share, _worst(table, mode, site)])
    worst = f"layers with the largest {_name(PERPENDICULAR, table=True)}"
    head = ["site", "mode", _name(PERPENDICULAR, table=True), r"\|e_par\|/\|u\|", "perpendicular share", worst]
    return _grid(head, rows)


def _worst(table: pd.DataFrame, mode: str, site: str, most: int = 3) -> str:
    found = ", ".join(f"{layer} ({number(value)})" for layer, value in worst_layers(table, mode, site, most))
    return f"{plain(site, table=True)} {found}" if most == 1 else found


def whole_words(table: pd.DataFrame, metric: str, *, signed: bool = False, percent: bool = False) -> str:
    """A number of the whole model with its interval."""
    return _words(whole_row(table, metric), signed, percent)


def site_words(table: pd.DataFrame, mode: str, site: str, metric: str, *, percent: bool = False) -> str:
    """A metric's mean over the layers of a site, with its interval."""
    return _words(site_row(table, mode, site, metric), False, percent)


def _words(row: pd.Series | None, signed: bool, percent: bool) -> str:
    if row is None:
        return "not measured"
    value, low, high = (float(row[name]) for name in ("mean", "ci_low", "ci_high"))
    if percent and np.isfinite(value):
        ends = f" [{100 * low:.1f}, {100 * high:.1f}]" if np.isfinite([low, high]).all() else ""
        return f"{100 * value:.1f}{ends} %"
    return interval(value, low, high, signed=signed)


def _provenance(result: Result, *, several: bool) -> str:
    facts = [
        [code(name, table=True), code(value, table=True)]
        for part in PROVENANCE
        for name, value in _flat(jsonable(result.meta.get(part)), part)
        if value not in ("", "None") and not name.endswith(LOCAL)
    ]
    name = re.sub(r"[^\w ./:-]", "·", " ".join(compressed_name(result).split()))  # read as HTML there, not as Markdown
    title = f"Provenance{f' of {name}' if several else ''}"
    return f"<details>\n<summary>{title}</summary>\n\n{_grid(['what', 'value'], facts)}\n\n</details>"


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}")
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    else:
        yield name, str(value)


def base_name(result: Result) -> str:
    """The dense model's name."""
    return _model_name(result, "model")


def compressed_name(result: Result) -> str:
    """The compressed model's name."""
    return _model_name(result, "compressed")


def _model_name(result: Result, part: str) -> str:
    about = result.meta.get(part)
    return str(about.get("name") or part) if isinstance(about, dict) else str(about or part)


def _name(metric: str, *, table: bool = False) -> str:
    return NAMES[metric].replace("|", r"\|") if table else NAMES[metric].replace("_", r"\_")


def _grid(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; its cells are escaped already."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns), *lines])


def code(value: Any, *, table: bool = False, most: int = 200) -> str:
    """A name as code, where neither Markdown, HTML nor mentions are read; a pipe would still end a table's cell."""
    text = " ".join(str(value).split()) or "none"
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    text = text.replace("|", r"\|") if table else text
    return f"{fence}{space}{text}{space}{fence}"


def plain(value: Any, *, table: bool = False, most: int = 500) -> str:
    """Words that were not written for Markdown, in which nothing is a sign."""
    text = " ".join(str(value).split())
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    text = re.sub(r"([\\`*_\[\]#~|])", r"\\\1", text) if not table else re.sub(r"([\\`*_\[\]~|])", r"\\\1", text)
    return _html(text).replace("@", "@\u200b")


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
