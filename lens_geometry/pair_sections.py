"""The report's section for minimal pairs."""

from __future__ import annotations

from typing import Any

import pandas as pd

from lens_geometry import html_pieces as pieces
from lens_geometry.axes import interval, panels
from lens_geometry.pair_plots import PANELS, SCORINGS, add_pairs, pair_panels

PAIR_WORDS = (
    "A minimal pair is a grammatical sentence and an ungrammatical one, which differs from it in one word. The model "
    "is right where it finds the grammatical one likelier: by the whole sentence, by the critical word given what "
    "comes before it, or by the whole sentence per token. A bar is the 95 % interval over pairs, the dotted line is "
    "chance (half of the pairs) or no preference. In negative polarity the sentences of the template licensor differ "
    "in a word such as no or some, and the critical word is the polarity item after it: there whole sentences also "
    "compare how common those words are."
)


def pairs_section(table: pd.DataFrame, key: str) -> list[str]:
    """Accuracy and margin by set, accuracy by feature within each set, and the numbers."""
    whole = table[table["feature"] == "all"]
    scorings = [name for name in SCORINGS if name in set(table["scoring"])]
    figures = []
    for panel in pair_panels(whole):
        drawn, (_, title, wanted) = panels([""], 1, height=max(240, 46 * whole["set"].nunique() + 90)), PANELS[panel]
        add_pairs(drawn, whole.assign(label=whole["set"]), panel, {"row": 1, "col": 1})
        legend = _legend([name for name in scorings if name in wanted])
        figures.append(pieces.plot(drawn, f"{key}-{panel}", _capital(title), legend, switched=False))
    for place, (name, rows) in enumerate(table[table["feature"] != "all"].groupby("set", sort=False)):
        drawn = panels([""], 1, height=max(240, 34 * len(rows) // max(1, len(scorings)) + 130))
        add_pairs(drawn, rows.assign(label=rows["feature"] + ": " + rows["value"]), "accuracy", {"row": 1, "col": 1})
        figures.append(
            pieces.plot(drawn, f"{key}-set{place}", f"{name}: accuracy by feature", _legend(scorings), switched=False)
        )
    rows = [
        [str(name), f"{int(part['n_pairs'].max()):,}", *(cell for one in scorings for cell in _cells(part, one))]
        for name, part in whole.groupby("set", sort=False)
    ]
    columns = ["set", "pairs", *(f"{SCORINGS[one][2]}: {what}" for one in scorings for what in ("accuracy", "margin"))]
    return [
        f"<p>{pieces.text(PAIR_WORDS)}</p>",
        f'<div class="figures">{"".join(figures)}</div>',
        pieces.grid("Accuracy and mean margin with 95 % intervals over pairs.", columns, rows),
    ]


def _cells(rows: pd.DataFrame, scoring: str) -> list[str]:
    found = rows[rows["scoring"] == scoring]
    if found.empty:
        return ["not measured"] * 2
    row: dict[Any, Any] = found.iloc[0].to_dict()
    if row["status"] == "nonfinite":
        return [f"not finite\nfor {row['n_nonfinite']:,} pairs"] * 2
    numbers = (
        interval(row[n], row[f"{n}_low"], row[f"{n}_high"], signed=n == "margin") for n in ("accuracy", "margin")
    )
    return [one.replace(" [", "\n[") for one in numbers]


def _legend(scorings: list[str]) -> str:
    marks = (f"{pieces.GLYPHS.get(SCORINGS[name][1], '✚')} {SCORINGS[name][2]}" for name in scorings)
    return f"{', '.join(marks)}. Bars are 95 % intervals over pairs."


def _capital(words: str) -> str:
    return words[0].upper() + words[1:]
