"""The report's building blocks as HTML: notes, tables, figures, switches. Escaping happens here."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import style

GLYPHS = {
    "circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲", "triangle-down": "▼", "pentagon": "⬟",
    "hexagon": "⬢", "diamond-open": "◇", "square-open": "□", "triangle-up-open": "△", "star-open": "☆",
    "star": "★",
    "pentagon-open": "⬠", "hexagon-open": "⬡", "bowtie-open": "⋈",
}  # fmt: skip
DASHES = {
    "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "11 4", "longdashdot": "11 3 2 3",
    "solid": "none", "2px,5px": "2 5", "9px,3px": "9 3",
}  # fmt: skip


def text(value: Any) -> str:
    """Escaped for HTML, attributes included."""
    return html.escape(str(value))


def notes(lines: Iterable[str]) -> str:
    """A box that one doesn't overlook, or nothing when there are no lines."""
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f'<aside role="note"><strong>Take note</strong><ul>{items}</ul></aside>' if items else ""


def embedded(key: str, dumped: str) -> str:
    """JSON text in a script element of id `key`; no character of it can end the element."""
    safe = dumped.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="{text(key)}">{safe}</script>'


def grid(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "numbers") -> str:
    """A table that scrolls inside its own box; what follows a line break in a cell is small print."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in columns)
    body = "".join(f'<tr><th scope="row">{text(first)}</th>{"".join(map(_cell, rest))}</tr>' for first, *rest in rows)
    top = f"<thead><tr>{head}</tr></thead>" if columns else ""
    return (
        f'<div class="card"><p class="caption">{text(caption)}</p><div class="scroll" tabindex="0"'
        f' role="region" aria-label="{text(caption)}"><table class="{text(kind)}">{top}<tbody>{body}</tbody>'
        "</table></div></div>"
    )


def _cell(value: str) -> str:
    first, _, second = value.partition("\n")
    return f"<td>{text(first)}{f'<small>{text(second)}</small>' if second else ''}</td>"


def details(summary: str, inside: str) -> str:
    """Something to unfold."""
    return f"<details><summary>{text(summary)}</summary>{inside}</details>"


def definitions(meanings: Mapping[str, str]) -> str:
    """A list of names and what they mean."""
    items = (f"<dt>{text(name)}</dt><dd>{text(meaning)}</dd>" for name, meaning in meanings.items())
    return f"<dl>{''.join(items)}</dl>"


def plot(
    drawn: go.Figure,
    key: str,
    title: str,
    caption: str,
    *,
    quantity: str = "",
    switched: bool = True,
    legend: bool = False,
) -> str:
    """A figure of one panel. Title and caption become text of the page, where they wrap and are read aloud.

    `quantity` is the radio button that shows it, `switched` whether the section's check boxes act on it, `legend`
    whether it keeps its own legend, where neither switches nor the caption say what a line is.
    """
    margin = {"l": 52, "r": 14, "t": 14, "b": 84 if legend else 44}
    drawn.layout.annotations = ()
    drawn.update_layout(title=None, showlegend=legend, dragmode=False, margin=margin)
    drawn.update_layout(height=int(drawn.layout.height) - 110)
    flags = f' data-quantity="{text(quantity)}"' if quantity else ""
    reached = ' data-switched="yes"' if switched else ""
    return (
        f'<figure{flags}><h3>{text(title)}</h3><div class="plot" role="img"'
        f' aria-label="{text(title)}. {text(caption)}" data-figure="{text(key)}"{reached}'
        f' style="height:{drawn.layout.height}px"></div>{embedded(key, drawn.to_json())}'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def site_switch(site: str) -> str:
    """A check box with the site's colour and marker."""
    colour, symbol = style(site)
    mark = f'<span class="mark" style="color:{colour}">{GLYPHS.get(symbol, "✚")}</span>'
    return f'<label><input type="checkbox" checked data-site="{text(site)}">{mark}{text(site)}</label>'


def role_switch(role: str, words: str, dash: str = "", *, on: bool = False) -> str:
    """A check box for a band, or for a control with a sample of its line."""
    mark = '<span class="mark">░</span>'
    if dash:
        ends = f'x2="30" y1="4" y2="4" stroke-dasharray="{DASHES.get(dash, "2 3")}"'
        line = f'<line {ends} stroke="currentColor" stroke-width="2"/>'
        mark = f'<span class="mark"><svg width="30" height="8" aria-hidden="true">{line}</svg></span>'
    checked = " checked" if on else ""
    return f'<label><input type="checkbox"{checked} data-role="{text(role)}">{mark}{text(words)}</label>'


def quantity_switches(key: str, quantities: Iterable[str]) -> str:
    """Radio buttons, the first of them chosen."""
    return "".join(
        f'<label><input type="radio" name="{text(key)}"{"" if place else " checked"}'
        f' data-quantity="{text(name)}">{text(name)}</label>'
        for place, name in enumerate(quantities)
    )


def fieldset(legend: str, switches: str) -> str:
    """Switches under one name."""
    return f'<fieldset class="switches"><legend>{text(legend)}</legend>{switches}</fieldset>'


def download(table: pd.DataFrame, key: str, name: str) -> str:
    """A button that saves the whole table as CSV, from a copy inside the page."""
    csv = table.to_csv(index=False, float_format="%.9g")
    words = f"Download all {len(table):,} rows as CSV"
    return f'<button type="button" data-csv="{text(key)}-csv" data-name="{text(name)}.csv">{words}</button>' + embedded(
        f"{key}-csv", json.dumps(csv)
    )
