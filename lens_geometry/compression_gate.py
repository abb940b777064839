"""Whether a compressed model stays within bounds: which numbers are gated, and which of them offend.

Tables in, a verdict out; knows no model. What `compression_report` measured is read here too, for whoever tells of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from lens_geometry.axes import number, require
from lens_geometry.errors import DataError, ResultError

COLUMNS = "mode site layer head metric mean ci_low ci_high n_tokens n_infinite n_undefined"
MODES = ("local", "propagated")
PERPENDICULAR, LOSS = "perpendicular_error", "loss_change"
NAMES = {PERPENDICULAR: "|e_perp|/|u|", LOSS: "change of loss"}
Mode = Literal["local", "propagated"]


@dataclass(frozen=True)
class Offence:
    """A gated number that is over its bound, or not finite.

    `layer` is None and `site` empty for the change of loss, which is the whole model's.
    """

    mode: str
    site: str
    layer: int | None
    metric: str
    value: float
    low: float
    high: float
    bound: float
    reason: str

    @property
    def place(self) -> str:
        """`attn, layer 3 (local)`, or the whole model."""
        return "whole model" if self.layer is None else f"{self.site}, layer {self.layer} ({self.mode})"

    @property
    def words(self) -> str:
        """Place, value and bound in one line."""
        signed = self.metric == LOSS
        value = self.reason if not math.isfinite(self.value) else f"is {number(self.value, signed=signed, digits=4)}"
        beside = f" ({self.reason})" if math.isfinite(self.value) and "over" not in self.reason else ""
        return f"{self.place}: {NAMES[self.metric]} {value}{beside}, bound {bound_words(self.metric, self.bound)}"


@dataclass(frozen=True)
class Verdict:
    """What `judge` found.

    Attributes:
        bounds: the bounds that were given, by metric; none, and the verdict is "no bounds".
        mode: whose perpendicular errors are gated; None where they are not.
        sites: the sites whose perpendicular errors are gated.
        checked: how many numbers are gated.
        offending: those that offend, the furthest over its bound first, what is not finite before all.
    """

    bounds: dict[str, float]
    mode: str | None
    sites: tuple[str, ...]
    checked: int
    offending: tuple[Offence, ...]

    @property
    def passed(self) -> bool:
        return not self.offending

    @property
    def word(self) -> str:
        """passed, failed, or no bounds."""
        return "failed" if self.offending else "passed" if self.bounds else "no bounds"


def judge(
    table: pd.DataFrame,
    max_perpendicular: float | None = None,
    max_loss_change: float | None = None,
    mode: Mode | None = None,
) -> Verdict:
    """Hold a table of compression error against bounds.

    Args:
        table: of `compression_report`.
        max_perpendicular: the most that |e_perp|/|u| may be on average over tokens, in every layer at every site of
            the table (value heads pooled). A layer where it is infinite for a token is over every bound; one that adds
            nothing in either model is under all of them.
        max_loss_change: the most that the loss may rise, in nats per token; one token without a loss is over it.
        mode: whose perpendicular errors: by default "local" where it was run, else "propagated".

    Raises:
        DataError: a bound that is no number, or a negative size.
        ResultError: the table lacks a column, or a bound gates nothing: its mode was not run, or has no site or loss.
    """
    require(table, COLUMNS, "compression")
    check_bounds(max_perpendicular, max_loss_change)
    bounds = {PERPENDICULAR: max_perpendicular, LOSS: max_loss_change}
    given = {name: float(bound) for name, bound in bounds.items() if bound is not None}
    mode = mode or default_mode(tuple(found for found, _ in measured(table)))
    gated = []
    if PERPENDICULAR in given:
        rows = layer_rows(table, mode, PERPENDICULAR)
        if rows.empty:
            run = ", ".join(found for found in MODES if found in set(table["mode"])) or "none"
            raise ResultError(
                f"the bound on the perpendicular error gates nothing: there is no layer of mode {mode!r}",
                where=f"modes that were run: {run}",
                cure=f"run the mode {mode}, or gate another (--gate-mode)",
            )
        gated += rows.to_dict("records")
    if LOSS in given:
        rows = whole_rows(table, LOSS)
        if rows.empty:
            raise ResultError(
                "the bound on the change of loss gates nothing: the loss was not measured",
                cure="run the mode propagated too (--modes local propagated)",
            )
        gated += rows.to_dict("records")
    offending = [offence for row in gated if (offence := _offence(row, given[row["metric"]])) is not None]
    offending.sort(key=lambda found: -_excess(found))
    sites = tuple(dict.fromkeys(str(row["site"]) for row in gated if row["site"]))
    return Verdict(given, mode if PERPENDICULAR in given else None, sites, len(gated), tuple(offending))


def bound_words(metric: str, bound: float) -> str:
    """A bound as it was given."""
    return f"{bound:+g}" if metric == LOSS else f"{bound:g}"


def check_bounds(max_perpendicular: float | None, max_loss_change: float | None) -> None:
    """Raise DataError for a bound that bounds nothing."""
    if max_perpendicular is not None and not 0 <= max_perpendicular < math.inf:
        raise DataError(f"max_perpendicular is {max_perpendicular}", cure="give a number of 0 or more, such as 0.3")
    if max_loss_change is not None and not math.isfinite(max_loss_change):
        raise DataError(f"max_loss_change is {max_loss_change}", cure="give nats per token, such as 0.05")


def default_mode(modes: tuple[str, ...]) -> Mode:
    """The mode that is gated where none is named: local where it is run."""
    return "propagated" if "local" not in modes and "propagated" in modes else "local"


def _offence(row: dict[str, Any], bound: float) -> Offence | None:
    value, infinite, undefined = float(row["mean"]), int(row["n_infinite"]), int(row["n_undefined"])
    nothing_there = row["metric"] == PERPENDICULAR and not row["n_tokens"] and not infinite and undefined
    if nothing_there:  # 0 / 0 everywhere: the dense layer adds nothing, and the compressed one does neither
        return None
    if not math.isfinite(value):
        reason = "is not finite"
    elif row["metric"] == LOSS and undefined:
        reason = f"is not finite for {undefined:,} of {int(row['n_tokens']) + undefined:,} tokens"
    elif infinite:
        reason = f"is infinite for {infinite:,} of {int(row['n_tokens']) + infinite:,} tokens"
    elif value > bound:
        reason = "over the bound"
    else:
        return None
    layer = None if pd.isna(row["layer"]) else int(row["layer"])
    interval = (float(row["ci_low"]), float(row["ci_high"]))
    return Offence(str(row["mode"]), str(row["site"]), layer, str(row["metric"]), value, *interval, bound, reason)


def _excess(found: Offence) -> float:
    """How far over its bound, for the order: what is not finite first, then the loss by nats, errors by their size."""
    return math.inf if found.reason != "over the bound" else found.value - found.bound


def layer_rows(table: pd.DataFrame, mode: str, metric: str, site: str | None = None) -> pd.DataFrame:
    """A metric's row of every layer, all heads pooled, of all sites or one, in the table's order."""
    rows = table[(table["mode"] == mode) & (table["metric"] == metric) & table["head"].isna() & table["layer"].notna()]
    return rows[rows["site"] != ""] if site is None else rows[rows["site"] == site]


def site_row(table: pd.DataFrame, mode: str, site: str, metric: str) -> pd.Series | None:
    """A metric over all layers of a site, None where it was not measured."""
    over = table["layer"].isna() & table["head"].isna() & (table["site"] == site)
    rows = table[over & (table["mode"] == mode) & (table["metric"] == metric)]
    return None if rows.empty else rows.iloc[0]


def whole_rows(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A number of the whole compressed model: one row, or none."""
    whole = (table["site"] == "") & table["layer"].isna() & table["head"].isna()
    return table[whole & (table["mode"] == "propagated") & (table["metric"] == metric)]


def whole_row(table: pd.DataFrame, metric: str) -> pd.Series | None:
    """The same as one row, None where it was not measured."""
    rows = whole_rows(table, metric)
    return None if rows.empty else rows.iloc[0]


def measured(table: pd.DataFrame) -> list[tuple[str, str]]:
    """The (mode, site) pairs with layers, local first, sites in the table's order."""
    return [(mode, str(site)) for mode in MODES for site in layer_rows(table, mode, PERPENDICULAR)["site"].unique()]


def worst_layers(table: pd.DataFrame, mode: str, site: str, most: int = 3) -> list[tuple[int, float]]:
    """The layers with the largest perpendicular error; those that are not finite before all."""
    rows = layer_rows(table, mode, PERPENDICULAR, site)
    values = rows["mean"].astype(float)
    values = values.mask((rows["n_infinite"] > 0) | ~values.map(math.isfinite), math.inf)
    chosen = values.sort_values(ascending=False, kind="stable").index[:most]
    return [(int(rows.loc[at, "layer"]), float(values[at])) for at in chosen]
