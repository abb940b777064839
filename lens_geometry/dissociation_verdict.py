"""Do direction and size hurt different things? A verdict computed from the contrasts of a `dissociation` table."""

from __future__ import annotations

import math
from typing import Any, Literal

import pandas as pd

from lens_geometry.axes import interval, require

COLUMNS = "quantity kind regime displacement seed value low high n_items n_left_out status"
GROUPS = ("model", "variant", "layers", "pairs", "matched")
REGIMES = ("all", "low", "high")
SYNTAX = ("margin", "accuracy")
VERDICTS = ("dissociation", "reversed", "one-sided", "none", "undecided")
SURE = ("angular", "magnitude")
SMALL = 0.5  # a contrast whose whole interval is nearer to 0 is none to speak of: one damage under 3 times the other


def group_columns(table: pd.DataFrame) -> list[str]:
    """The columns that tell one dose-response from another, of those that a table has."""
    return [name for name in GROUPS if name in table]


def groups(table: pd.DataFrame) -> dict[tuple[str, ...], pd.DataFrame]:
    """Each dose-response of a table under its model, variant and layers, in the table's order."""
    by = group_columns(table)
    if not by:
        return {(): table}
    return {tuple(map(str, key)): rows for key, rows in table.groupby(by, sort=False, dropna=False)}


def label(table: pd.DataFrame, key: tuple[str, ...]) -> str:
    """What tells a dose-response of this table from its others, in words; empty where there is one only."""
    words = {"layers": "layers {}", "matched": "at equal {}"}
    return ", ".join(
        words.get(name, "{}").format(value)
        for name, value in zip(group_columns(table), key, strict=True)
        if table[name].astype(str).nunique() > 1
    )


def verdict(table: pd.DataFrame) -> pd.DataFrame:
    """One row for each of `GROUPS` that the table has, each quantity and regime.

    A contrast is clear when its 95 % interval leaves out 0. With that of the loss above 0 (the change of direction
    hurts more) and that of the quantity (margin or accuracy of minimal pairs) below it (the change of size hurts more)
    the `verdict` is "dissociation", the other way round "reversed". Any other case with a clear contrast is
    "one-sided", whatever is known of the other one. Without a clear contrast it is "none" where both intervals lie
    within half the scale (-0.5 to 0.5), and "undecided" where one does not: too few seeds or items. Columns:
    `loss_contrast`, `contrast` and `crossover` (half their difference), each with `_low` and `_high`, `n_left_out`
    (displacements that could not be compared), and a `sentence`. Without pairs there is one row, of quantity "".

    Raises ResultError for a table that is none of a dissociation.
    """
    require(table, COLUMNS, "dissociation")
    found = []
    for key, rows in groups(table).items():
        about = dict(zip(group_columns(table), key, strict=True))
        quantities = [name for name in SYNTAX if name in set(rows["quantity"])] or [""]
        for quantity in quantities:
            for regime in REGIMES:
                if ((rows["regime"] == regime) & (rows["kind"] == "contrast")).any():
                    found.append({**about, "quantity": quantity, "regime": regime, **_decide(rows, quantity, regime)})
    return pd.DataFrame(found)


def _decide(rows: pd.DataFrame, quantity: str, regime: str) -> dict[str, Any]:
    loss, syntax = (_estimate(rows, name, "contrast", regime) for name in ("loss", quantity))
    crossover = _estimate(rows, quantity, "crossover", regime)
    word, sentence = _in_words(_side(loss), _side(syntax), quantity)
    numbers = [interval(*one[:3], signed=True) for one in (loss, syntax) if math.isfinite(one[0])]
    remarks = [f"contrast{'s' * (len(numbers) > 1)} {' and '.join(numbers)}"] if numbers else []
    if math.isfinite(crossover[0]):
        remarks.append(f"cross-over index {interval(*crossover[:3], signed=True)}")
    columns = {"loss_contrast": loss, "contrast": syntax, "crossover": crossover}
    ends = {
        f"{name}{end}": x for name, one in columns.items() for end, x in zip(("", "_low", "_high"), one, strict=False)
    }
    remark = f" ({', '.join(remarks)})" if remarks else ""
    return {"verdict": word, **ends, "n_left_out": max(loss[3], syntax[3], crossover[3]), "sentence": sentence + remark}


Estimate = tuple[float, float, float, int]


def _estimate(rows: pd.DataFrame, quantity: str, kind: str, regime: str) -> Estimate:
    """Value, low, high, and how many displacements were left out; NaN where that was not measured."""
    row = rows[(rows["quantity"] == quantity) & (rows["kind"] == kind) & (rows["regime"] == regime)]
    if row.empty:
        return math.nan, math.nan, math.nan, 0
    value, low, high = (float(row[name].iloc[0]) for name in ("value", "low", "high"))
    if int(row["n_items"].iloc[0]) < 2:  # of one sequence or pair, draws of seeds alone say nothing of others
        low = high = math.nan
    return value, low, high, int(row["n_left_out"].iloc[0])


Side = Literal["angular", "magnitude", "small", "wide", "unknown"]


def _side(estimate: Estimate) -> Side:
    """Which kind surely hurts more; or that neither does by much, that the interval is too wide, or missing."""
    _, low, high, _ = estimate
    if not (math.isfinite(low) and math.isfinite(high)):
        return "unknown"
    if low > 0:
        return "angular"
    if high < 0:
        return "magnitude"
    return "small" if low >= -SMALL and high <= SMALL else "wide"


def _in_words(loss: Side, syntax: Side, quantity: str) -> tuple[str, str]:
    on_loss = _more(loss, "the loss")
    if not quantity:
        return "undecided", f"{on_loss}; no minimal pairs were scored"
    on_pairs = _more(syntax, f"the {quantity}")
    apart = f"{on_loss}, {on_pairs}"
    if (loss, syntax) == ("angular", "magnitude"):
        return "dissociation", apart
    if (loss, syntax) == ("magnitude", "angular"):
        return "reversed", apart
    if loss == syntax == "small":
        return "none", f"hardly any difference, neither in the loss nor in the {quantity}"
    if loss == syntax and loss in SURE:
        return "one-sided", _more(loss, f"both the loss and the {quantity}")
    decided = "unknown" not in (loss, syntax) and (loss in SURE or syntax in SURE)
    return "one-sided" if decided else "undecided", f"{on_loss}; {on_pairs}"


def _more(side: Side, what: str) -> str:
    if side in SURE:
        return f"{side} hurts {what} more"
    return {
        "small": f"hardly any difference in {what}",
        "wide": f"it is open for {what}, whose interval is too wide to tell",
    }.get(side, f"there is no interval for {what}")
