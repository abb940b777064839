"""Figures of direction against size: damage by displacement, and the contrasts of loss and of minimal pairs.

A kind of perturbation has one colour and one marker, a quantity too. Damage points up.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, SymlogAxis, add_line, bars, interval, log_ticks, number, panels, require, style
from lens_geometry.dissociation_verdict import groups, label

TABLE = (
    "quantity kind regime displacement seed value low high level base n_seeds n_items n_left_out "
    "displacement_mean displacement_max_error n_clipped n_flipped n_places status"
)
KINDS = {"angular": "solid", "magnitude": "dash"}
QUANTITIES = {  # the axis, what a level is called, its unit
    "loss": ("change of loss (nats per token)", "loss", " nats per token"),
    "margin": ("drop of the margin (nats)", "margin", " nats"),
    "accuracy": ("drop of accuracy (share of pairs)", "accuracy", ""),
}
COMPARED = {  # of the contrasts: colour and marker of a quantity
    "loss": ("#9467BD", "diamond"),
    "margin": ("#009E73", "triangle-up"),
    "accuracy": ("#B8860B", "pentagon"),
}
ESTIMATES = {  # column of a verdict: the panel's title, its axis
    "contrast": ("contrast of angular and magnitude damage", "magnitude hurts more ← 0 → angular hurts more"),
    "crossover": ("cross-over index", "direction weighs more on pairs ← 0 → on the loss"),
}
STATUSES = {
    "nonfinite": "some losses or margins are not finite, and left out",
    "impossible": "impossible for some seed or token: not run",
    "no_effect": "changed nothing",
    "not_reached": "no displacement raises the loss as far: not run",
}
LOST = ("nonfinite", "impossible", "not_reached")
UNITS = {"relative": "displacement |h′ − h| / |h|", "median": "displacement |h′ − h| / median |h|"}
REGIMES = ["all", "low", "high", ""]
APART = 1.035  # seeds stand a little beside their displacement, on a logarithmic axis


def dissociation_figure(table: pd.DataFrame, quantities: Sequence[str] = ("loss", "margin")) -> go.Figure:
    """A row of panels for each model, variant and layers, loss beside margin (or accuracy); below, the contrasts.

    Lines are means over seeds with 95 % intervals, small marks single seeds. The axis of damage is symmetric-log, the
    same for all panels of a quantity. A cross marks what was impossible or is not finite.
    The last row compares: contrasts from -1 (only magnitude hurts) to 1 (only angular hurts), and the cross-over index.
    `ResultError` where columns or rows are missing.
    """
    require(table, TABLE, "dissociation")
    shown = [name for name in quantities if name in set(table["quantity"])]
    parts = groups(table)
    names = {key: label(table, key) for key in parts}
    titles = [": ".join(filter(None, (names[key], QUANTITIES[name][0]))) for key in parts for name in shown]
    compared = list(ESTIMATES)[: len(shown)]
    titles += [ESTIMATES[name][0] for name in compared]
    drawn = panels(list(map(html.escape, titles)), len(shown), height=max(300, 22 * len(parts) + 130))
    for row, rows in enumerate(parts.values(), 1):
        for col, name in enumerate(shown, 1):
            add_doses(drawn, table, rows, name, {"row": row, "col": col}, legend=row == col == 1)
    for col, name in enumerate(compared, 1):
        place = {"row": len(parts) + 1, "col": col}
        add_estimates(drawn, table, name, place, legend=col == 1)
        drawn.update_yaxes(showticklabels=col == 1, **place)  # both have the same rows
    return drawn


def add_doses(
    drawn: go.Figure,
    table: pd.DataFrame,
    rows: pd.DataFrame,
    quantity: str,
    place: dict[str, int],
    *,
    legend: bool = False,
) -> None:
    """Damage of one quantity by displacement: `rows` of one variant on the axis of the whole table."""
    axis = SymlogAxis(_damages(table, quantity)[["value", "low", "high"]])
    damages = _damages(rows, quantity)
    damages = damages.assign(y=damages["value"], x=damages["displacement"], hover=_hover(damages, quantity))
    damages["lost"] = damages["status"].isin(LOST)
    damages["open"] = damages["status"] == "no_effect"
    points = axis.place(damages)
    for kind, dash in KINDS.items():
        line = points[(points["kind"] == kind) & points["seed"].isna()].sort_values("x")
        seeds = points[(points["kind"] == kind) & points["seed"].notna()]
        if seeds["seed"].nunique() > 1:
            drawn.add_trace(_seeds(seeds, kind), **place)
        look = {"dash": dash, "width": 2.2, "size": 7, "showlegend": legend}
        add_line(drawn, line, site=kind, role="edit", name=kind, top=axis.top, place=place, look=look)
    displacements = sorted(set(damages["displacement"]))
    ticks, labels = displacements, [f"{x:g}" for x in displacements]
    if len(displacements) > 7:
        ticks, labels = log_ticks(displacements[0], displacements[-1])
    drawn.update_xaxes(title_text=dose(rows), type="log", tickvals=ticks, ticktext=labels, **place)
    drawn.update_yaxes(tickvals=axis.ticks, ticktext=axis.labels, range=axis.range, **place)


def dose(rows: pd.DataFrame) -> str:
    """What the column `displacement` of one dose-response holds, as an axis says it."""
    if "matched" in rows and (rows["matched"] == "loss").all():
        return "change of loss that both were set to"
    unit = str(rows["unit"].iloc[0]) if "unit" in rows else ""
    return UNITS.get(unit, "displacement |h′ − h|")


def _damages(rows: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """The rows of single displacements, of both kinds."""
    alone = (rows["quantity"] == quantity) & rows["kind"].isin(KINDS) & (rows["regime"] == "")
    return rows[alone]


def _seeds(points: pd.DataFrame, kind: str) -> go.Scatter:
    colour, symbol = style(kind)
    beside = APART if kind == "magnitude" else 1 / APART
    dots = go.Scatter(x=points["x"] * beside, y=points["y"].mask(points["lost"]), mode="markers", name=kind)
    dots.update(text=points["hover"], hovertemplate="%{text}<extra></extra>", customdata=points["real"])
    dots.update(marker={"color": colour, "symbol": f"{symbol}-open", "size": 4, "opacity": 0.55})
    return dots.update(showlegend=False, legendgroup=kind, meta={"site": kind, "role": "seeds"})


def _hover(rows: pd.DataFrame, quantity: str) -> list[str]:
    title, name, unit = QUANTITIES[quantity]
    return [
        "<br>".join(
            line
            for line in (
                f"<b>{row['kind']}</b>, {dose(rows).split(' |')[0]} {row['displacement']:g}, "
                + (f"{row['n_seeds']} seeds" if pd.isna(row["seed"]) else f"seed {row['seed']}"),
                f"{title.split(' (')[0]} {interval(row['value'], row['low'], row['high'], signed=True)}{unit}",
                f"{name} {number(row['level'])}, unperturbed {number(row['base'])}",
                _ran(row),
                STATUSES.get(row["status"], ""),
            )
            if line
        )
        for row in rows.to_dict("records")
    ]


def _ran(row: dict[str, Any]) -> str:
    """What the perturbation really did, in words; empty where it did not run."""
    if not math.isfinite(row["displacement_mean"]):
        return ""
    counts = [
        f"{row[name]:,} {word}" for name, word in (("n_clipped", "clipped"), ("n_flipped", "flipped")) if row[name]
    ]
    places = f" of {row['n_places']:,} places" if counts else ""
    error = f"largest error {number(100 * row['displacement_max_error'], digits=2)} %"
    return f"realised {number(row['displacement_mean'])}, {error}{'; ' if counts else ''}{', '.join(counts)}{places}"


def add_estimates(
    drawn: go.Figure, table: pd.DataFrame, estimate: str, place: dict[str, int], *, legend: bool = False
) -> None:
    """A line for each model, variant and layers: "contrast" of every quantity, or "crossover", with its interval."""
    rows = table[table["kind"] == estimate]
    labels = {key: label(table, key) or "all layers and displacements" for key in groups(table)}
    quantities = [name for name in COMPARED if name in set(rows["quantity"])]
    for step, name in enumerate(quantities):
        found = {key: part[part["quantity"] == name] for key, part in groups(rows).items()}
        chosen = pd.concat([part[part["regime"] == "all"] for part in found.values()])
        places = [y for y, key in enumerate(labels) if key in found]
        colour, symbol = COMPARED[name]
        dots = go.Scatter(x=chosen["value"], mode="markers", name=name, legendgroup=name, showlegend=legend)
        dots.y = [y + 0.2 * (step - (len(quantities) - 1) / 2) for y in places]
        dots.text = [_estimate_hover(part, labels[key]) for key, part in found.items()]
        dots.update(hovertemplate="%{text}<extra></extra>", meta={"site": "", "role": name})
        dots.update(marker={"color": colour, "symbol": symbol, "size": 9})
        drawn.add_trace(dots.update(error_x={**bars(chosen.assign(y=chosen["value"]), 1.6), "color": colour}), **place)
    ticks = {
        "tickvals": list(range(len(labels))),
        "ticktext": [html.escape(name).replace(", ", ",<br>") for name in labels.values()],
    }
    drawn.update_yaxes(**ticks, range=[len(labels) - 0.5, -0.5], showgrid=False, zeroline=False, **place)
    drawn.update_xaxes(title_text=ESTIMATES[estimate][1], range=[-1.08, 1.08], tickvals=[-1, -0.5, 0, 0.5, 1], **place)
    drawn.add_vline(x=0, line={"color": INK, "width": 1.5, "dash": "dot"}, **place)


def _estimate_hover(rows: pd.DataFrame, name: str) -> str:
    """One estimate over all displacements, in each regime and at each displacement."""
    whole = rows[rows["regime"] == "all"].iloc[0]
    lines = [f"<b>{html.escape(name)}</b>, {whole['kind']} of the {whole['quantity']}"]
    for row in rows.sort_values("regime", key=lambda x: x.map(REGIMES.index), kind="stable").to_dict("records"):
        where = f"displacement {row['displacement']:g}" if row["regime"] == "" else f"{row['regime']} displacements"
        value = interval(row["value"], row["low"], row["high"], signed=True) if row["status"] == "ok" else row["status"]
        left_out = f", {row['n_left_out']} left out" if row["n_left_out"] and row["status"] == "ok" else ""
        lines.append(f"{where}: {html.escape(value)}{left_out}")
    return "<br>".join(lines)


def ratio_words(row: Any) -> str:
    """A ratio with its interval, whose ends may be open."""
    value, low, high = row["value"], row["low"], row["high"]
    if math.isnan(value):
        return "neither hurts"
    words = "∞" if value == math.inf else number(value)
    if math.isnan(low) or math.isnan(high):
        return words
    ends = ["−∞" if low == -math.inf else number(low), "∞" if high == math.inf else number(high)]
    return f"{words} [{', '.join(ends)}]"
