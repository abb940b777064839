"""The report's section for the mediators of a push: figures for each displacement, exponents, shares of the damage."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from lens_geometry import html_pieces as pieces
from lens_geometry import mediator_plots as plots
from lens_geometry.axes import interval, number, panels

WORDS = (
    "Layers of the stream are pushed (shaded), and every layer is compared with the clean run at the same token. If "
    "the pushes add up, the displacement after n of them is n times one push; if they are independent, it grows like "
    "the square root of n, as in a random walk. The thin lines with open markers are the sum of the pushes alone: "
    "where the stream's own line is steeper, the layers amplify what was pushed. The share of the damage is how much "
    "of the variance of the loss change, over sequences and seeds, goes with the change of a mediator (mean over "
    "tokens and over layers from the first push on). It is a correlation: what a pathway causes is seen by repairing "
    "it (the recovery of a pathway repair)."
)
CAPTIONS = {
    "relative_displacement": "The stream as each layer reads it, after its push; the last point leaves the model.",
    "angle": "Between the perturbed and the clean stream of the same token.",
    "attention_entropy": "Mean over heads and over tokens as queries, perturbed minus clean.",
    "norm_ratio": "Length of the perturbed stream over that of the clean one.",
    "query_key_alignment": "Attention-weighted cosine of a query with its keys, perturbed minus clean.",
}
SHARE_CAPTION = (
    "Bars reach from 0 (nothing goes with it) to 1; lines are 95 % intervals over sequences. Chance alone gives about "
    "{chance} with {points} points."
)


def mediators_section(table: pd.DataFrame, key: str) -> list[str]:
    """For each displacement: four mediators by layer, growth, shares; then tables of exponents and shares."""
    pooled = table[table["seed"].isna()]
    kinds = "".join(pieces.site_switch(str(kind)) for kind in pooled["kind"].unique())
    dashes = {variant: dash for (variant, _), (dash, _) in plots.series(pooled).items()}
    variants = "".join(pieces.role_switch(name, name, dash, on=True) for name, dash in dashes.items())
    return [
        f"<p>{pieces.text(WORDS)}</p>",
        pieces.fieldset("Show in the figures", kinds + variants),
        f'<div class="figures">{"".join(_figures(pooled, key))}</div>',
        *_tables(pooled),
    ]


def _figures(pooled: pd.DataFrame, key: str) -> Iterator[str]:
    several = pooled["displacement"].nunique() > 1
    for place, displacement in enumerate(pooled["displacement"].unique()):
        rows = plots.chosen_rows(pooled, displacement)
        remark = f" (d = {displacement:g} {rows['unit'].iloc[0]})" if several else ""
        for name, (_, title, _) in plots.PANELS.items():
            if name in set(rows["mediator"]):
                drawn = panels([""], 1, height=330)
                plots.add_mediator(drawn, rows, name, {"row": 1, "col": 1})
                title = f"{title[0].upper()}{title[1:]}{remark}"
                yield pieces.plot(drawn, f"{key}-{place}-{name}", title, CAPTIONS[name])
        if (rows["mediator"] == "growth").any():
            drawn = panels([""], 1, height=380)
            plots.add_growth(drawn, rows, {"row": 1, "col": 1})
            caption = "Root mean square over tokens. The dashed grey line is n, the dotted one the square root of n."
            yield pieces.plot(drawn, f"{key}-{place}-growth", f"Growth over pushes{remark}", caption)
        for measure, title in plots.SHARES.items():
            part = rows[rows["measure"] == measure]
            if part["value"].notna().any():
                drawn = panels([""], 1, height=560)
                plots.add_shares(drawn, rows, measure, {"row": 1, "col": 1})
                points = int(part["n_points"].max())
                caption = SHARE_CAPTION.format(chance=number(1 / (points - 1), digits=1), points=points)
                title = f"{title[0].upper()}{title[1:]}{remark}"
                yield pieces.plot(drawn, f"{key}-{place}-{measure}", title, caption)


def _tables(pooled: pd.DataFrame) -> Iterator[str]:
    keys = ["variant", "kind", "displacement"]
    exponents = pooled[pooled["measure"] == "growth_exponent"]
    if exponents["value"].notna().any():
        rows = []
        for (variant, kind, d), part in exponents.groupby(keys, sort=False):
            by_name = part.set_index("mediator")
            cells = [_cell(by_name.loc[name]) if name in by_name.index else "not measured" for name in plots.GROWTH]
            rows.append([f"{kind}, {variant}, d = {d:g}", *cells])
        caption = "Exponent p of displacement ~ n^p: 1 where pushes add up, 0.5 for a random walk; 95 % intervals."
        yield pieces.grid(caption, ["pushes", *(words for words in plots.GROWTH.values())], rows)
    shares = pooled[pooled["measure"] == "explained"]
    if shares["value"].notna().any():
        pushes = {
            f"{kind}, {variant}, d = {d:g}": part for (variant, kind, d), part in shares.groupby(keys, sort=False)
        }
        names = [name for name in plots.MEDIATORS if name in set(shares["mediator"])]
        rows = [[plots.MEDIATORS[name], *(_share(part, name) for part in pushes.values())] for name in names]
        caption = "Share of the variance of the loss change that goes with each mediator's change (R²)."
        yield pieces.grid(caption, ["mediator", *pushes], rows)


def _cell(row: pd.Series) -> str:
    return interval(row["value"], row["low"], row["high"]).replace(" [", "\n[")


def _share(part: pd.DataFrame, mediator: str) -> str:
    rows = part[part["mediator"] == mediator]
    if rows.empty:
        return "not measured"
    row = rows.iloc[0]
    if row["status"] == "few_points":
        return "too few points"
    return "does not vary" if pd.isna(row["value"]) else f"{row['value']:.2f}\n[{row['low']:.2f}, {row['high']:.2f}]"
