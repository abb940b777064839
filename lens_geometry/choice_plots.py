"""Figures of layer choice: widths by layer, what each choice costs, and the loss against how many layers are gone."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, RULE, SymlogAxis, bars, interval, layer_axis, number, panels, require

CHOICE = (
    "part kind choice measure layer bits value mean_bits size_bytes n_blanked loss_change loss_change_low "
    "loss_change_high against difference difference_low difference_high status"
)
PANELS = {  # the part and kind of their rows, and the title
    "sensitivity": ("bits", "local error of each layer alone"),
    "allocation": ("bits", "bits of each layer"),
    "comparison": ("bits", "change of loss of the whole, held out"),
    "score": ("drop", "what each layer's update does to the stream"),
    "curve": ("drop", "change of loss by number of blanked layers, held out"),
}
STYLES = {  # colour, marker, dash
    "perpendicular": ("#0072B2", "circle", "solid"),
    "error": ("#D55E00", "square", "dash"),
    "perpendicular_of_stream": ("#56B4E9", "circle-open", "solid"),
    "error_of_stream": ("#E69F00", "square-open", "dash"),
    "cosine": ("#009E73", "diamond", "dashdot"),
    "update": ("#D55E00", "square", "dash"),
    "loss": ("#CC79A7", "triangle-up", "longdash"),
    "greedy_loss": ("#B8A800", "star", "solid"),
    "uniform": (INK, "cross", "dot"),
    "random": (INK, "circle-open", "dot"),
}
WORDS = {
    "perpendicular": {"bits": "|e_perp| / |u|", "drop": "|u_perp| / |x|"},
    "error": {"bits": "|e| / |u|"},
    "perpendicular_of_stream": {"bits": "|e_perp| / |x|"},
    "error_of_stream": {"bits": "|e| / |x|"},
    "cosine": {"drop": "1 − cos(x, x + u)"},
    "update": {"drop": "|u| / |x|"},
    "loss": {"bits": "loss of the layer alone", "drop": "loss of the layer alone"},
    "greedy_loss": {"drop": "greedy by loss"},
    "uniform": {"bits": "uniform"},
}
MEASURES = {
    "perpendicular_error": "perpendicular",
    "error": "error",
    "perpendicular_error_over_reference": "perpendicular_of_stream",
    "error_over_reference": "error_of_stream",
}


def choice_words(choice: str, part: str) -> str:
    """A choice in words."""
    return WORDS.get(choice, {}).get(part, choice)


def choice_style(choice: str) -> tuple[str, str, str]:
    """Colour, marker and dash of a choice; all random ones alike."""
    return STYLES.get(choice.split()[0], (INK, "circle-open", "dot"))


def choice_figure(table: pd.DataFrame, shown: Sequence[str] = tuple(PANELS)) -> go.Figure:
    """Panels of what was chosen and what it costs; those without rows are left out.

    `ResultError` where columns or rows are missing.
    """
    require(table, CHOICE, "layer_choice")
    shown = [name for name in shown if ((table["part"] == PANELS[name][0]) & (table["kind"] == name)).any()]
    require(pd.DataFrame({"panel": shown}), "", "layer_choice")
    drawn = panels([PANELS[name][1] for name in shown], 1, height=300)
    seen: set[str] = set()
    for row, name in enumerate(shown, 1):
        part = PANELS[name][0]
        rows = table[(table["part"] == part) & (table["kind"] == name)]
        place = {"row": row, "col": 1}
        make = {"sensitivity": _sensitivity, "allocation": _allocation, "comparison": _comparison, "score": _scores}
        traces = make.get(name, _curves)(drawn, rows, place)
        for trace in traces:
            label = str(trace.name)
            drawn.add_trace(trace.update(showlegend=bool(label) and label not in seen), **place)
            seen.add(label)
    return drawn


def _sensitivity(drawn: go.Figure, rows: pd.DataFrame, place: dict[str, int]) -> list[go.Scatter]:
    """One line a width, of |e_perp|/|u| and |e|/|u|, on a logarithmic axis; the widest dashes are the widest widths."""
    traces = []
    for (measure, bits), line in rows[rows["measure"].isin(("perpendicular_error", "error"))].groupby(
        ["measure", "bits"], sort=False
    ):
        line = line[line["value"] > 0].sort_values("layer")
        choice = MEASURES[str(measure)]
        hover = [
            f"<b>{html.escape(choice_words(choice, 'bits'))}</b>, layer {row.layer} at {bits} bits"
            f"<br>{interval(row.value, row.value_low, row.value_high)}"
            for row in line.itertuples()
        ]
        traces.append(_line(choice, "bits", line["layer"], line["value"], hover))
    layer_axis(drawn, rows["layer"], place)
    drawn.update_yaxes(type="log", dtick=1, title_text="error", **place)
    return traces


def _allocation(drawn: go.Figure, rows: pd.DataFrame, place: dict[str, int]) -> list[go.Scatter]:
    traces = []
    named = [name for name in rows["choice"].unique() if not str(name).startswith("random")]
    for step, name in enumerate(named):
        line = rows[rows["choice"] == name].sort_values("layer")
        hover = [f"<b>{html.escape(choice_words(name, 'bits'))}</b>, layer {row.layer}: {row.bits} bits"
                 for row in line.itertuples()]  # fmt: skip
        shift = 0.06 * (step - (len(named) - 1) / 2)  # lines on one width would hide each other
        trace = _line(name, "bits", line["layer"], line["bits"].astype(float) + shift, hover)
        traces.append(trace.update(line={"shape": "hvh"}))
    layer_axis(drawn, rows["layer"], place)
    widths = sorted({int(width) for width in rows["bits"]})
    drawn.update_yaxes(tickvals=widths, title_text="bits", **place)
    return traces


def _comparison(drawn: go.Figure, rows: pd.DataFrame, place: dict[str, int]) -> list[go.Scatter]:
    names, traces = list(rows["choice"]), []
    words = rows["status"].map(lambda status: " (not finite)" if status == "nonfinite" else "")
    labels = [html.escape(choice_words(name, "bits") + more) for name, more in zip(names, words, strict=True)]
    for row in rows.to_dict("records"):
        colour, symbol, _ = choice_style(row["choice"])
        hover = (
            f"<b>{html.escape(choice_words(row['choice'], 'bits'))}</b><br>change of loss {change_words(row)} nats per "
            f"token<br>against {html.escape(row['against'])} {difference_words(row)}"
            f"<br>{number(row['mean_bits'])} bits per weight, {row['size_bytes']:,.0f} bytes with scales"
        )
        point = pd.DataFrame(
            {"y": [row["loss_change"]], "low": [row["loss_change_low"]], "high": [row["loss_change_high"]]}
        )
        dot = go.Scatter(x=point["y"], y=[names.index(row["choice"])], text=[hover], mode="markers", name="")
        dot.update(hovertemplate="%{text}<extra></extra>", error_x={**bars(point, 1.6), "color": colour})
        traces.append(dot.update(marker={"color": colour, "symbol": symbol, "size": 9}))
    ticks = {"tickvals": list(range(len(names))), "ticktext": labels}
    drawn.update_yaxes(**ticks, range=[len(names) - 0.5, -0.5], showgrid=False, zeroline=False, **place)
    drawn.update_xaxes(title_text="change of loss (nats per token)", **place)
    drawn.add_vline(x=0, line={"color": RULE, "width": 1.5}, **place)
    return traces


def _scores(drawn: go.Figure, rows: pd.DataFrame, place: dict[str, int]) -> list[go.Scatter]:
    traces = []
    for name, line in rows[rows["choice"] != "loss"].groupby("choice", sort=False):
        line = line[line["value"] > 0].sort_values("layer")
        hover = [
            f"<b>{html.escape(choice_words(str(name), 'drop'))}</b>, layer {row.layer}"
            f"<br>{interval(row.value, row.value_low, row.value_high)}"
            for row in line.itertuples()
        ]
        traces.append(_line(str(name), "drop", line["layer"], line["value"], hover))
    layer_axis(drawn, rows["layer"], place)
    drawn.update_yaxes(type="log", dtick=1, title_text="against the stream", **place)
    return traces


def _curves(drawn: go.Figure, rows: pd.DataFrame, place: dict[str, int]) -> list[go.Scatter]:
    axis = SymlogAxis(rows[["loss_change", "loss_change_low", "loss_change_high"]])
    traces = []
    for name, line in rows.groupby("choice", sort=False):
        line = line.sort_values("n_blanked")
        points = axis.place(
            line.rename(columns={"loss_change": "y", "loss_change_low": "low", "loss_change_high": "high"})
        )
        hover = [
            f"<b>{html.escape(choice_words(str(name), 'drop'))}</b>, {row['n_blanked']} blanked, last layer "
            f"{row['layer']}<br>change of loss {change_words(row)} nats per token<br>against "
            f"{html.escape(choice_words(row['against'], 'drop'))} {difference_words(row)}"
            for row in line.to_dict("records")
        ]
        finite = np.isfinite(points["y"])
        trace = _line(str(name), "drop", line["n_blanked"], np.where(finite, points["y"], axis.top), hover)
        trace.update(marker_symbol=[trace.marker.symbol if one else "x-thin-open" for one in finite])
        traces.append(trace.update(error_y={**bars(points, 1.0), "color": choice_style(str(name))[0]}))
    drawn.update_xaxes(title_text="blanked layers", dtick=max(1, rows["n_blanked"].max() // 10), **place)
    ticks = {"tickvals": axis.ticks, "ticktext": axis.labels, "range": axis.range}
    drawn.update_yaxes(**ticks, title_text="change of loss (nats)", **place)
    return traces


def _line(choice: str, part: str, x: Any, y: Any, hover: list[str]) -> go.Scatter:
    colour, symbol, dash = choice_style(choice)
    random = choice.startswith("random")
    label = "random" if random else choice_words(choice, part)
    trace = go.Scatter(x=x.astype(int), y=y, text=hover, hovertemplate="%{text}<extra></extra>", mode="lines+markers")
    trace.update(line={"color": colour, "dash": dash, "width": 1.2 if random else 2}, name=html.escape(label))
    trace.update(marker={"color": colour, "symbol": symbol, "size": 5 if random else 7}, legendgroup=label)
    return trace.update(meta={"site": "", "role": label}, opacity=0.6 if random else 1)


def change_words(row: Any) -> str:
    """A change of loss with its interval."""
    return interval(*(float(row[f"loss_change{end}"]) for end in ("", "_low", "_high")), signed=True)


def difference_words(row: Any) -> str:
    """A paired difference of losses with its interval."""
    return interval(*(float(row[f"difference{end}"]) for end in ("", "_low", "_high")), signed=True)
