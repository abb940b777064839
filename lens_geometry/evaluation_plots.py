"""The figure of downstream tasks: what each edit changes of each score, with its interval."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lens_geometry.axes import INK, RULE, bars, interval, number, panels, require, style

SCORES = (
    "task metric filter edit value base_value change change_low change_high higher_is_better "
    "n_documents n_changed n_nonfinite status"
)


def score_names(table: pd.DataFrame) -> pd.Series:
    """Each row's score in words: task and metric, with the filter where a metric has several."""
    several = table.groupby(["task", "metric"])["filter"].transform("nunique") > 1
    named = table["task"].astype(str) + ": " + table["metric"].astype(str)
    return named.where(~several, named + " (" + table["filter"].astype(str) + ")")


def evaluation_figure(table: pd.DataFrame) -> go.Figure:
    """A panel per score, a line per edit: its change against the unedited model, with the 95 % interval.

    A cross marks answers that are not finite (the change is over the rest; without one it stands on the right), an
    open marker an edit that changed no answer. Colours are those of the site with which an edit's name begins.
    `ResultError` where columns or rows are missing.
    """
    require(table, SCORES, "evaluate")
    table = table.assign(score=score_names(table))
    edits = [name for name in table["edit"].unique() if name != "none"] or ["none"]
    scores = list(table["score"].unique())
    titles = [_title(table[table["score"] == score]) for score in scores]
    columns = min(2, len(scores))
    drawn = panels(titles, columns, height=max(200, 26 * len(edits) + 110))
    for place, score in enumerate(scores):
        rows = table[(table["score"] == score) & table["edit"].isin(edits)]
        where = {"row": place // columns + 1, "col": place % columns + 1}
        drawn.add_trace(_dots(rows, edits), **where)
        drawn.add_vline(x=0, line={"color": RULE, "width": 1.5, "dash": "dot"}, **where)
        drawn.update_yaxes(showticklabels=where["col"] == 1, **where)  # the same edits in every panel of a row
        drawn.update_xaxes(title_text=f"change of {html.escape(str(rows['metric'].iloc[0]))}", **where)
    labels = [html.escape(edit) for edit in edits]
    return drawn.update_yaxes(
        tickvals=list(range(len(edits))),
        ticktext=labels,
        range=[len(edits) - 0.5, -0.5],
        showgrid=False,
        zeroline=False,
    )


def direction(rows: pd.DataFrame) -> str:
    """Which way of a score is better, in words; empty where the task does not say."""
    better = rows["higher_is_better"].iloc[0]
    return "" if pd.isna(better) else "higher is better" if better else "lower is better"


def _title(rows: pd.DataFrame) -> str:
    better = direction(rows)
    unedited = f"unedited {number(float(rows['base_value'].iloc[0]))}"
    return html.escape(f"{rows['score'].iloc[0]} ({', '.join(filter(None, (unedited, better)))})")


def _dots(rows: pd.DataFrame, edits: list[str]) -> go.Scatter:
    names = {"change": "y", "change_low": "low", "change_high": "high"}
    points = rows.rename(columns=names)
    lost = ~np.isfinite(points["y"].astype(float))
    ends = points[["y", "high"]].to_numpy(dtype=float)
    right = ends[np.isfinite(ends)].max(initial=0.0)
    colours = [style(str(edit).split(" ", 1)[0])[0] for edit in rows["edit"]]
    symbols = [_symbol(str(row["edit"]), row["status"]) for row in rows.to_dict("records")]
    dots = go.Scatter(x=points["y"].mask(lost, right), y=[edits.index(edit) for edit in rows["edit"]], mode="markers")
    dots.update(text=[_hover(row) for row in rows.to_dict("records")], hovertemplate="%{text}<extra></extra>")
    dots.update(customdata=rows["change"], showlegend=False, meta={"site": "", "role": "edit"})
    dots.update(marker={"color": colours, "symbol": symbols, "size": 9, "line": {"color": colours, "width": 1.6}})
    return dots.update(error_x={**bars(points, 1.4), "color": INK})


def _symbol(edit: str, status: str) -> str:
    shape = style(edit.split(" ", 1)[0])[1]
    shape = "circle" if shape == "cross" else shape  # the grey cross of an unknown site would read as "not finite"
    return {"nonfinite": "x-thin", "no_effect": f"{shape}-open"}.get(status, shape)


def _hover(row: dict[str, Any]) -> str:
    lines = [
        f"<b>{html.escape(str(row['edit']))}</b>",
        f"{html.escape(str(row['score']))} {number(row['value'])}, unedited {number(row['base_value'])}",
        f"change {interval(row['change'], row['change_low'], row['change_high'], signed=True)}",
        f"{row['n_documents']:,} documents, {row['n_changed']:,} of them scored otherwise",
        f"{row['n_nonfinite']:,} documents without a finite answer, left out" if row["n_nonfinite"] else "",
    ]
    return "<br>".join(line for line in lines if line)
