"""Does the perpendicular part of the error predict the damage better than the whole error? Said from intervals alone.

Both are correlated (by rank) with the damage over the same variants; what decides is their difference, with its paired
interval and its range when each family of variants in turn is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from lens_geometry.axes import interval, require

FEWEST = 12  # variants; the order of fewer is mostly that of their kinds
MARGIN = 0.05  # a rank correlation that is higher by less than this is not better in any way that matters
VERDICTS = {
    "better": "predicts better than the whole error",
    "worse": "predicts worse than the whole error",
    "not_better": "does not predict better than the whole error",
    "open": "cannot be told from the whole error",
}
COLUMNS = "question mode site against kind predictor given value low high family_low family_high n n_families verdict"
TARGETS = {"loss_change": "change of loss", "kl": "divergence (KL)"}


def verdict(row: Mapping[str, Any]) -> str:
    """A key of `VERDICTS`, from a difference of rank correlations: that of the perpendicular part less the whole's.

    "better" where the interval and the value without any one family are all above 0, "worse" where all are below,
    "not_better" where none of them reaches `MARGIN`, else "open". Without an interval, or over fewer than `FEWEST`
    variants: "open".
    """
    low, high = float(row["low"]), float(row["high"])
    if row.get("question") == "variants" and row["n"] < FEWEST:
        return "open"
    if not (math.isfinite(low) and math.isfinite(high)):
        return "open"
    ends = [float(row[name]) for name in ("family_low", "family_high")]
    least, most = min([low, *filter(math.isfinite, ends)]), max([high, *filter(math.isfinite, ends)])
    if least > 0:
        return "better"
    if most < 0:
        return "worse"
    return "not_better" if most < MARGIN else "open"


def find(table: pd.DataFrame, **wanted: str) -> pd.Series | None:
    """The one row with these entries, if there is one."""
    rows = table
    for name, value in wanted.items():
        rows = rows[rows[name] == value]
    return None if rows.empty else rows.iloc[0]


def prediction_sentence(table: pd.DataFrame, question: str = "variants", against: str = "loss_change") -> str:
    """Both correlations, their difference and the partial one, pooled over sites; then where it is otherwise.

    Empty where that question was not asked.
    """
    require(table, COLUMNS, "error_prediction")
    asked = table[(table["question"] == question) & (table["against"] == against)]
    differences = asked[asked["kind"] == "difference"]
    if differences.empty:
        return ""
    main = differences[differences["site"] == "pooled"]
    main = (differences if main.empty else main).iloc[0]
    place = {"mode": str(main["mode"]), "site": str(main["site"])}
    perpendicular, whole = (
        find(asked, kind="spearman", predictor=name, **place) for name in ("perpendicular_error", "error")
    )
    given = find(asked, kind="partial", predictor="perpendicular_error", given="error", **place)
    what = TARGETS[against] if question == "variants" else f"{TARGETS[against]} of one layer alone"
    cases = f"{int(main['n'])} variants" + (f" of {int(main['n_families'])} kinds" if main["n_families"] else "")
    words = [
        f"Over {cases} the {what} goes with the perpendicular part of the {place['mode']} error with a rank "
        f"correlation of {_entry(perpendicular)} and with the whole error with {_entry(whole)} "
        f"({_site(place['site'])}): the perpendicular part {VERDICTS[str(main['verdict'])]} "
        f"(difference {_entry(main, signed=True)})"
    ]
    if given is not None:
        words.append(f"its partial correlation given the whole error is {_entry(given, signed=True)}")
    others = differences.drop(index=main.name)
    counts = {name: int((others["verdict"] == name).sum()) for name in VERDICTS}
    told = ", ".join(f"at {count} it {VERDICTS[name]}" for name, count in counts.items() if count)
    if told:
        words.append(f"of {len(others)} other {'modes and ' * (question == 'variants')}sites {told}")
    return f"{'; '.join(words)}."


def _site(site: str) -> str:
    return "mean over sites" if site == "pooled" else f"at {site}"


def _entry(row: pd.Series | None, *, signed: bool = False) -> str:
    if row is None or not math.isfinite(row["value"]):
        return "what cannot be told"
    return interval(row["value"], row["low"], row["high"], signed=signed)
