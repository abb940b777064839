"""Figures of training: the curve of one run, and arms side by side."""

from __future__ import annotations

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


def arms_figure(table: pd.DataFrame) -> go.Figure:
    """Held-out loss of every arm, its paired difference from the baseline as it trains, and that at the end."""
    require(table, ARMS, "compare_arms")
    titles = [
        "loss on held-out documents (nats per token), mean over seeds",
        "difference from the baseline at equal tokens, 95 % interval",
        "at the end: filled at equal tokens, hollow at equal time",
    ]
    drawn = panels(titles, 1, height=300)
    differences = table[table["kind"] == "difference"]
    names = list(dict.fromkeys(differences["arm"]))
    for name in names:
        colour, dash = LOOKS.get(name.split(":")[0], (INK, "dashdot"))
        rows = differences[differences["arm"] == name].sort_values("tokens")
        for panel, (column, low, high) in (
            (1, ("held_out_loss", None, None)),
            (2, ("change", "change_low", "change_high")),
        ):
            if panel == 2 and name == "baseline":
                continue
            text = [
                f"{name}, {tokens:,} tokens: " + (number(y) if low is None else interval(y, a, b, signed=True))
                for tokens, y, a, b in zip(
                    rows["tokens"], rows[column], rows[low or column], rows[high or column], strict=True
                )
            ]
            line = go.Scatter(x=rows["tokens"], y=rows[column], name=name, legendgroup=name, mode="lines")
            line.update(line={"color": colour, "dash": dash, "width": 2}, showlegend=panel == 1)
            drawn.add_trace(line.update(text=text, hovertemplate="%{text}<extra></extra>"), row=panel, col=1)
            if low is not None and high is not None:
                band = go.Scatter(x=[*rows["tokens"], *rows["tokens"][::-1]], y=[*rows[high], *rows[low][::-1]])
                band.update(fill="toself", fillcolor=colour, opacity=0.12, line={"width": 0}, mode="lines")
                band.update(hoverinfo="skip", showlegend=False, legendgroup=name)
                drawn.add_trace(band, row=panel, col=1)
    ends = table[(table["kind"] == "final") & (table["arm"] != "baseline") & table["change"].notna()]
    for at, symbol, shift in (("equal tokens", "circle", -0.12), ("equal time", "circle-open", 0.12)):
        rows = ends[ends["at"] == at]
        places = [names.index(name) + shift for name in rows["arm"]]
        colours = [LOOKS.get(name.split(":")[0], (INK, ""))[0] for name in rows["arm"]]
        text = [
            f"{row.arm}, {at}: {interval(row.change, row.change_low, row.change_high, signed=True)}"
            for row in rows.itertuples()
        ]
        dots = go.Scatter(x=rows["change"], y=places, mode="markers", name=at, text=text, showlegend=False)
        dots.update(marker={"color": colours, "symbol": symbol, "size": 9, "line": {"width": 1.5}})
        up, down = rows["change_high"] - rows["change"], rows["change"] - rows["change_low"]
        dots.update(
            error_x={"type": "data", "symmetric": False, "array": up, "arrayminus": down, "width": 0, "color": INK}
        )
        drawn.add_trace(dots.update(hovertemplate="%{text}<extra></extra>"), row=3, col=1)
    ticks = {"tickvals": list(range(1, len(names))), "ticktext": names[1:]}
    drawn.update_yaxes(**ticks, range=[len(names) - 0.5, 0.5], row=3, col=1)
    drawn.update_xaxes(title_text="tokens", row=2, col=1)
    return drawn.update_xaxes(title_text="change of loss (nats per token); below zero the arm is better", row=3, col=1)
