"""What the report shows of direction against size: the verdicts, damage by displacement, and the tests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from lens_geometry import html_pieces as pieces
from lens_geometry.axes import interval, number, panels
from lens_geometry.dissociation_plots import (
    COMPARED,
    ESTIMATES,
    KINDS,
    QUANTITIES,
    add_doses,
    add_estimates,
    ratio_words,
)
from lens_geometry.dissociation_verdict import SYNTAX, groups, label, verdict

WORDS = (
    "Hidden states are moved by the same distance in two ways: turned at constant length (angular), or made longer or "
    "shorter in their own direction (magnitude). Damage points up: the rise of the loss on text, and the drop of the "
    "margin log p(good) − log p(bad) and of the accuracy on minimal pairs. Lines are means over seeds, small marks "
    "single seeds. The contrast (a − m) / (|a| + |m|) is 1 where only the angular change hurts and −1 where only that "
    "of magnitude does, averaged over displacements. It is a dissociation where the contrast of the loss lies above 0 "
    "and that of the pairs below 0, reversed the other way round, one-sided where at least one is off 0 but they are "
    "not on opposite sides. The cross-over index is half the difference of the two contrasts. Intervals are 95 %, for "
    "other seeds and other sequences and pairs."
)
TEST_WORDS = (
    "p values are of paired t tests of the two kinds, over seeds and over items (sequences of text, pairs); those of "
    "single displacements are corrected by Holm's method for all of them and all quantities of their table. d is the "
    "mean difference in units of its own standard deviation."
)
FEW = 2  # with more dose-responses than these, one at a time is shown


def dissociation_section(table: pd.DataFrame, key: str) -> list[str]:
    """The contrasts and verdicts of every variant, then damage by displacement in figures and tables."""
    parts = groups(table)
    names = {part: label(table, part) for part in parts}
    quantities = [name for name in QUANTITIES if name in set(table["quantity"])]
    switches = "".join(map(pieces.site_switch, KINDS))
    if table["seed"].nunique() > 1:
        switches += pieces.role_switch("seeds", "single seeds", on=True)
    chosen = pieces.quantity_switches(f"{key}-variant", names.values()) if len(parts) > FEW else ""
    return [
        f"<p>{pieces.text(WORDS)}</p>",
        *_verdicts(table, names),
        f'<div class="figures">{"".join(_contrasts(table, key, quantities))}</div>',
        pieces.fieldset("Show in the figures", switches),
        pieces.fieldset("Damage by displacement of", chosen) if chosen else "",
        f'<div class="figures">{"".join(_doses(table, key, names, quantities))}</div>',
        f"<p>{pieces.text(TEST_WORDS)}</p>",
        *_by_displacement(parts, names, quantities),
    ]


def _contrasts(table: pd.DataFrame, key: str, quantities: list[str]) -> Iterator[str]:
    legend = ", ".join(f"{pieces.GLYPHS.get(COMPARED[name][1], '✚')} {name}" for name in quantities)
    for estimate, (title, words) in ESTIMATES.items():
        if (table["kind"] == estimate).any():
            drawn = panels([""], 1, height=max(240, 34 * len(groups(table)) + 190))
            add_estimates(drawn, table, estimate, {"row": 1, "col": 1})
            drawn.update_xaxes(title_text=None)  # too long for a phone: the caption has it
            caption = f"{words[0].upper()}{words[1:]}. {legend}; mean over the displacements that could be compared."
            title = title[0].upper() + title[1:]
            yield pieces.plot(drawn, f"{key}-{estimate}", title, caption, switched=False)


def _doses(table: pd.DataFrame, key: str, names: dict[tuple[str, ...], str], quantities: list[str]) -> Iterator[str]:
    for place, (part, rows) in enumerate(groups(table).items()):
        for quantity in quantities:
            drawn = panels([""], 1, height=390)
            add_doses(drawn, table, rows, quantity, {"row": 1, "col": 1})
            title = QUANTITIES[quantity][0]
            title = f"{names[part]}: {title}" if names[part] else title[0].upper() + title[1:]
            caption = "By displacement, on a symmetric-log axis. A cross was impossible or is not finite."
            shown = names[part] if len(names) > FEW else ""
            yield pieces.plot(drawn, f"{key}-{quantity}{place}", title, caption, quantity=shown)


def dissociation_warnings(table: pd.DataFrame) -> list[str]:
    """What a reader of the figures must know: conditions lost, no pairs, one seed."""
    conditions = table[table["kind"].isin(KINDS) & table["seed"].notna()]
    words = {
        "impossible": "were impossible at their displacement and were not run",
        "not_reached": "never raise the loss as far as they were asked to, and were not run",
        "nonfinite": "have losses or margins that are not finite",
        "no_effect": "changed nothing",
    }
    counts = conditions.drop_duplicates(_keys(conditions)).groupby("status").size()
    found = [f"{counts[name]:,} conditions {meaning}." for name, meaning in words.items() if name in counts]
    if found:
        found.append("A displacement with such a condition is compared no further and left out of the contrasts.")
    if not set(SYNTAX) & set(table["quantity"]):
        found.append("No minimal pairs were scored, so there is nothing to dissociate from.")
    if conditions["seed"].nunique() == 1:
        found.append("There was one seed only: intervals are over sequences and pairs alone.")
    return found


def _keys(table: pd.DataFrame) -> list[str]:
    names = ("model", "variant", "layers", "matched", "kind", "displacement", "seed", "status")
    return [name for name in names if name in table]


def _verdicts(table: pd.DataFrame, names: dict[tuple[str, ...], str]) -> Iterator[str]:
    """A row for each variant and quantity: the verdict, its numbers, and the verdicts of both regimes."""
    decided = verdict(table)
    rows = []
    for part, own in groups(decided).items():
        name = names[part]
        for quantity, found in own.groupby("quantity", sort=False):
            regimes = {row["regime"]: row for row in found.to_dict("records")}
            whole = regimes["all"]
            numbers = [_number(whole, column) for column in ("loss_contrast", "contrast", "crossover")]
            of_regimes = [regimes[regime]["verdict"] if regime in regimes else "" for regime in ("low", "high")]
            rows.append([", ".join(filter(None, (name, quantity))) or "loss", whole["verdict"], *numbers, *of_regimes])
    columns = ["text against", "verdict", "contrast of the loss", "contrast of the pairs", "cross-over index"]
    caption = "Verdicts from the contrasts over all displacements, and over low and high ones alone."
    yield pieces.grid(caption, [*columns, "low displacements", "high displacements"], rows)
    lines = [
        f"{': '.join(filter(None, (names[part], sentence)))}."
        for part, own in groups(decided[decided["regime"] == "all"]).items()
        for sentence in own["sentence"]
    ]
    items = "".join(f"<li>{pieces.text(line)}</li>" for line in lines)
    yield f"<ul>{items}</ul>" if len(names) == 1 else pieces.details("In words", f"<ul>{items}</ul>")


def _number(row: Any, column: str) -> str:
    if not math.isfinite(row[column]):
        return "not measured"
    ends = (row[f"{column}{end}"] for end in ("", "_low", "_high"))
    return interval(*ends, signed=True).replace(" [", "\n[")


def _by_displacement(
    parts: dict[tuple[str, ...], pd.DataFrame], names: dict[tuple[str, ...], str], quantities: list[str]
) -> Iterator[str]:
    columns = ["displacement", *KINDS, "angular / magnitude", "p over seeds", "p over items", "largest error, %"]
    for part, rows in parts.items():
        shown = []
        for quantity in quantities:
            own = rows[(rows["quantity"] == quantity) & rows["seed"].isna()]
            for place in [*own["displacement"].dropna().unique(), "low", "high", "all"]:
                of_place = own[own["regime"] == place] if isinstance(place, str) else own[own["displacement"] == place]
                if len(of_place):
                    shown.append(_row(quantity, place, {row["kind"]: row for row in of_place.to_dict("records")}))
        caption = "Damage, its ratio, and tests of the difference, by displacement and over low, high and all of them."
        shown_table = pieces.grid(caption, columns, shown)
        yield pieces.details(f"Damage by displacement: {names[part]}", shown_table) if len(parts) > 1 else shown_table


def _row(quantity: str, place: float | str, kinds: dict[Any, dict[Any, Any]]) -> list[str]:
    where = place if isinstance(place, str) else f"{place:g}"
    difference, quotient = kinds["difference"], kinds["ratio"]
    tests = [
        f"{_p(difference[f'p_{over}_holm' if not isinstance(place, str) else f'p_{over}'])}\n"
        f"d {number(difference[f'cohens_d_{over}'], signed=True, digits=2)}"
        for over in ("seeds", "items")
    ]
    errors = [kinds[kind]["displacement_max_error"] for kind in KINDS]
    error = "" if not all(map(math.isfinite, errors)) else number(100 * max(errors), digits=2)
    lost = "" if difference["status"] == "ok" else difference["status"]
    cells = [_entry(kinds[kind]) for kind in KINDS]
    compared = [ratio_words(quotient).replace(" [", "\n["), *tests] if not lost else [f"not compared\n{lost}", "", ""]
    return [f"{quantity}, {where}", *cells, *compared, error]


def _entry(row: dict[Any, Any]) -> str:
    if not math.isfinite(row["value"]):
        return "not compared" if row["regime"] else f"not run\n{row['status']}"
    return interval(row["value"], row["low"], row["high"], signed=True).replace(" [", "\n[")


def _p(value: float) -> str:
    return "no test" if not math.isfinite(value) else "< 0.0001" if value < 1e-4 else number(value, digits=2)
