"""What the report shows of a tolerance basin and of a schedule: figures and short tables."""

from __future__ import annotations

import pandas as pd

from lens_geometry import html_pieces as pieces
from lens_geometry.axes import interval, number
from lens_geometry.basin_plots import (
    PARTS,
    SCALES,
    basin_figure,
    basin_range,
    basins,
    schedule_figure,
    variant_words,
)

BY_SITE = 12  # basins in one figure; with more each site has its own


def basin_section(table: pd.DataFrame, key: str) -> list[str]:
    """The intervals of every target, in a figure and in a table."""
    rows = basins(table)
    sites = list(rows["site"].unique())
    scale, bound = SCALES.get(rows["component"].iloc[0], "scale"), rows["bound"].iloc[0]
    caption = f"Scales {scale} around 1 (dotted) whose change of loss is under {bound:g} nats per token."
    groups = [[site] for site in sites] if len(rows) > BY_SITE else [sites]
    figures = [
        pieces.plot(
            basin_figure(table[table["site"].isin(group)]),
            f"{key}-basin-{place}",
            f"Tolerance of {scale}" + (f", {group[0]}" if len(group) == 1 else ""),
            caption,
            switched=False,
        )
        for place, group in enumerate(groups)
    ]
    entries = [
        [
            row["label"],
            basin_range(row),
            basin_range(row, "_estimate"),
            *(number(row[f"{end}_loss_change"], signed=True) for end in ("low", "high")),
            "yes" if row["reentrant"] else "no",
            str(int(row["n_evaluations"])),
        ]
        for _, row in rows.iterrows()
    ]
    columns = ["target", "basin", "by the change itself", "change at its low end", "at its high end"]
    shown = pieces.grid(
        f"Basins under {bound:g} nats per token; ≤ and ≥ mark the search's limits, reached without leaving.",
        [*columns, "inside again", "scales tried"],
        entries,
    )
    return [
        f'<div class="figures">{"".join(figures)}</div>',
        shown if len(rows) <= 3 * BY_SITE else pieces.details(f"All {len(rows)} basins", shown),
    ]


def schedule_section(table: pd.DataFrame, key: str) -> list[str]:
    """Scales and strengths by layer, the variants at equal strength on both halves, and both as tables."""
    layers, compared = table[table["kind"] == "layer"], table[table["kind"] == "comparison"]
    sites = list(layers["site"].unique())
    kinds = list(dict.fromkeys(name.split()[0] for name in compared["variant"] if name != "greedy"))
    switches = "".join(map(pieces.site_switch, sites))
    switches += "".join(pieces.role_switch(name, *variant_words(name), on=True) for name in kinds)
    captions = {
        "comparison": "Filled: held out; open: the half that was searched. The dotted line is the budget.",
        "scale": "1 leaves a layer as it is, 0 removes the parallel part.",
        "strength": "Mean over tokens, that layer alone edited.",
    }
    figures = [
        pieces.plot(
            schedule_figure(table, [part]), f"{key}-{part}", PARTS[part][0].capitalize(), captions.get(part, "")
        )
        for part in PARTS
    ]
    rows = []
    for (site, variant), found in compared.groupby(["site", "variant"], sort=False):
        half = {name: found[found["half"] == name].iloc[0] for name in ("search", "held_out")}
        ends = ("", "_low", "_high")
        values = [[half[name][f"loss_change{end}"] for end in ends] for name in half]
        values.append([half["held_out"][f"difference{end}"] for end in ends])
        cells = [interval(*value, signed=True).replace(" [", "\n[") for value in values]
        rows.append([f"{site}, {variant}", number(found["strength"].iloc[0]), *cells])
    columns = ["variant", "applied strength", "change of loss, searched", "held out", "held out, against greedy"]
    budget = f"Joint change of loss (nats per token) at equal strength; the budget is {table['budget'].iloc[0]:g}."
    greedy = [
        [
            f"{row.site}, layer {row.layer}",
            f"{row.scale:.2f}",
            number(row.strength),
            number(row.loss_change, signed=True),
        ]
        for row in layers[layers["variant"] == "greedy"].itertuples()
    ]
    by_layer = pieces.grid("The greedy schedule.", ["layer", "s_par", "applied strength", "change alone"], greedy)
    return [
        pieces.fieldset("Show in the figures", switches),
        f'<div class="figures">{"".join(figures)}</div>',
        pieces.grid(budget, columns, rows),
        pieces.details("The scale of every layer", by_layer),
    ]
