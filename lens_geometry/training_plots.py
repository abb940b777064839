"""Figures of training: the curve of one run."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, number, panels, require

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
