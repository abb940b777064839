"""Which heads carry the effect? One head edited at a time, all heads of a layer at once, and the sum of singles.

Exactly: every head of every layer in a run of its own that starts at the layer's stored stream. To first order: the
gradient of the loss by each head's scale, all heads and layers in one backward pass.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from lens_geometry.anatomy import at_rest, attached, inspect, n_groups
from lens_geometry.edits import Batch, Hooks, scale
from lens_geometry.errors import DataError, SiteError
from lens_geometry.experiments.columns import loss_columns, losses_in_words, status_counts
from lens_geometry.experiments.profile import available_sites
from lens_geometry.metrics import SequenceLosses, scored_losses, token_losses
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
from lens_geometry.sites import SITES, Grouping, choose_layers
from lens_geometry.stats import resampled_interval

METHODS = ("exact", "first_order")


@dataclass(frozen=True)
class HeadSettings(RunSettings):
    """Settings of `head_sweep`.

    Attributes:
        sites: value-space sites; one that this model does not have is left out and named.
        layers: which layers are swept: "all", "4", "1-", "4-11", "0,3,6".
        groupings: what counts as a head: "each" query head, "kv_group" (the query heads of one KV head, their
            vectors concatenated), "merged" (all heads of a layer as one vector). Several are compared in one table.
        parallel: the retained scale of the edited heads' parallel part.
        perpendicular: the retained scale of their perpendicular part.
        method: "exact" (a run per head), "first_order" (one backward pass for all), or "both".
        skip_position_0: leave position 0 unedited.
    """

    sites: tuple[str, ...] = ("value_excl_self",)
    layers: str = "all"
    groupings: tuple[Grouping, ...] = ("each",)
    parallel: float = 0.0
    perpendicular: float = 1.0
    method: Literal["both", "exact", "first_order"] = "both"
    skip_position_0: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parallel == 1.0 and self.perpendicular == 1.0:
            raise DataError("both scales are 1, which edits nothing", cure="give another parallel or perpendicular")
        if self.method not in ("both", *METHODS):
            raise DataError(f"there is no method {self.method!r}", cure="choose exact, first_order or both")


@dataclass(frozen=True)
class _Heads:
    """The heads (groups) of one layer at one site under one grouping; `numbers` is empty where they are one vector."""

    site: str
    grouping: Grouping
    layer: int
    numbers: tuple[int, ...]

    def key(self, head: int | None) -> str:
        return f"{self.site} {self.grouping} layer {self.layer} {'all heads' if head is None else f'head {head}'}"


def head_sweep(
    model: Any, data: Any, settings: HeadSettings | None = None, *, out: Path | str | None = None, **changes: Any
) -> Result:
    """Change of loss when one head is edited, for every head, beside all heads of the layer and the sum of singles.

    Args:
        model: any TransformerLens model.
        data: a Text, a string, a list of strings, or token ids [sequence, pos].
        settings: see `HeadSettings`; `changes` override single fields.
        out: a directory for the journal: the same call started again goes on where it was.

    Returns:
        A Result with one row per site, grouping, layer, `kind` ("single" with its `head`, "all" heads of the layer at
        once, "sum_of_singles") and `method` ("exact", "first_order"): loss_change in nats per token with a 95 %
        interval by paired bootstrap over sequences, `status` as in `scaling_sweep`. `meta["agreement"]` has, where
        both methods were run, the rank correlation of single heads' effects between them, with its interval. The
        first-order effect is (s_par - 1) dL/ds_par + (s_perp - 1) dL/ds_perp at the unedited model.

    Raises:
        ModelError, DataError, SiteError for what cannot be used; HookError when an edit does not reach the output;
        ResultError when the journal is of something else.
    """
    settings, started = replace(settings or HeadSettings(), **changes), time.monotonic()
    without = [site for site in settings.sites if site in SITES and not SITES[site].has_heads]
    if without:
        raise SiteError(f"site {without[0]!r} has no heads", cure="use 'value' or 'value_excl_self'")
    tokens = prepare(model, data, settings)
    sites, left_out = available_sites(model, settings.sites, editing=True)
    anatomy = inspect(model)
    layers = choose_layers(settings.layers, anatomy.n_layers)
    places = [
        _Heads(site, grouping, layer, tuple(range(groups)) if groups > 1 else ())
        for site in sites
        for grouping in dict.fromkeys(settings.groupings)
        for layer in layers
        for groups in [n_groups(anatomy.layers[layer], grouping)]
    ]
    check_effects(model, sites, layers[:1])
    losses: dict[str, dict[str, SequenceLosses]] = {}
    if settings.method != "first_order":
        together = max(1, settings.batch_size // len(tokens.ids))  # edits side by side, where sequences are few
        conditions = [one for place in places for one in _conditions(model, place, settings, together)]
        journal = None if out is None else Path(out) / "journal.jsonl"
        about = None if journal is None else identity_of_run(model, tokens, settings)
        losses["exact"] = run_conditions(model, tokens, conditions, settings, journal=journal, about=about)
    if settings.method != "exact":
        losses["first_order"] = _first_order(model, tokens, places, settings)
    rows = [row for method in losses for place in places for row in _rows(place, losses[method], method, settings)]
    table = pd.DataFrame(rows)
    table["head"] = table["head"].astype("Int64")
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
    meta["agreement"] = _agreement(places, losses, settings) if len(losses) == 2 else []
    meta["warnings"] += left_out
    return Result("head_sweep", table, meta)


def _conditions(model: Any, place: _Heads, settings: HeadSettings, together: int) -> Iterator[Condition]:
    """All heads of a layer at once, then single ones, `together` at a time."""

    def hooks(batch: Batch, heads: tuple[int, ...] | None) -> Hooks:
        scales: dict[str, Any] = {"parallel": settings.parallel, "perpendicular": settings.perpendicular}
        if heads is not None and len(heads) > 1:
            scales = {name: _a_head_per_copy(number, heads, len(place.numbers)) for name, number in scales.items()}
        return scale(
            model,
            place.site,
            layers=place.layer,
            heads=heads if heads is not None and len(heads) == 1 else None,
            positions=slice(1, None) if settings.skip_position_0 else None,
            grouping=place.grouping,
            batch=batch,
            **scales,
        )

    yield Condition(place.key(None), lambda batch: hooks(batch, None), first_layer=place.layer)
    for start in range(0, len(place.numbers), together):
        heads = place.numbers[start : start + together]
        keys = tuple(place.key(head) for head in heads)
        yield Condition(keys, lambda batch, heads=heads: hooks(batch, heads), first_layer=place.layer)  # type: ignore[misc]


def _a_head_per_copy(number: float, heads: tuple[int, ...], n_heads: int) -> Callable[[Tensor], Tensor]:
    """A scale that is `number` for one head in each of the copies that a batch holds, and 1 elsewhere."""

    def scales(stream: Tensor) -> Tensor:
        per_copy = len(stream) // len(heads)
        working = torch.promote_types(stream.dtype, torch.float32)
        found = torch.ones(*stream.shape[:2], n_heads, device=stream.device, dtype=working)
        for copy, head in enumerate(heads):
            found[copy * per_copy : (copy + 1) * per_copy, :, head] = number
        return found

    return scales


def _first_order(model: Any, tokens: Any, places: list[_Heads], settings: HeadSettings) -> dict[str, SequenceLosses]:
    """Losses as the gradient predicts them: one backward pass per batch, site and grouping for all heads."""
    found: dict[str, SequenceLosses] = {}
    groups: dict[tuple[str, Grouping], list[_Heads]] = {}
    for place in places:
        groups.setdefault((place.site, place.grouping), []).append(place)
    total = len(groups) * -(-len(tokens.ids) // settings.batch_size)
    with at_rest(model), _frozen(model), bar(total, "gradients", settings.progress) as progress:
        for (site, grouping), members in groups.items():
            losses, effects = [], []
            for rows, ids, mask in batches(model, tokens, settings.batch_size):
                counted = None if tokens.scored is None else tokens.scored[rows.start : rows.stop]
                scored = scored_losses(mask, counted)
                sums, counts, effect = _gradients(model, ids, scored, site, grouping, members, settings)
                losses.append((sums, counts))
                effects.append(effect)
                progress.update()
            base, counts = (np.concatenate(arrays) for arrays in zip(*losses, strict=True))
            effect = np.concatenate(effects)  # [sequence, layer, group]
            found["base"] = SequenceLosses(base, counts, np.zeros_like(counts))
            for place in members:
                of_layer = effect[:, place.layer]
                for head in (None, *place.numbers):
                    change = of_layer.sum(1) if head is None else of_layer[:, head]
                    lost = np.where(np.isfinite(change), 0, counts)
                    found[place.key(head)] = SequenceLosses(base + np.nan_to_num(change), counts, lost)
    return found


def _gradients(
    model: Any,
    ids: Tensor,
    scored: Tensor,
    site: str,
    grouping: Grouping,
    members: list[_Heads],
    settings: HeadSettings,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """Of one batch: summed loss and scored tokens by sequence, and the first-order effect [sequence, layer, group]."""
    anatomy = inspect(model)
    width = max(n_groups(anatomy.layers[place.layer], grouping) for place in members)
    shape = (anatomy.n_layers, len(ids), 1, width)
    scales = [torch.ones(shape, device=ids.device, requires_grad=True) for _ in range(2)]
    hooks = scale(
        model,
        site,
        parallel=scales[0],
        perpendicular=scales[1],
        layers=[place.layer for place in members],
        positions=slice(1, None) if settings.skip_position_0 else None,
        grouping=grouping,
    )
    with torch.enable_grad(), attached(model, hooks):
        losses = token_losses(model(ids, return_type="logits"), ids)
        sums = torch.where(scored, losses, losses.new_zeros(())).double().sum(1)
        by_parallel, by_perpendicular = torch.autograd.grad(sums.sum(), scales)
    effect = (settings.parallel - 1) * by_parallel + (settings.perpendicular - 1) * by_perpendicular
    by_sequence = effect[:, :, 0].double().transpose(0, 1)
    return sums.detach().cpu().numpy(), scored.sum(1).cpu().numpy(), by_sequence.cpu().numpy()


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """No gradients of the weights inside: only those of the scales are wanted."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _rows(
    place: _Heads, losses: dict[str, SequenceLosses], method: str, settings: HeadSettings
) -> Iterator[dict[str, Any]]:
    """Single heads, the layer's sum of them, and (where it was run) all heads at once."""
    base = losses["base"]
    singles = [losses[place.key(head)] for head in place.numbers]
    kinds: list[tuple[str, int | None, SequenceLosses]] = [
        ("single", head, found) for head, found in zip(place.numbers, singles, strict=True)
    ]
    if singles:
        changes = sum((found.sums - base.sums for found in singles), np.zeros_like(base.sums))
        lost = np.maximum.reduce([found.nonfinite for found in singles])
        kinds.append(("sum_of_singles", None, SequenceLosses(base.sums + changes, base.counts, lost)))
    if method == "exact" or not singles:  # to first order, all heads at once are the sum of singles
        kinds.append(("all", None, losses[place.key(None)]))
    for kind, head, found in kinds:
        yield {
            "site": place.site,
            "grouping": place.grouping,
            "layer": place.layer,
            "head": head,
            "kind": kind,
            "method": method,
            "parallel": settings.parallel,
            "perpendicular": settings.perpendicular,
            **loss_columns(found, base, seed=settings.seed, perplexity=False),
        }


def _agreement(
    places: list[_Heads], losses: dict[str, dict[str, SequenceLosses]], settings: HeadSettings
) -> list[dict[str, Any]]:
    """Per site and grouping: Spearman's correlation over single heads of the exact and the first-order effects."""
    found = []
    for site, grouping in dict.fromkeys((place.site, place.grouping) for place in places):
        keys = [
            place.key(head)
            for place in places
            if (place.site, place.grouping) == (site, grouping)
            for head in place.numbers
            if not any(losses[method][place.key(head)].nonfinite.any() for method in METHODS)
        ]
        if len(keys) < 3:
            continue
        effects = [np.stack([losses[m][key].sums - losses[m]["base"].sums for key in keys], 1) for m in METHODS]

        def correlation(sequences: Any = slice(None), effects: Any = effects) -> float:
            exact, first_order = (effect[sequences].sum(0) for effect in effects)
            return float(stats.spearmanr(exact, first_order).statistic)

        low, high = resampled_interval(len(effects[0]), correlation, seed=settings.seed)
        found.append(
            {
                "site": site,
                "grouping": grouping,
                "heads": len(keys),
                "spearman": correlation(),
                "spearman_low": low,
                "spearman_high": high,
            }
        )
    return found
