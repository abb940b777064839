"""How far may a component be scaled before the loss notices? The tolerance basin of sites, layers and heads.

So that nobody tunes scales by hand: the interval of retained scales around 1 in which the change of loss stays under
a bound, found by `search.py` and not read off a grid.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from lens_geometry.anatomy import inspect, n_groups
from lens_geometry.edits import scale
from lens_geometry.errors import DataError, SiteError
from lens_geometry.experiments.changes import NO_CHANGE, Change, change, check_positive, identity_of_losses
from lens_geometry.experiments.columns import losses_in_words
from lens_geometry.experiments.profile import available_sites
from lens_geometry.experiments.search import Line, edge, search
from lens_geometry.metrics import SequenceLosses
from lens_geometry.results import Result
from lens_geometry.runner import (
    Condition,
    RunSettings,
    at_least,
    check_effects,
    prepare,
    provenance,
    run_conditions,
)
from lens_geometry.sites import SITES, Grouping, choose_layers


@dataclass(frozen=True)
class BasinSettings(RunSettings):
    """Settings of `basin`.

    Attributes:
        sites: which updates are edited; sites that this model does not have are left out and named.
        layers: layer sets, each edited at once: "all", "4", "1-", "4-11", "0,3,6"; "each" is every layer by itself.
        heads: edit the heads of a value site "together", or "each" head of each of the layers by itself.
        grouping: value-space vectors by head ("each"), "kv_group" or "merged"; these are also what "each" head is.
        component: which part is scaled, "parallel" or "perpendicular"; the other is kept.
        bound: change of loss, in nats per token, that the basin stays under.
        low: the smallest scale that is tried.
        high: the largest scale that is tried.
        step: of the coarse grid of scales that is tried first; a bump narrower than it can be stepped over.
        tolerance: of the edges, in units of scale.
        beyond: coarse scales past the first one outside that are tried too, to see whether the basin is re-entered.
        skip_position_0: leave position 0 unedited (there the value site *is* its reference).
    """

    sites: tuple[str, ...] = ("attn", "mlp", "value", "value_excl_self")
    layers: tuple[str, ...] = ("all",)
    heads: Literal["together", "each"] = "together"
    grouping: Grouping = "each"
    component: Literal["parallel", "perpendicular"] = "parallel"
    bound: float = 0.05
    low: float = -1.0
    high: float = 3.0
    step: float = 0.25
    tolerance: float = 0.02
    beyond: int = 2
    skip_position_0: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, beyond=0)
        if isinstance(self.layers, str):
            raise DataError(
                f"layers is the text {self.layers!r}", cure=f"give a tuple of layer sets: ({self.layers!r},)"
            )
        check_positive(self, "bound", "step", "tolerance")
        if self.tolerance < 1e-6 or self.tolerance > self.step:
            raise DataError(f"tolerance is {self.tolerance!r}", cure="give one from 1e-6 to the coarse step")
        if not (-math.inf < self.low <= 1 <= self.high < math.inf and self.low < self.high):
            raise DataError(f"low and high are {self.low!r} and {self.high!r}", cure="give limits with 1 between them")
        for name, known in (("component", ("parallel", "perpendicular")), ("heads", ("together", "each"))):
            if getattr(self, name) not in known:
                raise DataError(f"{name} is {getattr(self, name)!r}", cure=f"choose {' or '.join(known)}")

    @property
    def line(self) -> Line:
        return Line(self.low, self.high, self.step, self.tolerance, self.beyond)


class _Target(NamedTuple):
    """What has a basin: a site in a set of layers (in words and as numbers), or one head."""

    site: str
    layers: str
    chosen: tuple[int, ...]
    head: int | None


def basin(
    model: Any,
    data: Any,
    settings: BasinSettings | None = None,
    *,
    out: Path | str | None = None,
    **changes: Any,
) -> Result:
    """Find, for each site, layer set or head, the interval of scales around 1 with a change of loss under a bound.

    From 1 outwards, a coarse grid is tried until a scale is outside; then the gap is halved until the edge is known
    to `tolerance`. A scale is inside when the one-sided 95 % upper end of its change of loss (paired bootstrap over
    sequences) is under the bound; the edges by the change itself are found too. All scales that were tried between
    1 and an edge are inside; the intervals are of one scale each, not of all of them at once, and those of few
    sequences are too narrow. A scale whose losses are not all finite is outside.

    Args:
        model: any TransformerLens model.
        data: a Text, a string, a list of strings, or token ids [sequence, pos].
        settings: see `BasinSettings`; `changes` override single fields.
        out: a directory for the journal: each scale that was tried is written there, and the same call started again
            goes on where it was, also with another bound, tolerance, site or layer set.

    Returns:
        A Result with two kinds of rows. `kind` "basin", one per target: `low` to `high` is the basin (`width` long),
        `low_estimate` to `high_estimate` the one by the change itself; `low_open`, `high_open` (and
        `low_estimate_open`, ...) say that the search's limit was reached without leaving it, `reentrant` that a scale
        further out is inside again; `low_loss_change`, `high_loss_change` and their upper ends are those at the
        edges; `status` is "nonfinite" when a scale that was tried gave losses that are not finite, "no_effect" when
        none changed a loss by a bit. `kind` "evaluation": every scale that was tried.

    Raises:
        ModelError, DataError (also for fewer than two sequences, which have no interval), SiteError for what cannot
        be used; HookError when an edit does not reach the output; ResultError when the journal is of something else.
    """
    settings, started = replace(settings or BasinSettings(), **changes), time.monotonic()
    tokens = prepare(model, data, settings)
    if len(tokens.ids) < 2:
        raise DataError(
            "one sequence has no interval, and the basin is bounded by one",
            cure="give more text, or shorter or more sequences (max_sequences of 2 or more)",
        )
    sites, left_out = available_sites(model, settings.sites, editing=True)
    targets = list(dict.fromkeys(_targets(model, sites, settings)))
    check_effects(model, sites, [targets[0].chosen[0]])
    about = identity_of_losses(model, tokens, settings)
    losses: dict[str, SequenceLosses] = {}

    def evaluate(ask: Mapping[_Target, list[float]]) -> dict[_Target, dict[float, Change]]:
        conditions = [_condition(model, target, x, settings) for target, points in ask.items() for x in points]
        found = run_conditions(
            model,
            tokens,
            conditions,
            settings,
            journal=None if out is None else Path(out) / "journal.jsonl",
            about=about,
        )
        losses.update({key: value for key, value in found.items() if key not in losses})
        return {
            target: {x: change(losses[_key(target, x, settings)], losses["base"], settings.seed) for x in points}
            for target, points in ask.items()
        }

    surely, estimated = (lambda c: c.surely_under(settings.bound)), (lambda c: c.under(settings.bound))
    tried = search(targets, evaluate, [surely, estimated], settings.line)
    sizes = {"n_sequences": len(tokens.ids), "n_tokens": int(losses["base"].counts.sum())}
    basins = [_basin_row(target, known, settings) | sizes for target, known in tried.items()]
    evaluations = [row | sizes for target, known in tried.items() for row in _evaluation_rows(target, known, settings)]
    table = pd.DataFrame([*basins, *evaluations])
    flags = [name for name in table if name.endswith("open")] + ["reentrant", "inside"]
    table = table.astype({"head": "Int64", "n_evaluations": "Int64", **dict.fromkeys(flags, "boolean")})
    idle = [row for row in basins if row["status"] == "no_effect"]
    if idle:
        where = ", ".join(f"{row['site']} ({row['layers']})" for row in idle[:5])
        left_out.append(f"{len(idle)} basins have no edge, since no scale changed a loss by a bit: {where}")
    lost = sum(row["status"] == "nonfinite" for row in evaluations)
    if lost:
        left_out.append(f"{lost} of the scales that were tried gave losses that are not finite, and count as outside")
    for warning in left_out:
        warnings.warn(warning, stacklevel=2)
    meta = provenance(
        model,
        tokens,
        settings,
        started=started,
        token_mask=losses_in_words(settings.skip_position_0),
        counts={
            "basins": len(basins),
            "evaluations": len(evaluations),
            "nonfinite_evaluations": lost,
            "no_effect_basins": len(idle),
        },
    )
    meta["warnings"] += left_out
    return Result("basin", table, meta)


def _targets(model: Any, sites: Iterable[str], settings: BasinSettings) -> Iterator[_Target]:
    """Every site in every layer set, or every head of its layers."""
    anatomy = inspect(model)
    by_head = settings.heads == "each"
    if by_head and not any(SITES[site].has_heads for site in sites):
        raise SiteError(f"no site among {', '.join(sites)} has heads", cure="choose 'value' or 'value_excl_self'")
    for text in settings.layers:
        single = isinstance(text, str) and text.strip() == "each"
        layers = tuple(range(anatomy.n_layers)) if single else choose_layers(text, anatomy.n_layers)
        for site in sites:
            if by_head and SITES[site].has_heads:
                for layer in layers:
                    for head in range(n_groups(anatomy.layers[layer], settings.grouping)):
                        yield _Target(site, str(layer), (layer,), head)
            elif single:
                yield from (_Target(site, str(layer), (layer,), None) for layer in layers)
            else:
                yield _Target(site, text, layers, None)


def _grouping(target: _Target, settings: BasinSettings) -> Grouping:
    return settings.grouping if SITES[target.site].has_heads else "each"


def _key(target: _Target, x: float, settings: BasinSettings) -> str:
    head = "" if target.head is None else f" head {target.head}"
    return f"{target.site} {target.layers}{head} {_grouping(target, settings)} {settings.component} {x!r}"


def _condition(model: Any, target: _Target, x: float, settings: BasinSettings) -> Condition:
    hooks = partial(
        scale,
        model,
        target.site,
        parallel=x if settings.component == "parallel" else 1.0,
        perpendicular=x if settings.component == "perpendicular" else 1.0,
        layers=target.chosen,
        heads=target.head,
        positions=slice(1, None) if settings.skip_position_0 else None,
        grouping=_grouping(target, settings),
    )
    return Condition(
        key=_key(target, x, settings), hooks=lambda batch: hooks(batch=batch), first_layer=min(target.chosen)
    )


def _labels(target: _Target, settings: BasinSettings) -> dict[str, Any]:
    return {
        "site": target.site,
        "layers": target.layers,
        "head": target.head,
        "grouping": _grouping(target, settings),
        "component": settings.component,
        "bound": settings.bound,
    }


def _basin_row(target: _Target, known: Mapping[float, Change], settings: BasinSettings) -> dict[str, Any]:
    line = settings.line
    at = {line.start: NO_CHANGE, **known}
    row: dict[str, Any] = {"kind": "basin", **_labels(target, settings)}
    surely = {x: c.surely_under(settings.bound) for x, c in known.items()}
    estimated = {x: c.under(settings.bound) for x, c in known.items()}
    for side, name in ((-1, "low"), (1, "high")):
        sure, estimate = edge(surely, line, side), edge(estimated, line, side)
        row |= {
            name: sure.inside,
            f"{name}_estimate": estimate.inside,
            f"{name}_open": sure.open,
            f"{name}_estimate_open": estimate.open,
            f"{name}_loss_change": at[sure.inside].value,
            f"{name}_loss_change_upper": at[sure.inside].upper,
        }
    statuses = {c.status for c in known.values()}
    return row | {
        "width": row["high"] - row["low"],
        "reentrant": any(edge(surely, line, side).reentrant for side in (-1, 1)),
        "n_evaluations": len(known),
        "status": "nonfinite" if "nonfinite" in statuses else "no_effect" if statuses == {"no_effect"} else "ok",
    }


def _evaluation_rows(
    target: _Target, known: Mapping[float, Change], settings: BasinSettings
) -> Iterator[dict[str, Any]]:
    for x, found in sorted(known.items()):
        yield {
            "kind": "evaluation",
            **_labels(target, settings),
            "scale": x,
            "inside": found.surely_under(settings.bound),
            **found.columns(),
        }
