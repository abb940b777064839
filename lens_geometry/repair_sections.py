"""The report's section for pathway repair."""

from __future__ import annotations

import pandas as pd

from lens_geometry import html_pieces as pieces
from lens_geometry.axes import interval, panels
from lens_geometry.repair_plots import (
    CHECKS,
    GAP,
    KINDS,
    RECOVERY,
    TITLES,
    add_head_map,
    add_repairs,
    dose_words,
    entry,
    head_rows,
    pooled,
)

REPAIR_WORDS = (
    "The stream that enters some layers was perturbed, and one pathway's intermediate product was replaced by that of "
    "the clean run, on the same noise and signs. Recovery is the share of the perturbation's damage (the change of "
    "loss) that this gives back: 0 is no help, 100 % the clean loss. Where several layers are perturbed, a later "
    "layer's noise turns or rescales the stream as the repairs before it have left it. Pathways can contain each "
    "other: a layer's norm outputs decide its attention pattern and what both branches write, so a joint repair with "
    "them is one of the norms alone. Intervals are 95 %, over sequences and seeds. Where there is no number the reason "
    "stands in words; an arrow is one beyond the panel's edge."
)
PATHWAYS = {
    "attention_pattern": "how much each token attends to every earlier one",
    "head_output": "each head's attention-weighted sum of values",
    "attention_output": "what attention adds to the stream",
    "layernorm_scale": "the denominators of the norms that attention and MLP read, all else as it is",
    "layernorm_output": "what those norms give: the input of attention and MLP",
    "mlp_output": "what the MLP adds to the stream",
    "final_norm": "what the norm before the unembedding gives, which alone decides the output",
    "everything": "all of these at once; it must give the clean loss, and is checked to",
    "nothing": "the perturbed run once more, with the clean run taken beside it; it must change nothing",
}


def repair_section(table: pd.DataFrame, key: str) -> list[str]:
    """Recovery by pathway for each displacement, additivity beside it, maps of single heads, and the numbers."""
    whole, heads = pooled(table), head_rows(table)
    kinds = [kind for kind in KINDS if kind in set(whole["kind"])]
    legend = "; ".join(f"{pieces.GLYPHS[KINDS[kind][1]]} {kind}" for kind in kinds)
    figures = []
    for place, (dose, rows) in enumerate(whole.groupby("displacement", sort=False)):
        for quantity in (RECOVERY, GAP):
            if quantity == GAP and rows[GAP].isna().all():
                continue
            shown = rows[rows["pathway"].str.contains("+", regex=False)] if quantity == GAP else rows
            drawn = panels([""], 1, height=max(250, 34 * shown["pathway"].nunique() + 100))
            add_repairs(drawn, rows, quantity, {"row": 1, "col": 1})
            title = f"{_capital(TITLES[quantity])}, {dose_words(whole, float(str(dose)))}"
            figures.append(pieces.plot(drawn, f"{key}-{quantity}-{place}", title, f"{legend}.", switched=False))
    for place, ((kind, dose), rows) in enumerate(heads.groupby(["kind", "displacement"], sort=False)):
        drawn = panels([""], 1, height=280)
        add_head_map(drawn, heads, rows, {"row": 1, "col": 1})
        drawn.update_layout(coloraxis={"colorbar": {"title": None, "len": 1}})
        title = f"Single heads, {kind}, {dose_words(whole, dose)}"
        caption = "Recovery when one head's output is repaired alone; one colour scale for all maps."
        figures.append(pieces.plot(drawn, f"{key}-heads{place}", title, caption, switched=False))
    names = [name for name in whole["pathway"].unique() if name not in CHECKS]
    cells = {(row["kind"], row["displacement"], row["pathway"]): row for row in whole.to_dict("records")}
    lines = []
    for kind, dose in dict.fromkeys(zip(whole["kind"], whole["displacement"], strict=True)):
        rows = [cells[kind, dose, name] for name in names]
        first = rows[0]
        damage = interval(first["damage"], first["damage_low"], first["damage_high"], signed=True)
        lines.append(
            [f"{kind}, {dose_words(whole, dose)}", *(cell.replace(" [", "\n[") for cell in (damage, *map(entry, rows)))]
        )
    meanings = {name: PATHWAYS.get(str(name), "") for name in whole["pathway"].unique() if name in PATHWAYS}
    caption = "Damage in nats per token, and recovery by pathway, with 95 % intervals."
    return [
        f"<p>{pieces.text(REPAIR_WORDS)}</p>",
        pieces.details("What the names mean", pieces.definitions(meanings)),
        f'<div class="figures">{"".join(figures)}</div>',
        pieces.grid(caption, ["perturbation", "damage", *names], lines),
    ]


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]
