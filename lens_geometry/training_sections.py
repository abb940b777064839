"""The report's sections for training: one run's curve, and arms side by side."""

from __future__ import annotations

import pandas as pd

from lens_geometry import html_pieces as pieces
from lens_geometry.axes import interval, number
from lens_geometry.training_plots import PARTS, arms_figure, run_figure

RUN_WORDS = (
    "A small model trained from nothing. The pale line is the loss on each batch, the dark one that on documents that "
    "are never trained on. Losses are means over tokens, in nats."
)
ARMS_WORDS = (
    "Models that start from the same weights and see the same batches, so that what is done to their updates, in "
    "training and in evaluation alike, is all that differs. A change below zero means that the arm is better than the "
    "baseline. Intervals are 95 %, over seeds and held-out sequences. At equal time both curves are read where the "
    "faster one ended: the slower one's learning rate had not yet come down there, which counts against it."
)
MEANINGS = {
    "baseline": "plain training",
    "attn": "what attention adds to the stream loses its part along the stream",
    "value": "each head's sum of values loses its part along the token's own value",
    "value_excl_self": "the same of the sum over the other tokens alone; the token's own message is kept",
    "mlp": "what the MLP adds to the stream loses its part along the stream",
    "gate": "as value, but each token keeps a share of that part that is learned from the layer's input",
    "gate_attn": "as attn, with such a gate",
    "diagonal": "no token attends to itself (the first one keeps its only entry), rows summing to 1",
    "diagonal_shrinking": "the same, with rows left as they are",
    "norm_matched": "as value, but along a random direction at the own value's angle to the sum: it changes the sum by "
    "as much and leaves it as long",
    "norm_matched_attn": "as attn, along such a random direction",
}


def run_section(table: pd.DataFrame, key: str) -> list[str]:
    """The curve, and the losses that were measured on held-out documents."""
    held_out = table[table["held_out_loss"].notna()]
    rows = [[f"{row.step:,}", f"{row.tokens:,}", number(row.held_out_loss, digits=4)] for row in held_out.itertuples()]
    title = "Loss against tokens; below, the learning rate and the norm of the gradient"
    return [
        f"<p>{pieces.text(RUN_WORDS)}</p>",
        f'<div class="figures">{pieces.plot(run_figure(table), f"{key}-run", title, "", switched=False)}</div>',
        pieces.grid("Loss on held-out documents, nats per token.", ["step", "tokens", "loss"], rows),
    ]


def arms_section(table: pd.DataFrame, key: str) -> list[str]:
    """Curves, paired differences, the end; and that in numbers, with what the first step was."""
    figures = []
    for part, (title, _) in PARTS.items():
        drawn, name, legend = arms_figure(table, [part]), f"{key}-{part}", part != "end"
        figures.append(pieces.plot(drawn, name, title[0].upper() + title[1:], "", switched=False, legend=legend))
    names = [str(name) for name in dict.fromkeys(table["arm"])]
    meanings = {name: MEANINGS.get(name.split(":")[0], "") for name in names}
    columns = [
        "arm",
        "loss at the end",
        "change at equal tokens",
        "change at equal time",
        "first loss, with edit",
        "seeds",
    ]
    return [
        f"<p>{pieces.text(ARMS_WORDS)}</p>",
        pieces.details("What the arms mean", pieces.definitions(meanings)),
        f'<div class="figures">{"".join(figures)}</div>',
        pieces.grid(_caption(table), columns, [_line(table, name) for name in names]),
    ]


def _caption(table: pd.DataFrame) -> str:
    bare = table.loc[table["kind"] == "first", "bare_loss"].mean()
    return (
        f"Nats per token, with 95 % intervals. Before the first step every arm has the same weights, and without its "
        f"edit the same loss, {number(bare, digits=5)}; what differs there is the edit alone."
    )


def _line(table: pd.DataFrame, name: str) -> list[str]:
    own = table[table["arm"] == name]
    first = number(own.loc[own["kind"] == "first", "held_out_loss"].mean(), digits=5)
    cells = {row["at"]: row for _, row in own[own["kind"] == "final"].iterrows()}
    last = cells["equal tokens"]
    lost = f"{last['n_diverged']:.0f} diverged"
    if "equal time" not in cells:
        why = "the baseline came to no end" if last.get("status") == "no baseline" else "none came to its end"
        return [name, why, "", "", first, lost]
    seeds = f"{last['n_seeds']:.0f}" + (f", {lost}" if last["n_diverged"] else "")
    changes = ["" if name == "baseline" else _change(cells[at]) for at in ("equal tokens", "equal time")]
    return [name, number(last["held_out_loss"], digits=4), *changes, first, seeds]


def _change(row: pd.Series) -> str:
    return interval(row["change"], row["change_low"], row["change_high"], signed=True).replace(" [", "\n[")
