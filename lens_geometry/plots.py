"""Figures from tables: the profile by depth and its heads; `sweep_plots` and `generation_plots` have the others.

Every function takes a plain DataFrame, as the experiment of that name returns it, and gives a plotly figure
that reads on a light and on a dark page. A site has one colour and one marker everywhere. A cross marks what
is not finite, an open marker a mean that left something out. A trace's `meta` says what it shows (`site`, and
`role`: edit, band, key or the control's name), so that a page can switch traces by meaning.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from lens_geometry.attention_plots import attention_figure
from lens_geometry.axes import add_line, interval, log_ticks, number, panels, part_of, require, style
from lens_geometry.basin_plots import basin_figure, schedule_figure
from lens_geometry.choice_plots import choice_figure
from lens_geometry.compression_plots import compression_figure
from lens_geometry.dissociation_plots import dissociation_figure
from lens_geometry.effect_plots import heads_figure, strength_figure
from lens_geometry.errors import ResultError
from lens_geometry.evaluation_plots import evaluation_figure
from lens_geometry.generation_plots import continuations_figure, generation_figure
from lens_geometry.mediator_plots import mediators_figure
from lens_geometry.pair_plots import pairs_figure
from lens_geometry.repair_plots import repair_figure
from lens_geometry.study_plots import prediction_figure, study_figure
from lens_geometry.sweep_plots import UNITS, controls_figure, sweep_figure
from lens_geometry.training_plots import arms_figure, run_figure

__all__ = [
    "METRICS",
    "attention_figure",
    "basin_figure",
    "compression_figure",
    "continuations_figure",
    "controls_figure",
    "dissociation_figure",
    "figure",
    "generation_figure",
    "mediators_figure",
    "profile_figure",
    "profile_heads_figure",
    "schedule_figure",
    "sweep_figure",
]

METRICS = {  # the panel's title, and whether its axis is logarithmic
    "parallel_ratio": ("parallel_ratio: parallel size / perpendicular size", True),
    "alpha": ("alpha: signed length along the reference", False),
    "parallel_fraction": ("parallel_fraction (perpendicular dashed)", False),
    "update_over_reference": ("update_over_reference: update size / reference size", True),
}
PROFILE = "site layer head metric mean q10 q90 ci_low ci_high n_tokens n_infinite n_undefined"


def figure(experiment: str, table: pd.DataFrame, meta: dict[str, Any]) -> go.Figure:
    """The figure of an experiment's result; `ResultError` for an experiment that has none."""
    if experiment not in FIGURES:
        raise ResultError(f"no figure is known for {experiment!r}", cure="use an experiment of this package")
    drawn = FIGURES[experiment](table)
    one, other = _name(meta.get("model")), _name(meta.get("compressed"))
    name = f"{other} against {one}" if other else one
    return drawn.update_layout(title={"text": html.escape(str(name)), "font_size": 14})


def _name(about: Any) -> str:
    """A model's name, from how a result's meta describes it."""
    return str(about.get("name", "") if isinstance(about, dict) else about or "")


def table_figure(table: pd.DataFrame) -> go.Figure:
    """The table itself, for results that are read rather than seen."""
    shown = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in table[column]] for column in table]
    return go.Figure(
        go.Table(
            header={"values": [f"<b>{html.escape(column)}</b>" for column in table], "align": "left"},
            cells={"values": [[html.escape(x) for x in column] for column in shown], "align": "left"},
        )
    )


def profile_figure(table: pd.DataFrame, metrics: Sequence[str] = tuple(METRICS)) -> go.Figure:
    """One panel per metric, one line per site: the mean over tokens at each layer, all heads together.

    The band spans the tokens' 10th to 90th percentile, the bar the 95 % interval of the mean. What lies
    beyond a logarithmic axis (zero, infinite) ends at the panel's edge. `ResultError` where columns or rows
    are missing.
    """
    require(table, PROFILE, "profile")
    pooled = table[table["head"].isna()].sort_values("layer", kind="stable")
    columns = min(2, len(metrics))
    drawn = panels([METRICS.get(metric, (metric,))[0] for metric in metrics], columns)
    for index, metric in enumerate(metrics):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        log = METRICS.get(metric, ("", False))[1]
        shown = [metric, "perpendicular_fraction"] if metric == "parallel_fraction" else [metric]
        panel = pooled[pooled["metric"].isin(shown)]
        require(panel, "", f"profile of {metric}, all heads together,")
        values = panel[["mean", "q10", "q90"]].to_numpy(dtype=float)
        seen = values[np.isfinite(values) & ((values > 0) | (not log))]
        low, high = (seen.min(), seen.max()) if seen.size else (0.1, 1.0)
        if log:  # a few tokens near zero must not take all the room
            low = max(low, panel["mean"].astype(float).where(panel["mean"] > 0).min() / 10)
        for (site, name), rows in panel.groupby(["site", "metric"], sort=False):
            dashed = name == "perpendicular_fraction"
            points = _profile_points(rows, low, high, log)
            if not dashed:
                drawn.add_trace(_band(points, site), **place)
            look = {"dash": "dash", "width": 1.4, "size": 4} if dashed else {"dash": "solid", "width": 2.2, "size": 6}
            look |= {"showlegend": index == 0 and not dashed}
            add_line(drawn, points, site=site, role="edit", name=site, top=high, place=place, look=look)
        if log:
            ticks, labels = log_ticks(low, high)
            drawn.update_yaxes(type="log", tickvals=ticks, ticktext=labels, **place)
        drawn.update_xaxes(title_text="layer", **place)
    return drawn


def _profile_points(rows: pd.DataFrame, low: float, high: float, log: bool) -> pd.DataFrame:
    points = rows.assign(x=rows["layer"], y=rows["mean"], real=rows["mean"], hover=_profile_hover(rows))
    points["open"] = rows["n_infinite"] + rows["n_undefined"] > 0
    if log:
        points["y"] = points["y"].clip(low)
    points = points.assign(low=rows["ci_low"].clip(low), high=rows["ci_high"])
    return points.assign(q10=rows["q10"].clip(low, high), q90=rows["q90"].clip(low, high))


def _profile_hover(rows: pd.DataFrame) -> list[str]:
    return [
        f"<b>{html.escape(row.site)}</b>, layer {row.layer}"
        + ("" if pd.isna(row.head) else f", {part_of(row.site)} {row.head}")
        + f"<br>{row.metric} {interval(row.mean, row.ci_low, row.ci_high)}"
        f"<br>middle 80 %: {number(row.q10)} to {number(row.q90)}"
        f"<br>mean of {row.n_tokens:,}, {row.n_infinite + row.n_undefined:,} left out (infinite, undefined)"
        for row in rows.itertuples()
    ]


def _band(points: pd.DataFrame, site: str) -> go.Scatter:
    rows = points.dropna(subset=["q10", "q90"])
    layers, low, high = (rows[name].tolist() for name in ("x", "q10", "q90"))
    band = go.Scatter(x=layers + layers[::-1], y=high + low[::-1], fill="toself", fillcolor=style(site)[0])
    band.update(opacity=0.14, mode="lines", line_width=0, hoverinfo="skip", showlegend=False)
    return band.update(legendgroup=site, name=html.escape(site), meta={"site": site, "role": "band"})


def profile_heads_figure(table: pd.DataFrame, metric: str = "parallel_fraction") -> go.Figure:
    """A map of layer by head (or slice) for every site that has them: the mean over tokens of `metric`.

    All sites share one colour scale, around zero for a signed metric. A cross marks a head without a finite
    mean. `ResultError` when no site has heads.
    """
    require(table, PROFILE, "profile")
    rows = table[table["head"].notna() & (table["metric"] == metric)]
    require(rows, "", f"profile of {metric} by head")
    rows = rows.assign(head=rows["head"].astype(int), hover=_profile_hover(rows))
    finite = rows["mean"].to_numpy(dtype=float)
    rows["mark"] = np.where(np.isfinite(finite), "", "×")
    finite = finite[np.isfinite(finite)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    limits = (-max(-low, high), max(-low, high)) if low < 0 < high else (min(low, 0.0), high)
    sites = list(rows["site"].unique())
    drawn = panels([html.escape(site) for site in sites], 1, height=280)
    for row, site in enumerate(sites, 1):
        part = rows[rows["site"] == site]
        grid = {name: part.pivot(index="head", columns="layer", values=name) for name in ("mean", "hover", "mark")}
        means = grid["mean"].astype(float).replace([np.inf, -np.inf], np.nan)
        cells = go.Heatmap(z=means, x=means.columns, y=means.index, coloraxis="coloraxis", xgap=1, ygap=1)
        cells.update(text=grid["mark"].fillna(""), texttemplate="%{text}", hovertext=grid["hover"].fillna(""))
        cells.update(hovertemplate="%{hovertext}<extra></extra>", meta={"site": site, "role": "heads"})
        drawn.add_trace(cells, row=row, col=1)
        drawn.update_yaxes(title_text=part_of(str(site)), dtick=max(1, len(means) // 8), showgrid=False, row=row, col=1)
        drawn.update_xaxes(title_text="layer", showgrid=False, row=row, col=1)
    colours = {"colorscale": "RdBu" if low < 0 < high else "Viridis", "cmin": limits[0], "cmax": limits[1]}
    bar = {"thickness": 12, "outlinewidth": 0, "title": {"text": metric, "side": "right"}}
    return drawn.update_layout(coloraxis={**colours, "colorbar": bar})


FIGURES: dict[str, Callable[[pd.DataFrame], go.Figure]] = {
    "profile": profile_figure,
    "scaling_sweep": partial(sweep_figure, quantities=tuple(UNITS)),
    "mlp_sweep": partial(sweep_figure, quantities=tuple(UNITS)),
    "head_sweep": heads_figure,
    "applied_strength": strength_figure,
    "basin": basin_figure,
    "schedule": schedule_figure,
    "attention_maps": attention_figure,
    "generation_profile": generation_figure,
    "continuations": continuations_figure,
    "evaluate": evaluation_figure,
    "sites": table_figure,
    "validate": table_figure,
    "minimal_pairs": pairs_figure,
    "dissociation": dissociation_figure,
    "pathway_repair": repair_figure,
    "mediators": mediators_figure,
    "train": run_figure,
    "compare_arms": arms_figure,
    "cost": table_figure,
    "compression": compression_figure,
    "compression_study": study_figure,
    "error_prediction": prediction_figure,
    "layer_choice": choice_figure,
}
