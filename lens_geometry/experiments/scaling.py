"""Which part of an update does the model need? Loss while one component is kept, shrunk, grown or turned round.

Every condition is compared with the unedited model on the same sequences, and stands beside controls that
change the activations as much without regard to the reference.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from lens_geometry.anatomy import inspect
from lens_geometry.edits import CONTROLS, Hooks, remove_diagonal, scale
from lens_geometry.errors import DataError, HookError, SiteError
from lens_geometry.experiments.columns import loss_columns, losses_in_words, status_counts
from lens_geometry.experiments.profile import available_sites
from lens_geometry.metrics import SequenceLosses
from lens_geometry.results import Result
from lens_geometry.runner import (
    Condition,
    RunSettings,
    check_effects,
    identity_of_run,
    prepare,
    provenance,
    run_conditions,
)
from lens_geometry.sites import SITES, Grouping, choose_layers

REMOVALS = {"diagonal_removal": False, "diagonal_removal_renormalised": True}
"""Controls of the value sites that set A_tt to 0, and whether the rest of the row is renormalised."""


@dataclass(frozen=True)
class ScalingSettings(RunSettings):
    """Settings of `scaling_sweep`.

    Attributes:
        sites: which updates are edited; sites that this model does not have are left out and named.
        layers: layer sets, each edited at once: "all", "4", "1-" (all but the first), "4-11", "0,3,6".
        grouping: value-space vectors by head ("each"), "kv_group" or "merged".
        parallel: retained scales of the parallel part, the perpendicular part kept.
        perpendicular: retained scales of the perpendicular part, the parallel part kept.
        controls: run beside the edit: "gain", "isotropic", "random_reference", "shuffled_reference"; on demand
            "matched_random_reference", and for value sites "diagonal_removal" and
            "diagonal_removal_renormalised" (no token attends to itself; one condition, at scale 0).
        control_scales: the scales at which the controls are run.
        skip_position_0: leave position 0 unedited (there the value site *is* its reference).
    """

    sites: tuple[str, ...] = ("attn", "mlp", "value", "value_excl_self")
    layers: tuple[str, ...] = ("all",)
    grouping: Grouping = "each"
    parallel: tuple[float, ...] = (-1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
    perpendicular: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
    controls: tuple[str, ...] = ("random_reference", "shuffled_reference", "isotropic", "gain")
    control_scales: tuple[float, ...] = (0.0, 0.5)
    skip_position_0: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("parallel", "perpendicular", "control_scales"):
            scales = getattr(self, name)
            if not isinstance(scales, tuple | list) or not all(isinstance(s, float | int) for s in scales):
                raise DataError(f"{name} is {scales!r}", cure=f"give a tuple of numbers, such as {name}=(0.0, 0.5)")
        if isinstance(self.layers, str):
            raise DataError(
                f"layers is the text {self.layers!r}", cure=f"give a tuple of layer sets: ({self.layers!r},)"
            )
        for text in self.layers:
            if not isinstance(text, str):
                cure = 'write it as text: "all", "4", "1-", "4-11" or "0,3,6"'
                raise SiteError(f"{text!r} names no layer set", cure=cure)


@dataclass(frozen=True)
class _Cell:
    """One condition of the sweep."""

    site: str
    layers: str
    control: str
    component: str
    scale: float

    @property
    def key(self) -> str:
        if self.control == "none" and self.scale == 1.0:  # the same edit for both components
            return f"{self.site} {self.layers} no-op"
        if self.control in REMOVALS:  # the same edit for both value sites
            return f"{self.layers} {self.control}"
        return f"{self.site} {self.layers} {self.control} {self.component} {self.scale!r}"

    @property
    def parallel(self) -> float:
        return self.scale if self.component == "parallel" else 1.0

    @property
    def perpendicular(self) -> float:
        return self.scale if self.component == "perpendicular" else 1.0


def scaling_sweep(
    model: Any,
    data: Any,
    settings: ScalingSettings | None = None,
    *,
    out: Path | str | None = None,
    **changes: Any,
) -> Result:
    """Sweep the retained scale of the parallel and of the perpendicular part over sites and layer sets.

    Args:
        model: any TransformerLens model.
        data: a Text, a string, a list of strings, or token ids [sequence, pos].
        settings: see `ScalingSettings`; `changes` override single fields.
        out: a directory for the journal: each finished condition is written there, and the same call started
            again goes on where it was.

    Returns:
        A Result with one row per condition: loss (nats per token), perplexity, and their change against the
        unedited model on the same tokens, with 95 % intervals by paired bootstrap over sequences. A condition
        whose losses are not all finite has status "nonfinite" and counts them; its loss is over the rest. One that
        changed no loss by a bit though it should have has status "no_effect" (a layer whose update is zero).

    Raises:
        ModelError, DataError, SiteError for what cannot be used; HookError when an edit does not reach the
        output or the no-op changes a bit; ResultError when the journal is of something else.
    """
    settings, started = replace(settings or ScalingSettings(), **changes), time.monotonic()
    tokens = prepare(model, data, settings)
    sites, left_out = available_sites(model, settings.sites, editing=True)
    layer_sets = {text: choose_layers(text, inspect(model).n_layers) for text in settings.layers}
    possible, without = _removable(model, settings, sites, layer_sets)
    left_out += without
    cells = list(dict.fromkeys(_cells(possible, sites)))
    check_effects(model, sites, {layers[0] for layers in layer_sets.values()})
    positions = slice(1, None) if settings.skip_position_0 else None

    def condition(cell: _Cell) -> Condition:
        if cell.control in REMOVALS:
            hooks = partial(_removal, model, cell.control, layer_sets[cell.layers], positions)
            return Condition(cell.key, lambda batch: hooks())
        make = partial(
            scale,
            model,
            cell.site,
            parallel=cell.parallel,
            perpendicular=cell.perpendicular,
            layers=layer_sets[cell.layers],
            positions=positions,
            grouping=settings.grouping if SITES[cell.site].has_heads else "each",
            control=cell.control,  # type: ignore[arg-type]
            seed=settings.seed,
        )
        return Condition(cell.key, lambda batch: make(batch=batch), first_layer=layer_sets[cell.layers][0])

    journal = None if out is None else Path(out) / "journal.jsonl"
    losses = run_conditions(
        model,
        tokens,
        list({cell.key: condition(cell) for cell in cells}.values()),
        settings,
        journal=journal,
        about=None if journal is None else identity_of_run(model, tokens, settings),
    )
    base = losses["base"]
    table = pd.DataFrame([_row(cell, losses[cell.key], base, settings) for cell in cells])
    moved = table[(table["scale"] == 1.0) & (table["loss_change"] != 0.0)]
    if len(moved):
        message = f"the no-op changes the loss by up to {moved['loss_change'].abs().max():.2g} nats"
        if next(model.parameters()).device.type == "cpu":
            raise HookError(message, cure="report this: an edit with both scales at 1 must change no bit")
        left_out.append(f"{message}: this device does not repeat a forward pass to the last bit")
    idle = table[table["status"] == "no_effect"]
    if len(idle):
        where = ", ".join(dict.fromkeys(f"{row.site} ({row.layers})" for row in idle.itertuples()))
        left_out.append(f"{len(idle)} conditions changed no loss by a bit, at {where}: is the update zero there?")
    for warning in left_out:
        warnings.warn(warning, stacklevel=2)
    meta = provenance(
        model,
        tokens,
        settings,
        started=started,
        token_mask=losses_in_words(settings.skip_position_0),
        counts=status_counts(table),
    )
    meta["warnings"] += left_out
    return Result("scaling_sweep", table, meta)


def _cells(settings: ScalingSettings, sites: tuple[str, ...]) -> Iterator[_Cell]:
    """Every condition, the no-op of each site among them."""
    unknown = set(settings.controls) - {*CONTROLS, *REMOVALS}
    if unknown:
        known = ", ".join((*CONTROLS, *REMOVALS))
        raise SiteError(f"there is no control {sorted(unknown)}", cure=f"choose among {known}")
    if not settings.parallel and not settings.perpendicular:
        raise DataError("the grid is empty", cure="give scales for parallel or perpendicular")
    for layers in settings.layers:
        for site in sites:
            for component in ("parallel", "perpendicular"):
                for number in sorted({*getattr(settings, component), 1.0}):
                    yield _Cell(site, layers, "none", component, number)
            for control in settings.controls:
                if control in REMOVALS:
                    if SITES[site].has_heads:
                        yield _Cell(site, layers, control, "parallel", 0.0)
                    continue
                # gain has no component; one along a random or shuffled reference is compared with the parallel part
                for component in ("parallel", "perpendicular") if control == "isotropic" else ("parallel",):
                    for number in settings.control_scales:
                        yield _Cell(site, layers, control, component, number)


def _removal(model: Any, control: str, layers: Any, positions: slice | None) -> Hooks:
    return remove_diagonal(model, layers=layers, positions=positions, renormalise=REMOVALS[control])


def _removable(
    model: Any, settings: ScalingSettings, sites: tuple[str, ...], layer_sets: dict[str, tuple[int, ...]]
) -> tuple[ScalingSettings, list[str]]:
    """The settings without removals of the diagonal where this model's map cannot be edited, and why."""
    wanted = [control for control in settings.controls if control in REMOVALS]
    if not wanted:
        return settings, []
    if not any(SITES[site].has_heads for site in sites):
        raise SiteError(
            f"{wanted[0]} is a control of the value sites", cure="add the site 'value' or 'value_excl_self'"
        )
    try:
        for layers in layer_sets.values():
            _removal(model, wanted[0], layers, None)
    except SiteError as error:
        kept = tuple(control for control in settings.controls if control not in REMOVALS)
        return replace(settings, controls=kept), [f"{', '.join(wanted)} left out: {error.problem}"]
    return settings, []


def _row(cell: _Cell, found: SequenceLosses, base: SequenceLosses, settings: ScalingSettings) -> dict[str, Any]:
    return {
        "site": cell.site,
        "layers": cell.layers,
        "grouping": settings.grouping if SITES[cell.site].has_heads else "each",
        "control": cell.control,
        "component": cell.component,
        "scale": cell.scale,
        "parallel": cell.scale if cell.control == "gain" else cell.parallel,
        "perpendicular": cell.scale if cell.control == "gain" else cell.perpendicular,
        **loss_columns(found, base, seed=settings.seed, edited=cell.scale != 1.0),
    }
