"""The report's section for layer choice, and its finding."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd

from lens_geometry import html_pieces as pieces
from lens_geometry.axes import number, require
from lens_geometry.choice_plots import CHOICE, PANELS, change_words, choice_figure, choice_words, difference_words

WORDS = (
    "Bits: every layer's error at every width was read on one text, widths were given out under one budget of size "
    "so that the sum of squared errors (or of single layers' losses) is least, and the model that this makes was "
    "tried on other text. Random: the same widths given to other layers. Blanked layers: the update of a whole "
    "layer is taken out; its error is then its update, which has no part perpendicular to itself, so that layers "
    "are ordered by the update's part perpendicular to the stream. Orders were made on one text and paid for on "
    "another. 95 % intervals are by paired bootstrap over sequences."
)
CAPTIONS = {
    "sensitivity": "A line for each width, the lower the wider; solid |e_perp| / |u|, dashed |e| / |u|.",
    "allocation": "Lines of one width are set a little apart.",
    "comparison": "All under the same budget of size; bars are 95 % intervals.",
    "score": "Orders leave out the lowest first.",
    "curve": "The lower, the better. A cross at the top is a loss that is not finite.",
}


def choice_section(table: pd.DataFrame, key: str) -> list[str]:
    """Figures of widths and orders, and the tables of what they cost."""
    figures = [
        pieces.plot(
            choice_figure(table, [name]),
            f"{key}-{name}",
            title.capitalize(),
            CAPTIONS[name],
            switched=False,
            legend=True,
        )
        for name, (part, title) in PANELS.items()
        if ((table["part"] == part) & (table["kind"] == name)).any()
    ]
    return [f"<p>{pieces.text(WORDS)}</p>", f'<div class="figures">{"".join(figures)}</div>', *_tables(table)]


def _tables(table: pd.DataFrame) -> Iterator[str]:
    compared = table[table["kind"] == "comparison"]
    if len(compared):
        rows = [
            [
                choice_words(row["choice"], "bits"),
                number(row["mean_bits"]),
                f"{row['size_bytes']:,.0f}",
                change_words(row).replace(" [", "\n["),
                difference_words(row).replace(" [", "\n["),
            ]
            for row in compared.to_dict("records")
        ]
        columns = ["chosen by", "bits per weight", "bytes, scales too", "change of loss, held out", "against uniform"]
        yield pieces.grid("Widths under one budget; change of loss in nats per token.", columns, rows)
        contrasts = [
            [
                f"{choice_words(row['choice'], 'bits')} less {choice_words(row['against'], 'bits')}",
                difference_words(row),
            ]
            for row in table[table["kind"] == "contrast"].to_dict("records")
        ]
        yield pieces.grid(
            "Between choices: difference of the loss, held out.", ["choices", "nats per token"], contrasts
        )
    curves = table[table["kind"] == "curve"]
    if len(curves):
        counts = sorted({int(n) for n in curves["n_blanked"]})
        shown = counts if len(counts) <= 4 else [counts[0], counts[len(counts) // 2], counts[-1]]
        rows = []
        for name, line in curves.groupby("choice", sort=False):
            by_count = {int(row["n_blanked"]): row for row in line.to_dict("records")}
            order = " ".join(str(by_count[n]["layer"]) for n in counts)
            cells = [change_words(by_count[n]).replace(" [", "\n[") for n in shown]
            rows.append([choice_words(str(name), "drop"), order, *cells])
        columns = ["ordered by", "layers in order", *(f"{n} blanked" for n in shown)]
        yield pieces.grid("Blanked layers; change of loss on the held-out text, nats per token.", columns, rows)


def bits_sentence(table: pd.DataFrame) -> str:
    """What the widths cost under the budget by each rule, cheapest first; empty where that was not tried."""
    require(table, CHOICE, "layer_choice")
    compared = table[(table["kind"] == "comparison") & table["loss_change"].map(math.isfinite)]
    if compared.empty:
        return ""
    told = [
        f"At {number(compared['mean_bits'].max())} bits per weight, widths of layers chosen by these rules change the "
        f"held-out loss by (nats per token, cheapest first) {_listed(compared, 'bits')}"
    ]
    for one, other in (("perpendicular", "error"), ("perpendicular", "uniform")):
        row = _pair(table, one, other)
        if row is not None:
            told.append(f"{choice_words(one, 'bits')} {_verb(row)} {choice_words(other, 'bits')}")
    return f"{'; '.join(told)}."


def drop_sentence(table: pd.DataFrame) -> str:
    """What the most blanked layers cost by each order, cheapest first; empty where that was not tried."""
    require(table, CHOICE, "layer_choice")
    curves = table[(table["kind"] == "curve") & table["loss_change"].map(math.isfinite)]
    if curves.empty:
        return ""
    most = int(curves["n_blanked"].max())
    last = curves[curves["n_blanked"] == most]
    told = [
        f"Without {most} layer{'s' * (most > 1)}, left out in these orders, the held-out loss changes by (nats per "
        f"token, cheapest first) {_listed(last, 'drop')}"
    ]
    row = next((row for row in last.to_dict("records") if row["choice"] == "perpendicular"), None)
    if row is not None:
        told.append(f"{choice_words('perpendicular', 'drop')} {_verb(row)} {choice_words('cosine', 'drop')}")
    return f"{'; '.join(told)}."


def _listed(rows: pd.DataFrame, part: str) -> str:
    """Every choice with its change of loss, cheapest first; all random ones as their mean."""
    random = rows["choice"].str.startswith("random")
    found = {choice_words(row["choice"], part): row["loss_change"] for row in rows[~random].to_dict("records")}
    if random.any():
        found[f"random (mean of {int(random.sum())})"] = float(rows.loc[random, "loss_change"].mean())
    return ", ".join(f"{name} {number(found[name], signed=True)}" for name in sorted(found, key=lambda one: found[one]))


def _pair(table: pd.DataFrame, one: str, other: str) -> dict[str, object] | None:
    rows = table[
        table["kind"].isin(("comparison", "contrast")) & (table["choice"] == one) & (table["against"] == other)
    ]
    return None if rows.empty else rows.to_dict("records")[0]


def _verb(row: dict[str, object]) -> str:
    """How one choice's loss compares with another's, from the paired interval."""
    value, low, high = (float(row[f"difference{end}"]) for end in ("", "_low", "_high"))  # type: ignore[arg-type]
    if value == low == high == 0:
        return "chooses the same as"
    verb = "costs more than" if low > 0 else "costs less than" if high < 0 else "cannot be told from"
    return f"(difference {difference_words(row)}) {verb}"
