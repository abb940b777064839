"""The report's sections for single heads and for applied strength: figures and short tables."""

from __future__ import annotations

import pandas as pd

from lens_geometry import effect_plots as plots
from lens_geometry import html_pieces as pieces
from lens_geometry.axes import interval, number, panels

HEADS_WORDS = (
    "One head (or KV head) at a time is edited, then all heads of its layer at once. A cell is the change of loss that "
    "this one head costs, all else unedited. Where the sum of single heads differs from all at once, heads stand in "
    "for each other or depend on each other. To first order, the effect is what the gradient at the unedited model "
    "predicts. Colours are symmetric-log around zero."
)
STRENGTH_WORDS = (
    "How much of the branch an edit changes, |y′ − y| / |y| after the matrix that writes to the stream, with this one "
    "layer edited and clean inputs; and what that edit costs. Low and to the right the model is robust; low and to the "
    "left the edit is weak. A ring is all layers edited at once."
)


def heads_section(table: pd.DataFrame, key: str) -> list[str]:
    """A map per site, grouping and method, the layers' totals, the two methods against each other, a table."""
    figures = []
    for place, (names, rows) in enumerate(plots.head_maps(table).items()):
        drawn = panels([""], 1, height=280)
        plots.add_head_map(drawn, table, rows, {"row": 1, "col": 1})
        drawn.update_layout(coloraxis={"colorbar": {"title": None, "len": 1}})
        caption = "Change of loss in nats per token for each head edited alone. Red costs, blue gains; × is not finite."
        title = plots.map_title(*names)
        figures.append(pieces.plot(drawn, f"{key}-map{place}", title, caption, switched=False))
    series = list(dict.fromkeys(zip(table["site"], table["grouping"], strict=True)))
    for place, (site, by) in enumerate(series):
        drawn = panels([""], 1, height=330)
        plots.add_layers(drawn, table[(table["site"] == site) & (table["grouping"] == by)], {"row": 1, "col": 1})
        caption = "; ".join(f"{words}: {dash} line" for words, dash, _ in plots.KINDS.values())
        title = f"{site}, {by}: by layer"
        figures.append(
            pieces.plot(drawn, f"{key}-layers{place}", title, f"{caption[0].upper()}{caption[1:]}.", switched=False)
        )
    if table["method"].nunique() > 1 and (table["kind"] == "single").any():
        drawn = panels([""], 1, height=360)
        plots.add_agreement(drawn, table, {"row": 1, "col": 1})
        caption = "Every point is a head; on the dotted line both methods agree."
        figures.append(pieces.plot(drawn, f"{key}-methods", "Exact against first order", caption, switched=False))
    rows = []
    for (site, by, method), part in table.groupby(["site", "grouping", "method"], sort=False):
        cells = [f"{site}, {by}, {plots.METHODS.get(str(method), method)}"]
        for kind in ("single", "all", "sum_of_singles"):
            changes = part.loc[part["kind"] == kind, "loss_change"].dropna()
            few = (
                f"{number(changes.min(), signed=True)} to {number(changes.max(), signed=True)}" if len(changes) else ""
            )
            cells.append(f"{number(changes.mean(), signed=True)}\n{few}" if len(changes) else "not measured")
        rows.append(cells)
    columns = ["heads", "one head", "all of a layer", "sum of single heads"]
    caption = "Change of loss in nats per token, mean over layers (and heads); in small print the lowest and highest."
    return [
        f"<p>{pieces.text(HEADS_WORDS)}</p>",
        f'<div class="figures">{"".join(figures)}</div>',
        pieces.grid(caption, columns, rows),
    ]


def strength_section(table: pd.DataFrame, key: str) -> list[str]:
    """Cost against strength and strength by layer for each component, and the rows of all layers at once."""
    figures = []
    for part in table["component"].unique():
        drawn = panels([""], 1, height=360)
        plots.add_strength(drawn, table, part, {"row": 1, "col": 1})
        title = f"{part} part: cost against strength"
        caption = "A point is a layer edited alone, a ring all layers at once. Both axes are of the same edit."
        figures.append(pieces.plot(drawn, f"{key}-cost-{part}", title, caption))
        drawn = panels([""], 1, height=330)
        plots.add_strength_by_layer(drawn, table[table["component"] == part], {"row": 1, "col": 1})
        caption = "Mean over tokens with its 95 % interval; the layer is edited alone."
        figures.append(pieces.plot(drawn, f"{key}-layer-{part}", f"{part} part: strength by layer", caption))
    whole = table[table["layer"].isna()]
    rows = [
        [
            f"{row['site']}, {row['component']} {row['scale']:g}",
            *(interval(row[n], row[f"{n}_low"], row[f"{n}_high"]).replace(" [", "\n[") for n in plots.STRENGTHS),
            interval(row["loss_change"], row["loss_change_low"], row["loss_change_high"], signed=True).replace(
                " [", "\n["
            ),
            number(row["loss_per_strength"], signed=True),
        ]
        for row in whole.to_dict("records")
    ]
    columns = ["edit", "|y′ − y| / |y|", "its square", "|y′| / |y|", "change of loss", "loss per strength"]
    switches = "".join(pieces.site_switch(str(site)) for site in table["site"].unique())
    return [
        f"<p>{pieces.text(STRENGTH_WORDS)}</p>",
        pieces.fieldset("Show in the figures", switches),
        f'<div class="figures">{"".join(figures)}</div>',
        pieces.grid("All layers at once; strengths are means over layers and tokens.", columns, rows),
    ]
