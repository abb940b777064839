"""How strong is an edit where it acts? What it changes of the branch that is added, beside what it does to the loss.

An edit that costs little may be one that the model is robust to, or one that hardly changes anything. Strength is
measured after W_O (or W_out), layer by layer, with the layer's input as the unedited model has it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from lens_geometry.anatomy import at_rest, attached, inspect
from lens_geometry.edits import Batch, Hooks, scale
from lens_geometry.errors import DataError, SiteError
from lens_geometry.experiments.columns import loss_columns, status_counts
from lens_geometry.experiments.profile import available_sites
from lens_geometry.metrics import SequenceLosses
from lens_geometry.results import Result
from lens_geometry.runner import (
    Condition,
    RunSettings,
    bar,
    batches,
    check_effects,
    identity_of_run,
    prepare,
    provenance,
    run_conditions,
)
from lens_geometry.sites import HOOKS, SITES, Grouping, Site, choose_layers, token_mask
from lens_geometry.stats import bootstrap_interval

STRENGTHS = ("change_over_branch", "change_energy", "norm_ratio")


@dataclass(frozen=True)
class StrengthSettings(RunSettings):
    """Settings of `applied_strength`.

    Attributes:
        sites: which updates are edited; sites that this model does not have are left out and named.
        layers: which layers, each edited by itself, then all of them at once: "all", "4", "1-", "4-11", "0,3,6".
        grouping: value-space vectors by head ("each"), "kv_group" or "merged".
        parallel: retained scales of the parallel part, the perpendicular part kept.
        perpendicular: retained scales of the perpendicular part, the parallel part kept.
        exclude_positions: token positions left out of the strengths; 0 is degenerate in value space. They are edited.
    """

    sites: tuple[str, ...] = ("attn", "mlp", "value", "value_excl_self")
    layers: str = "all"
    grouping: Grouping = "each"
    parallel: tuple[float, ...] = (0.0,)
    perpendicular: tuple[float, ...] = (0.0,)
    exclude_positions: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class _Edit:
    """One site scaled one way; the layers are chosen when it is made."""

    site: str
    component: str
    scale: float

    def key(self, layer: int | None) -> str:
        return f"{self.site} {self.component} {self.scale!r} {'all' if layer is None else f'layer {layer}'}"


def applied_strength(
    model: Any, data: Any, settings: StrengthSettings | None = None, *, out: Path | str | None = None, **changes: Any
) -> Result:
    """How much each edit changes the branch it acts in, layer by layer, beside the change of loss.

    With y the branch's output (`hook_attn_out` for attention and value space, `hook_mlp_out` for the MLP, the block's
    whole update for `block`) and y' the same with this one layer edited and clean inputs:

        change_over_branch = |y' - y| / |y|      change_energy = its square      norm_ratio = |y'| / |y|

    Args:
        model: any TransformerLens model.
        data: a Text, a string, a list of strings, or token ids [sequence, pos].
        settings: see `StrengthSettings`; `changes` override single fields.
        out: a directory for the journal: the same call started again goes on where it was.

    Returns:
        A Result with one row per site, component, scale and layer: the three strengths (means over tokens, 95 %
        intervals by bootstrap over sequences), and the loss with only that layer edited. `layer` is missing in the row
        of all layers edited at once; its strengths are the means over layers of the local ones. `n_undefined` counts
        tokens whose branch is zero; they are left out. `loss_per_strength` is loss_change / change_over_branch.

    Raises:
        ModelError, DataError, SiteError for what cannot be used; HookError when an edit does not reach the output;
        ResultError when the journal is of something else.
    """
    settings, started = replace(settings or StrengthSettings(), **changes), time.monotonic()
    tokens = prepare(model, data, settings)
    sites, left_out = available_sites(model, settings.sites, editing=True)
    layers = choose_layers(settings.layers, inspect(model).n_layers)
    edits = [
        _Edit(site, component, number)
        for site in sites
        for component in ("parallel", "perpendicular")
        for number in getattr(settings, component)
        if number != 1.0
    ]
    if not edits:
        raise DataError("nothing is edited", cure="give scales other than 1 for parallel or perpendicular")
    scored = token_mask(tokens.counted, exclude=settings.exclude_positions)
    if not scored.any():
        raise SiteError("no token is left to measure", cure="use longer sequences or exclude fewer positions")
    check_effects(model, sites, layers[:1])

    def hooks(edit: _Edit, chosen: tuple[int, ...], batch: Batch | None = None) -> Hooks:
        scales: dict[str, Any] = {edit.component: edit.scale}
        grouping = settings.grouping if SITES[edit.site].has_heads else "each"
        return scale(model, edit.site, layers=chosen, grouping=grouping, batch=batch, **scales)

    conditions = [
        Condition(edit.key(layer), partial(hooks, edit, chosen), first_layer=chosen[0])
        for edit in edits
        for layer, chosen in [*((layer, (layer,)) for layer in layers), (None, layers)]
    ]
    strengths = branch_strengths(
        model, tokens, {edit: (SITES[edit.site], hooks(edit, layers)) for edit in edits}, layers, scored, settings
    )
    journal = None if out is None else Path(out) / "journal.jsonl"
    about = None if journal is None else identity_of_run(model, tokens, settings)
    losses = run_conditions(model, tokens, conditions, settings, journal=journal, about=about)
    table = pd.DataFrame([row for edit in edits for row in _rows(edit, layers, strengths[edit], losses, settings)])
    table["layer"] = table["layer"].astype("Int64")
    for warning in left_out:
        warnings.warn(warning, stacklevel=2)
    meta = provenance(
        model,
        tokens,
        settings,
        started=started,
        token_mask="losses of real tokens; strengths of real tokens, positions "
        f"{list(settings.exclude_positions)} left out; every position is edited",
        counts={**status_counts(table), "undefined": int(table["n_undefined"].sum())},
    )
    meta["warnings"] += left_out
    return Result("applied_strength", table, meta)


@dataclass(frozen=True)
class LayerStrength:
    """The strengths of one edit in one layer: sums over tokens by sequence, and what was left out."""

    sums: NDArray[np.float64]  # [sequence, strength]
    counts: NDArray[np.int64]  # [sequence]
    undefined: int

    def mean(self, name: str) -> float:
        """The mean over tokens of one of `STRENGTHS`; 0 where no token has one."""
        return float(self.sums[:, STRENGTHS.index(name)].sum() / max(1, self.counts.sum()))


def branch_hook(site: Site) -> str:
    """The short name of the hook after the matrix that writes to the stream."""
    if site.has_heads or site.name == "attn":
        return "attn_out"
    if site.name.startswith("mlp"):
        return "mlp_out"
    if site.name == "block":
        return "resid_post"
    raise SiteError(f"site {site.name!r} is no branch that adds to the stream", cure="choose attn, mlp, block or value")


def branch_strengths(
    model: Any,
    tokens: Any,
    edits: Mapping[Any, tuple[Site, Hooks]],
    layers: tuple[int, ...],
    scored: Bool[Tensor, "sequence pos"],
    settings: RunSettings,
) -> dict[Any, dict[int, LayerStrength]]:
    """What edits (hooks of one site at `layers`) change of each layer's branch, every layer with clean inputs.

    One pass for each edit measures all layers: behind each edited branch its unedited output is put back.
    """
    names = {branch_hook(site) for site, _ in edits.values()}
    found: dict[Any, dict[int, list[tuple[Tensor, Tensor, Tensor]]]] = {edit: {i: [] for i in layers} for edit in edits}
    total = (1 + len(edits)) * -(-len(tokens.ids) // settings.batch_size)
    with at_rest(model), bar(total, "strengths", settings.progress) as progress:
        for rows, ids, _ in batches(model, tokens, settings.batch_size):
            mask, clean = scored[rows.start : rows.stop], dict[tuple[str, int], Tensor]()
            with attached(model, _keepers(clean, {*names, *(["resid_pre"] if "resid_post" in names else [])}, layers)):
                model(ids, stop_at_layer=layers[-1] + 1)
            progress.update()
            for edit, (site, hooks) in edits.items():
                measures = _measures(clean, branch_hook(site), layers, mask, found[edit])
                with attached(model, [*hooks, *measures]):
                    model(ids, stop_at_layer=layers[-1] + 1)
                progress.update()
    return {
        edit: {
            layer: LayerStrength(
                torch.cat([sums for sums, _, _ in parts]).numpy(),
                torch.cat([counts for _, counts, _ in parts]).numpy(),
                int(sum(undefined for _, _, undefined in parts)),
            )
            for layer, parts in by_layer.items()
        }
        for edit, by_layer in found.items()
    }


def _keepers(clean: dict[tuple[str, int], Tensor], names: set[str], layers: tuple[int, ...]) -> Hooks:
    def keeper(name: str, layer: int) -> Callable[..., None]:
        return lambda tensor, hook: clean.update({(name, layer): tensor.detach()})

    return [(HOOKS[name].format(layer), keeper(name, layer)) for layer in layers for name in sorted(names)]


def _measures(
    clean: dict[tuple[str, int], Tensor],
    name: str,
    layers: tuple[int, ...],
    mask: Tensor,
    found: dict[int, list[tuple[Tensor, Tensor, Tensor]]],
) -> Hooks:
    """Hooks that compare a branch with its unedited output and put that back."""

    def measure(layer: int) -> Callable[..., Tensor]:
        def compare(tensor: Tensor, hook: Any) -> Tensor:
            before = clean[name, layer]
            base = clean["resid_pre", layer] if name == "resid_post" else torch.zeros_like(before)
            working = torch.promote_types(before.dtype, torch.float32)
            branch, edited = (x.to(working) - base.to(working) for x in (before, tensor))
            size = branch.norm(dim=-1)
            change = (edited - branch).norm(dim=-1) / size
            strengths = torch.stack([change, change.square(), edited.norm(dim=-1) / size], -1).cpu().double()
            defined = mask & (size > 0).cpu()
            kept = torch.where(defined[..., None], strengths, 0.0)
            found[layer].append((kept.sum(1), defined.sum(1), (mask & ~defined).sum()))
            return before

        return compare

    return [(HOOKS[name].format(layer), measure(layer)) for layer in layers]


def _rows(
    edit: _Edit,
    layers: tuple[int, ...],
    strengths: dict[int, LayerStrength],
    losses: dict[str, SequenceLosses],
    settings: StrengthSettings,
) -> Iterator[dict[str, Any]]:
    """A row for each layer edited alone, and one for all of them at once."""
    for layer in (None, *layers):
        chosen = [strengths[i] for i in (layers if layer is None else (layer,))]
        sums, counts = np.sum([one.sums for one in chosen], 0), np.sum([one.counts for one in chosen], 0)
        columns: dict[str, Any] = {}
        for number, name in enumerate(STRENGTHS):
            samples = [sums[:, number], counts.astype(np.float64)]
            low, high = bootstrap_interval(samples, _mean, seed=settings.seed)
            columns |= {name: float(_mean(samples[0], samples[1], 0)), f"{name}_low": low, f"{name}_high": high}
        loss = loss_columns(losses[edit.key(layer)], losses["base"], seed=settings.seed, perplexity=False)
        yield {
            "site": edit.site,
            "grouping": settings.grouping if SITES[edit.site].has_heads else "each",
            "component": edit.component,
            "scale": edit.scale,
            "layer": layer,
            **columns,
            "n_undefined": sum(one.undefined for one in chosen),
            **loss,
            "loss_per_strength": loss["loss_change"] / columns["change_over_branch"]
            if columns["change_over_branch"]
            else float("nan"),
        }


def _mean(sums: Any, counts: Any, axis: int) -> Any:
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums.sum(axis) / counts.sum(axis)
