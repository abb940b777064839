"""Figures of training: the curve of one run, and arms side by side."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, interval, number, panels, require

RUN = "step tokens seconds loss lr gradient_norm held_out_loss"
EDITED, PALE = "#0072B2", "rgba(118,118,118,0.55)"


def run_figure(table: pd.DataFrame) -> go.Figure:
    """Loss against tokens: of each step's batch, pale, and on held-out documents; below, rate and gradient."""
    require(table, RUN, "train")
    drawn = panels(["loss (nats per token)", "learning rate", "norm of the gradient"], 1, height=220)
    steps, held_out = table[table["loss"].notna()], table[table["held_out_loss"].notna()]
    for row, (rows, column, name, colour) in (
        (1, (steps, "loss", "each batch", PALE)),
        (1, (held_out, "held_out_loss", "held-out documents", EDITED)),
        (2, (steps, "lr", "learning rate", INK)),
        (3, (steps, "gradient_norm", "norm of the gradient", INK)),
    ):
        text = [
            f"step {step:,}: {name} {number(value)}" for step, value in zip(rows["step"], rows[column], strict=True)
        ]
        line = go.Scatter(
            x=rows["tokens"], y=rows[column], name=name, text=text, hovertemplate="%{text}<extra></extra>"
        )
        look = {"color": colour, "width": 2 if column == "held_out_loss" else 1}
        line.update(mode="lines+markers" if column == "held_out_loss" else "lines", line=look, showlegend=row == 1)
        drawn.add_trace(line, row=row, col=1)
    return drawn.update_xaxes(title_text="tokens", row=3, col=1)


ARMS = "kind arm seed step tokens held_out_loss change change_low change_high at seconds n_seeds n_diverged"
LOOKS = {  # the colours of Okabe and Ito, as the sites have them; a control is dotted
    "baseline": (INK, "solid"),
    "attn": ("#0072B2", "solid"),
    "value": ("#009E73", "solid"),
    "value_excl_self": ("#CC79A7", "solid"),
    "mlp": ("#D55E00", "solid"),
    "gate": ("#009E73", "dash"),
    "gate_attn": ("#0072B2", "dash"),
    "diagonal": ("#E69F00", "dot"),
    "norm_matched": ("#56B4E9", "dot"),
    "norm_matched_attn": ("#B8A800", "dot"),
}


PARTS = {  # panels: title, and what is along x
    "loss": ("loss on held-out documents (nats per token), mean over seeds", "tokens"),
    "difference": ("difference from the baseline at equal tokens, 95 % interval", "tokens"),
    "end": (
        "at the end: filled at equal tokens, hollow at equal time",
        "change of loss (nats per token); below zero the arm is better",
    ),
}


def arms_figure(table: pd.DataFrame, parts: Sequence[str] = tuple(PARTS)) -> go.Figure:
    """Held-out loss of every arm, its paired difference from the baseline as it trains, and that at the end."""
    require(table, ARMS, "compare_arms")
    drawn = panels([PARTS[part][0] for part in parts], 1, height=300)
    differences = table[table["kind"] == "difference"]
    names = [str(name) for name in dict.fromkeys(differences["arm"])]
    for row, part in enumerate(parts, 1):
        if part == "end":
            _ends(drawn, table, [name for name in names if name != "baseline"], row)
        else:
            for name in names:
                rows = differences[differences["arm"] == name].sort_values("tokens")
                if part == "loss" or name != "baseline":
                    _curve(drawn, rows, name, part, row, legend=row == 1)
        drawn.update_xaxes(title_text=PARTS[part][1], row=row, col=1)
    return drawn


def look_of(name: str) -> tuple[str, str]:
    """Colour and dash of an arm, whatever its scale."""
    return LOOKS.get(name.split(":")[0], (INK, "dashdot"))


def _curve(drawn: go.Figure, rows: pd.DataFrame, name: str, part: str, place: int, *, legend: bool) -> None:
    """One arm's line, with a band where it is a difference."""
    colour, dash = look_of(name)
    if part == "loss":
        values, words = rows["held_out_loss"], [number(value) for value in rows["held_out_loss"]]
    else:
        values, low, high = (rows[f"change{end}"] for end in ("", "_low", "_high"))
        words = [interval(*ends, signed=True) for ends in zip(values, low, high, strict=True)]
        band = go.Scatter(x=[*rows["tokens"], *rows["tokens"][::-1]], y=[*high, *low[::-1]], mode="lines")
        band.update(fill="toself", fillcolor=colour, opacity=0.12, line={"width": 0})
        drawn.add_trace(band.update(hoverinfo="skip", showlegend=False, legendgroup=name), row=place, col=1)
    text = [f"{name}, {tokens:,} tokens: {word}" for tokens, word in zip(rows["tokens"], words, strict=True)]
    line = go.Scatter(x=rows["tokens"], y=values, name=name, legendgroup=name, mode="lines", text=text)
    line.update(line={"color": colour, "dash": dash, "width": 2}, showlegend=legend)
    drawn.add_trace(line.update(hovertemplate="%{text}<extra></extra>"), row=place, col=1)


def _ends(drawn: go.Figure, table: pd.DataFrame, names: list[str], place: int) -> None:
    """Every arm's change at the end, at equal tokens and at equal time."""
    ends = table[(table["kind"] == "final") & table["arm"].isin(names) & table["change"].notna()]
    for at, symbol, shift in (("equal tokens", "circle", -0.12), ("equal time", "circle-open", 0.12)):
        rows = ends[ends["at"] == at]
        places = [names.index(name) + shift for name in rows["arm"]]
        text = [
            f"{row['arm']}, {at}: {interval(row['change'], row['change_low'], row['change_high'], signed=True)}"
            for _, row in rows.iterrows()
        ]
        dots = go.Scatter(x=rows["change"], y=places, mode="markers", name=at, text=text, showlegend=False)
        colours = [look_of(name)[0] for name in rows["arm"]]
        dots.update(marker={"color": colours, "symbol": symbol, "size": 9, "line": {"width": 1.5}})
        up, down = rows["change_high"] - rows["change"], rows["change"] - rows["change_low"]
        bars = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "width": 0, "color": INK}
        dots.update(error_x=bars, hovertemplate="%{text}<extra></extra>")
        drawn.add_trace(dots, row=place, col=1)
    ticks = {"tickvals": list(range(len(names))), "ticktext": names}
    drawn.update_yaxes(**ticks, range=[len(names) - 0.5, -0.5], row=place, col=1)
