"""Figures of attention maps before and after an edit: plotly's, and CircuitsVis' own.

Both are drawn from the table of `attention_maps` alone. Before and after share one colour scale, the difference has a
diverging one around zero. A weight that an edit has pushed beyond -1 or 1 has the last colour; hovering says
its value.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from lens_geometry.axes import number, panels, require
from lens_geometry.errors import ResultError

MAPS = {"before": "before the edit", "after": "after the edit", "difference": "difference"}
MAP_COLUMNS = "layer head query key query_token key_token before after difference edit"
LESS = "\ue000"  # stands for "<" on the way into a script, which a token must not be able to end
BELOW_ZERO, ABOVE_ZERO = "#B2182B", "#2166AC"  # the ends of plotly's RdBu


def attention_figure(table: pd.DataFrame) -> go.Figure:
    """Before, after and difference side by side; a menu chooses layer and head.

    It opens on the head where the edit did most. `ResultError` where columns or rows are missing.
    """
    require(table, MAP_COLUMNS, "attention_maps")
    drawn = panels(list(MAPS.values()), 3, height=400)
    heads = {
        (int(layer), int(head)): [_grid(part, which) for which in MAPS]
        for (layer, head), part in table.groupby(["layer", "head"], sort=True)
    }
    first = _most_changed(table)
    for column, (which, grid) in enumerate(zip(MAPS, heads[first], strict=True), 1):
        cells = _cells(table, which, grid).update(coloraxis="coloraxis" if which != "difference" else "coloraxis2")
        drawn.add_trace(cells, row=1, col=column)
        drawn.update_yaxes(showticklabels=column == 1, row=1, col=column)
    _token_axes(drawn, table)
    drawn.update_yaxes(title_text="attending token", row=1, col=1)
    bar = {"thickness": 10, "outlinewidth": 0, "orientation": "h", "y": -0.22, "yanchor": "top", "len": 0.3}
    for name, which, middle in (("coloraxis", "after", 0.32), ("coloraxis2", "difference", 0.87)):
        words = "attention" if which == "after" else "difference"
        axis = {**_colours(table, which), "colorbar": {**bar, "x": middle, "title": {"text": words, "side": "bottom"}}}
        drawn.update_layout({name: axis})
    buttons = [
        {"label": f"layer {layer}, head {head}", "method": "restyle", "args": [{"z": _rounded(grids)}, [0, 1, 2]]}
        for (layer, head), grids in heads.items()
    ]
    menu = {
        "buttons": buttons,
        "active": list(heads).index(first),
        "x": 0,
        "xanchor": "left",
        "y": 1.3,
        "yanchor": "top",
    }
    return drawn.update_layout(updatemenus=[menu], height=560, margin={"t": 120, "b": 130})


def map_figure(table: pd.DataFrame, layer: int, which: str) -> go.Figure:
    """One map of one layer, the mean over its heads: `which` is "before", "after" or "difference"."""
    require(table, MAP_COLUMNS, "attention_maps")
    part = table[table["layer"] == layer]
    require(part, "", f"attention_maps of layer {layer}")
    mean = part.groupby(["query", "key", "query_token", "key_token"], sort=False)[list(MAPS)].mean().reset_index()
    drawn = panels([f"layer {layer}, mean over heads: {MAPS[which]}"], 1, height=420)
    drawn.add_trace(_cells(mean, which, _grid(mean, which)).update(coloraxis="coloraxis"), row=1, col=1)
    _token_axes(drawn, mean)
    bar = {"thickness": 12, "outlinewidth": 0}
    return drawn.update_layout(coloraxis={**_colours(mean, which), "colorbar": bar})


def attention_html(
    table: pd.DataFrame,
    layers: int | Iterable[int] | None = None,
    which: str | Sequence[str] = tuple(MAPS),
) -> str:
    """CircuitsVis' attention heads as one HTML page that loads nothing: its JavaScript is in the page, 1.3 MB.

    Args:
        table: of `attention_maps`.
        layers: which of its layers; None is all.
        which: "before", "after", "difference", or several of them.

    Raises ResultError for a layer or map that the table does not have.
    """
    require(table, MAP_COLUMNS, "attention_maps")
    known = [int(layer) for layer in table["layer"].unique()]
    wanted = known if layers is None else [layers] if isinstance(layers, int) else list(layers)
    names = [which] if isinstance(which, str) else list(which)
    if set(wanted) - set(known) or set(names) - set(MAPS) or not wanted or not names:
        raise ResultError(
            f"there is no map {names} of layers {wanted}",
            cure=f"choose layers among {known} and maps among {', '.join(MAPS)}",
        )
    body = []
    for layer in wanted:
        part = table[table["layer"] == layer]
        body.append(f"<h2>Layer {layer}</h2>")
        body += [f"<h3>{MAPS[name].capitalize()}</h3>{_circuitsvis(part, table, name)}" for name in names]
    words = "Each square is a head; choose one to enlarge it. Rows attend to columns. Red is below zero."
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Attention before and after an edit</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<style>:root{color-scheme:light}body{font-family:system-ui,sans-serif;margin:1.5rem;background:#fff;color:#222}</style>"
        f"<script>{_bundle()}</script></head><body><p>{words}</p>{''.join(body)}</body></html>"
    )


def _circuitsvis(part: pd.DataFrame, table: pd.DataFrame, which: str) -> str:
    """One element of CircuitsVis, taken from the bundle in the page in place of a network address."""
    from circuitsvis.attention import attention_heads

    heads = sorted(part["head"].unique())
    colours = _colours(table, which)
    attention = np.stack([np.nan_to_num(_grid(part[part["head"] == head], which)) for head in heads])
    element = attention_heads(
        attention=np.round(attention, 5).tolist(),
        tokens=[_visible(word).replace("<", LESS) for word in _words(part)],
        attention_head_names=[f"head {head}" for head in heads],
        max_value=colours["cmax"],
        min_value=colours["cmin"] if colours["cmin"] < 0 else 0.0,
        negative_color=BELOW_ZERO,
        positive_color=ABOVE_ZERO,
        mask_upper_tri=True,
    )
    script, found = re.subn(
        r'import \{ render, (\w+) \} from "https://[^"]*";', r"const { render, \1 } = CircuitsVis;", element.cdn_src
    )
    if found != 1:
        raise ResultError(
            "this version of CircuitsVis writes its elements otherwise",
            cure="install circuitsvis 1.43, or use attention_figure",
        )
    script = script.replace(json.dumps(LESS)[1:-1], "\\u003c")
    return script.replace("/>", "></div>", 1)  # a div closes itself in no browser


def _bundle() -> str:
    """CircuitsVis' own JavaScript, from its Python package."""
    from importlib import resources

    source = (resources.files("circuitsvis") / "dist" / "cdn" / "iife.js").read_text(encoding="utf-8")
    return re.sub(r"//# sourceMappingURL=\S*", "", source).replace("</script>", "<\\/script>")


def _grid(part: pd.DataFrame, which: str) -> NDArray[np.float64]:
    """A map as [query, key], NaN where a token does not attend."""
    length = int(part["query"].max()) + 1
    grid = np.full((length, length), np.nan)
    grid[part["query"], part["key"]] = part[which].astype(float)
    return grid


def _cells(table: pd.DataFrame, which: str, grid: NDArray[np.float64]) -> go.Heatmap:
    words = [html.escape(_visible(word)) for word in _words(table)]
    places = range(len(words))
    pairs = [[f"{q} <b>{words[q]}</b> attends to {k} <b>{words[k]}</b>" for k in places] for q in places]
    cells = go.Heatmap(z=_rounded([grid])[0], text=pairs, xgap=1, ygap=1, hoverongaps=False)
    return cells.update(hovertemplate="%{text}<br>" + which + " %{z:.4f}<extra></extra>", meta={"role": which})


def _colours(table: pd.DataFrame, which: str) -> dict[str, Any]:
    """Before and after have one scale, from 0 where nothing is negative; no scale goes beyond 1."""
    values = table[["difference"] if which == "difference" else ["before", "after"]].to_numpy(dtype=float)
    finite = values[np.isfinite(values)]
    size = min(1.0, float(np.abs(finite).max())) if finite.size else 1.0
    size = size or 1.0
    signed = which == "difference" or (finite < 0).any()
    return {"colorscale": "RdBu" if signed else "Blues", "cmin": -size if signed else 0.0, "cmax": size}


def _token_axes(drawn: go.Figure, table: pd.DataFrame) -> None:
    words = [html.escape(_visible(word)) for word in _words(table)]
    step = max(1, -(-len(words) // 32))
    ticks = {"tickvals": list(range(0, len(words), step)), "ticktext": words[::step], "showgrid": False}
    drawn.update_xaxes(**ticks, tickangle=-90, range=[-0.5, len(words) - 0.5], zeroline=False)
    drawn.update_yaxes(**ticks, range=[len(words) - 0.5, -0.5], zeroline=False)


def _words(table: pd.DataFrame) -> list[str]:
    return table.drop_duplicates("query").sort_values("query")["query_token"].astype(str).tolist()


def _visible(word: str) -> str:
    """A token as one sees it: blanks and line breaks have a sign."""
    return word.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·") or "∅"


def _rounded(grids: Sequence[NDArray[np.float64]]) -> list[list[list[float | None]]]:
    """Five digits after the point, in JSON's terms (a NaN is null)."""
    return [[[None if np.isnan(x) else round(float(x), 5) for x in row] for row in grid] for grid in grids]


def _most_changed(table: pd.DataFrame) -> tuple[int, int]:
    sizes = table["edit"].abs().groupby([table["layer"], table["head"]]).sum()
    layer, head = sizes.idxmax()
    return int(layer), int(head)


def numbers_in_words(row: Any) -> list[str]:
    """A row of `diagonal_numbers` as cells of a table."""
    return [
        f"layer {row.layer}",
        number(row.before),
        number(row.after),
        number(row.edit, signed=True),
        number(row.edit_largest),
        f"{row.outside:.0%}",
    ]
