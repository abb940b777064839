"""The report's section for compression error: what was done, figures by site and mode, a table of sites."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from lens_geometry import html_pieces as pieces
from lens_geometry.axes import interval, number, panels
from lens_geometry.compression_gate import LOSS, PERPENDICULAR, layer_rows, measured, site_row, whole_row, worst_layers
from lens_geometry.compression_plots import PARTS, add_errors

WORDS = (
    "The compressed model's update of a layer less the dense model's is the error e, split into a part along the dense "
    "update u and one perpendicular to it. Local: each layer of the compressed model by itself, on the dense model's "
    "stream. Propagated: the whole compressed model, so that errors of earlier layers come along. Solid lines are the "
    "perpendicular part, dashed ones the parallel part, each as a share of the update's length, mean over tokens with "
    "95 % intervals. An open marker at the panel's edge is an error below the axis, such as none at all."
)
WHOLE = {
    "loss_base": "loss of the base",
    "loss_compressed": "loss of the compressed model",
    LOSS: "change of loss",
    "kl": "KL divergence of the two predictions",
    "agreement": "same most likely token",
}
ALIGNED = {
    "pearson_perpendicular": "Pearson, perpendicular",
    "spearman_perpendicular": "Spearman, perpendicular",
    "pearson_parallel": "Pearson, parallel",
    "spearman_parallel": "Spearman, parallel",
}


def compression_section(table: pd.DataFrame, key: str) -> list[str]:
    """A panel for each site and mode, the whole model's numbers, means over layers with the worst ones, alignment."""
    sites = dict.fromkeys(site for _, site in measured(table))
    return [
        f"<p>{pieces.text(WORDS)}</p>",
        pieces.fieldset("Show in the figures", pieces.role_switch("band", "95 % intervals", on=True)),
        f'<div class="figures">{"".join(_figures(table, key, sites))}</div>',
        *_whole(table),
        *_sites(table),
        *_alignment(table),
    ]


def _figures(table: pd.DataFrame, key: str, sites: dict[str, None]) -> Iterator[str]:
    pairs = measured(table)
    for site in sites:
        for mode in [mode for mode, found in pairs if found == site]:
            drawn = panels([""], 1, height=300)
            place = {"row": 1, "col": 1}
            add_errors(drawn, table, mode, site, place, legend=False)
            drawn.update_yaxes(title_text="error / |u|", **place)
            caption = "Perpendicular solid, parallel dashed; the axis is the same for both modes of a site."
            yield pieces.plot(drawn, f"{key}-{site}-{mode}", f"{site}, {mode}", caption)


def _whole(table: pd.DataFrame) -> Iterator[str]:
    rows = {words: whole_row(table, name) for name, words in WHOLE.items()}
    cells = [[words, _cell(row, signed=words == WHOLE[LOSS])] for words, row in rows.items() if row is not None]
    if cells:
        yield pieces.grid("The whole compressed model: nats per token, and a share of tokens.", ["", "mean"], cells)


def _sites(table: pd.DataFrame) -> Iterator[str]:
    rows = []
    for mode, site in measured(table):
        means = [_cell(site_row(table, mode, site, name)) for name in (*PARTS, "perpendicular_share")]
        worst = ", ".join(f"{layer} ({number(value)})" for layer, value in worst_layers(table, mode, site))
        rows.append([f"{site}, {mode}", *means, worst])
    columns = ["site and mode", "|e_perp| / |u|", "|e_par| / |u|", "share of |e|² that is perpendicular"]
    caption = "Mean over tokens, then over layers; last the layers with the largest perpendicular error."
    yield pieces.grid(caption, [*columns, "worst layers"], rows)


def _alignment(table: pd.DataFrame) -> Iterator[str]:
    rows = []
    for mode, site in measured(table):
        found = {name: site_row(table, mode, site, name) for name in ALIGNED}
        if any(row is not None for row in found.values()):
            layers = len(layer_rows(table, mode, PERPENDICULAR, site))
            cells = ["not measured" if row is None else _number(row["mean"]) for row in found.values()]
            rows.append([f"{site}, {mode}", *cells, str(layers)])
    if rows:
        caption = "Correlation over layers of the whole error |e| / |u| with each of its parts."
        yield pieces.grid(caption, ["site and mode", *ALIGNED.values(), "layers"], rows)


def _number(value: float) -> str:
    return f"{value:.2f}".replace("-", "−") if np.isfinite(value) else "too few layers, or all alike"


def _cell(row: pd.Series | None, *, signed: bool = False) -> str:
    if row is None:
        return "not measured"
    value, low, high = (float(row[name]) for name in ("mean", "ci_low", "ci_high"))
    return interval(value, low, high, signed=signed).replace(" [", "\n[")


def compression_warnings(table: pd.DataFrame) -> list[str]:
    """Layers whose means leave tokens out, or are not finite."""
    rows = table[(table["metric"] == PERPENDICULAR) & table["head"].isna() & table["layer"].notna()]
    words = {
        "n_infinite": "for some tokens: there the base's update is zero, and the compressed model's is not",
        "n_undefined": "for some tokens: there both updates are zero",
    }
    names = {"n_infinite": "infinite", "n_undefined": "undefined"}
    found = [
        f"|e_perp| / |u| is {names[column]} {why}, and they are left out, in {int((rows[column] > 0).sum()):,} of "
        f"{len(rows):,} layers (sites and modes counted apart)."
        for column, why in words.items()
        if (rows[column] > 0).any()
    ]
    lost = int((~np.isfinite(rows["mean"].astype(float))).sum())
    return found + ([f"|e_perp| / |u| is not finite in {lost:,} of {len(rows):,} layers."] if lost else [])
