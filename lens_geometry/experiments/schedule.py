"""Which layers can be scaled down, and how far, when the loss may rise by so much in all?

Each layer is measured by itself on a grid of scales; then the layers are lowered one step at a time, always where it
costs least for the change that it makes, as long as the joint loss stays within the budget. Beside it stand one
uniform scale and random orders of the layers, all of equal applied strength. The choice is made on every other
sequence and reported on both halves, since what was chosen on a text looks better there than it is.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lens_geometry.anatomy import inspect
from lens_geometry.errors import DataError
from lens_geometry.experiments.changes import NO_CHANGE, Change, check_positive, identity_of_losses
from lens_geometry.experiments.columns import losses_in_words
from lens_geometry.experiments.joint import JointEdits
from lens_geometry.experiments.paths import (
    Scales,
    Step,
    after,
    at_strength,
    greedy_path,
    random_path,
    total_strength,
    uniform,
)
from lens_geometry.experiments.profile import available_sites
from lens_geometry.experiments.search import Line, edge, search
from lens_geometry.experiments.strength import branch_hook
from lens_geometry.results import Result
from lens_geometry.runner import RunSettings, at_least, check_effects, prepare, provenance
from lens_geometry.sites import SITES, Grouping, choose_layers

HALVES = ("search", "held_out")


@dataclass(frozen=True)
class ScheduleSettings(RunSettings):
    """Settings of `schedule`.

    Attributes:
        sites: which updates are edited, each with a schedule and a budget of its own.
        layers: which layers may be lowered: "all", "1-", "4-11", "0,3,6".
        budget: change of loss, in nats per token, that all layers together stay under.
        scales: the retained scales, below 1, that a layer is lowered to, step by step.
        random_orders: how many random orders of the layers stand beside the schedule.
        grouping: value-space vectors by head ("each"), "kv_group" or "merged".
        skip_position_0: leave position 0 unedited (there the value site *is* its reference).
    """

    sites: tuple[str, ...] = ("value_excl_self",)
    layers: str = "all"
    budget: float = 0.1
    scales: tuple[float, ...] = (0.75, 0.5, 0.25, 0.0)
    random_orders: int = 3
    grouping: Grouping = "each"
    skip_position_0: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, random_orders=0)
        check_positive(self, "budget")
        for site in self.sites:
            if site in SITES:  # unknown ones are named, with the known ones, when the model is asked
                branch_hook(SITES[site])
        if not self.scales or not all(-math.inf < s < 1 for s in self.scales):
            raise DataError(f"scales are {self.scales!r}", cure="give one or more finite numbers below 1")


def schedule(
    model: Any,
    data: Any,
    settings: ScheduleSettings | None = None,
    *,
    out: Path | str | None = None,
    **changes: Any,
) -> Result:
    """Find, for each site, per-layer scales whose joint change of loss stays under a budget.

    A layer's applied strength is the mean over tokens (padding and position 0 left out) of |y' - y| / |y| for the
    output y of its branch, with that layer alone edited; the total is the sum over layers. The schedule is where
    the greedy path is last found inside the budget, inside being that the one-sided 95 % upper end of the joint
    change of loss (paired bootstrap over the sequences of the search) is under it.

    Args:
        model: any TransformerLens model.
        data: a Text, a string, a list of strings, or token ids [sequence, pos].
        settings: see `ScheduleSettings`; `changes` override single fields.
        out: a directory for the journals: what was run is written there, and the same call started again goes on
            where it was, also with another budget or other scales.

    Returns:
        A Result whose rows are of four kinds. `kind` "layer": the scale and the measured strength of every layer, in
        each variant ("greedy", "uniform", "random 1", ...). "comparison": each variant on the `half` it was searched
        on and on the held-out one: its total strength, joint change of loss, and the `difference` of its loss from the
        greedy one's (positive: greedy is better), with 95 % intervals. "single": each layer alone at each scale.
        "path": the greedy steps in order with the strength so far, and the joint change where it was measured
        (status "not_measured" elsewhere). `status` is else as in `basin`.

    Raises:
        ModelError, DataError (also for fewer than four sequences), SiteError for what cannot be used; HookError when
        an edit does not reach the output; ResultError when a journal is of something else.
    """
    settings, started = replace(settings or ScheduleSettings(), **changes), time.monotonic()
    tokens = prepare(model, data, settings)
    if len(tokens.ids) < 4:
        raise DataError(
            f"{len(tokens.ids)} sequences cannot be halved with an interval for each half",
            cure="give more text, or shorter or more sequences (max_sequences of 4 or more)",
        )
    sites, left_out = available_sites(model, settings.sites, editing=True)
    layers = choose_layers(settings.layers, inspect(model).n_layers)
    check_effects(model, sites, layers[:1])
    about = identity_of_losses(model, tokens, settings)
    halves = {
        name: JointEdits(
            model,
            tokens.take(slice(place, None, 2)),
            settings,
            grouping=settings.grouping,
            skip_position_0=settings.skip_position_0,
            journal=None if out is None else Path(out) / f"{name}.jsonl",
            about=about | {"half": name},
        )
        for place, name in enumerate(HALVES)
    }
    rows: list[dict[str, Any]] = []
    for site in sites:
        found = [row | {"budget": settings.budget} for row in _rows(site, layers, halves, settings)]
        rows += found
        left_out += _remarks(site, found)
    table = pd.DataFrame(rows).astype({"layer": "Int64", "step": "Int64", "n_sequences": "Int64"})
    for warning in left_out:
        warnings.warn(warning, stacklevel=2)
    meta = provenance(
        model,
        tokens,
        settings,
        started=started,
        token_mask=losses_in_words(settings.skip_position_0) + "; strengths without position 0",
        counts={
            "conditions": int(table["loss_change"].notna().sum()),
            "nonfinite_conditions": int((table["status"] == "nonfinite").sum()),
            "no_effect_conditions": int((table["status"] == "no_effect").sum()),
        },
    )
    meta["warnings"] += left_out
    return Result("schedule", table, meta)


def _rows(
    site: str, layers: tuple[int, ...], halves: Mapping[str, JointEdits], settings: ScheduleSettings
) -> Iterator[dict[str, Any]]:
    """One site: measure the layers, walk the greedy path, and set the schedule beside the others."""
    searched = halves["search"]
    strengths = searched.strengths(site, tuple((layer, 0.0) for layer in layers))
    singles = [((layer, s),) for layer in layers for s in sorted({*settings.scales}, reverse=True)]
    searched.run(site, singles)
    alone = {single[0]: searched.change(site, single) for single in singles}
    costs: dict[int, dict[float, float]] = {layer: {} for layer in layers}
    for (layer, s), cost in alone.items():
        costs[layer][s] = math.nan if cost.status == "nonfinite" else cost.value
        place = {"layer": layer, "scale": s, "strength": (1 - s) * strengths[layer]}
        yield {**_row("single", site, searched, cost), **place}
    path = greedy_path(costs, strengths)
    joint = _walk(site, path, searched, settings.budget)
    for number, step in enumerate(path, 1):
        place = {"layer": step.layer, "scale": step.scale, "strength": total_strength(after(path[:number]), strengths)}
        yield {**_row("path", site, searched, joint.get(number)), "step": number, **place}
    inside = {x: c.surely_under(settings.budget) for x, c in joint.items()}
    greedy = after(path[: int(edge(inside, _line(path), 1).inside)])
    variants = _variants(greedy, strengths, settings)
    measured = {name: searched.strengths(site, scales) for name, scales in variants.items()}
    for name, scales in variants.items():
        for layer in layers:
            s = dict(scales).get(layer, 1.0)
            row = _row("layer", site, searched, alone.get((layer, s), NO_CHANGE if s == 1 else None))
            place = {"layer": layer, "scale": s, "strength": measured[name].get(layer, 0.0)}
            yield {**row, "variant": name, **place}
    for half, edits in halves.items():
        edits.run(site, variants.values())
        for name, scales in variants.items():
            against = edits.change(site, scales, greedy)
            yield {
                **_row("comparison", site, edits, edits.change(site, scales)),
                "half": half,
                "variant": name,
                "strength": math.fsum(measured[name].values()),
                "difference": against.value,
                "difference_low": against.low,
                "difference_high": against.high,
            }


def _variants(greedy: Scales, strengths: Mapping[int, float], settings: ScheduleSettings) -> dict[str, Scales]:
    """The schedule, and what stands beside it with the same total strength."""
    total = total_strength(greedy, strengths)
    found = {"greedy": greedy, "uniform": uniform(strengths, total)}
    for number in range(1, settings.random_orders + 1):
        order = random_path(strengths, min(settings.scales), np.random.default_rng((settings.seed, number)))
        found[f"random {number}"] = at_strength(order, strengths, total)
    return found


def _row(kind: str, site: str, edits: JointEdits, found: Change | None) -> dict[str, Any]:
    """What every row has; without a change where nothing was measured."""
    lost = Change(math.nan, math.nan, math.nan, math.nan, 0, "not_measured")
    return {
        "kind": kind,
        "site": site,
        "variant": None,
        "half": "search",
        "step": None,
        "layer": None,
        "scale": math.nan,
        "strength": math.nan,
        **(found or lost).columns(),
        "difference": math.nan,
        "difference_low": math.nan,
        "difference_high": math.nan,
        "n_sequences": len(edits.tokens.ids),
    }


def _line(path: list[Step]) -> Line:
    """Numbers of steps, from none to all, tried in eight strides and then one by one."""
    stride = max(1, math.ceil(len(path) / 8))
    return Line(low=0, high=len(path), step=stride, tolerance=1, beyond=0, start=0, digits=0)


def _walk(site: str, path: list[Step], searched: JointEdits, budget: float) -> dict[float, Change]:
    """Joint change of loss after so many steps of a path, where it was needed to find the last one inside."""

    def evaluate(ask: Mapping[str, list[float]]) -> dict[str, dict[float, Change]]:
        prefixes = {x: after(path[: int(x)]) for x in ask[site]}
        searched.run(site, prefixes.values())
        return {site: {x: searched.change(site, scales) for x, scales in prefixes.items()}}

    return search([site], evaluate, [lambda c: c.surely_under(budget)], _line(path))[site]


def _remarks(site: str, rows: list[dict[str, Any]]) -> list[str]:
    """What about one site's schedule a reader must know."""
    found = []
    lost = sum(row["status"] == "nonfinite" for row in rows if row["kind"] in ("single", "comparison"))
    if lost:
        found.append(f"site {site}: {lost} of its conditions gave losses that are not finite; see their status")
    totals = {row["variant"]: row["strength"] for row in rows if row["kind"] == "comparison"}
    if not totals["greedy"]:
        found.append(f"site {site}: no step of the greedy path fits the budget, so nothing is scaled")
    elif max(abs(total / totals["greedy"] - 1) for total in totals.values()) > 0.01:
        found.append(
            f"site {site}: strength is not proportional to 1 - s in this model (a norm after the branch), so the "
            "variants are of equal strength only nearly; the measured ones are in the table"
        )
    return found
