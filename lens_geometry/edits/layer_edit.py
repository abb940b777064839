"""What every edit of one layer's site shares: which vectors it changes, and how the change goes back into the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_geometry.anatomy import Anatomy, LayerFacts, n_vectors
from lens_geometry.edits.hooks import Collector, Hooks, tag
from lens_geometry.edits.noise import Batch
from lens_geometry.errors import HookError, SiteError
from lens_geometry.sites import Grouping, Site, choose_heads, group_heads, indices, ungroup_heads
from lens_geometry.slices import join_slices, split_carrier

Layers = int | str | slice | Iterable[int] | None
Heads = int | slice | Iterable[int] | None
Positions = int | slice | Iterable[int] | Bool[Tensor, "batch pos"] | None
EVERYWHERE = slice(None)


@dataclass(frozen=True)
class LayerEdit:
    """How one site of one layer is edited. An edit says what `change` it makes; the rest is here."""

    model: Any
    site: Site
    target: str
    where: str
    layer: int
    facts: LayerFacts
    heads: tuple[int, ...] | None
    positions: Any
    grouping: Grouping
    batch: Batch

    @property
    def idle(self) -> bool:
        """Whether it changes nothing by its settings; its hook is there, and leaves the activation alone."""
        return False

    @property
    def gated(self) -> bool:
        """Whether it may turn out to change nothing, which is then no fault."""
        return False

    @property
    def knows_place(self) -> bool:
        """Whether it has to know where in the sequence a token stands."""
        return not (self.positions is None or isinstance(self.positions, Tensor))

    @property
    def extra_reads(self) -> tuple[str, ...]:
        """Short names of hooks that are read beside the site's own."""
        return ()

    def hooks(self, reads: tuple[str, ...]) -> Hooks:
        """Readers of what the edit is made from, and the edit itself, in firing order."""
        collector = Collector(self.layer, () if self.idle else (*reads, *self.extra_reads), self.facts, self.model)

        def edit(tensor: Tensor, hook: Any) -> Tensor | None:
            acts = collector.take(self.target, tensor)
            return None if self.idle else self.edited(tensor, acts)

        return [*collector.readers(), (self.where, tag(edit, collector, must_change=not self.idle and not self.gated))]

    def edited(self, tensor: Tensor, acts: dict[str, Tensor]) -> Tensor:
        """The target's activation with the site's vectors changed where they are chosen."""
        if tensor.shape[1] == 1 and self.knows_place:
            raise HookError(
                "this pass is one token long: under a KV cache its position is not known",
                where=self.where,
                cure="generate with use_past_kv_cache=False, or leave positions and noise controls out",
            )
        places = self.places(tensor, acts)
        if not range(tensor.shape[1])[places]:
            return tensor
        update, reference = self.site.vectors(acts)
        if self.site.has_heads:
            update = group_heads(update, self.grouping, self.facts.n_kv_heads)
            reference = group_heads(reference, self.grouping, self.facts.n_kv_heads)
        change = self.selected(self.change(update, reference, acts), places)
        if self.site.has_heads:
            change = ungroup_heads(change, tensor.shape[2])
        change = self.site.merge(change, tensor)
        return (tensor.to(change.dtype) + change).to(tensor.dtype)

    def places(self, tensor: Tensor, acts: dict[str, Tensor]) -> slice:
        """The places of this pass that are edited, apart from `positions`."""
        return EVERYWHERE

    def change(self, update: Tensor, reference: Tensor, acts: dict[str, Tensor]) -> Tensor:
        """What is added to the update, [batch, pos, (group,) d]; nothing, where an edit does not say."""
        return torch.zeros_like(update)

    def inside(self, vectors: Tensor) -> Tensor:
        """Zero in the padding of the last slice: what is put there is dropped, and must not count as norm."""
        if not self.site.padded:
            return vectors
        return split_carrier(join_slices(vectors, self.facts.shapes[self.target][-1]), vectors.shape[-1])

    def chosen(self, vectors: Float[Tensor, "batch pos ..."], places: slice = EVERYWHERE) -> Bool[Tensor, ...]:
        """Which heads, positions and places are edited, in a shape that broadcasts against `vectors`."""
        shape = [1] * vectors.ndim
        keep = torch.ones(shape, dtype=torch.bool, device=vectors.device)
        if self.heads is not None:
            heads = torch.zeros(vectors.shape[2], dtype=torch.bool, device=vectors.device)
            heads[list(self.heads)] = True
            keep = keep & heads[:, None]
        if self.positions is not None:
            mask = position_mask(self.positions, vectors, self.where)
            keep = keep & mask.reshape(*mask.shape, *shape[2:])
        if places != EVERYWHERE:
            mask = torch.zeros(vectors.shape[1], dtype=torch.bool, device=vectors.device)
            mask[places] = True
            keep = keep & mask.reshape(-1, *shape[2:])
        return keep

    def selected(self, change: Tensor, places: slice = EVERYWHERE) -> Tensor:
        """Zero outside the chosen heads, positions and places."""
        if self.heads is None and self.positions is None and places == EVERYWHERE:
            return change
        return torch.where(self.chosen(change, places), change, change.new_zeros(()))


Edit = TypeVar("Edit", bound=LayerEdit)


def layer_edits(
    make: Callable[..., Edit],
    model: Any,
    anatomy: Anatomy,
    layers: tuple[int, ...],
    site: Site,
    *,
    heads: Heads = None,
    positions: Positions = None,
    grouping: Grouping = "each",
    batch: Batch | None = None,
) -> list[Edit]:
    """One edit per layer, made from what all edits have in common.

    Raises SiteError for heads that do not exist, and for heads or a grouping where the site has none.
    """
    if (heads is not None and not site.axis) or (grouping != "each" and not site.has_heads):
        what = "slices, which cannot be grouped" if site.axis else "no heads to select or group"
        raise SiteError(
            f"site {site.name!r} has {what}", cure="use 'value' or 'value_excl_self', or leave heads and grouping out"
        )
    if heads is not None and not isinstance(heads, slice):
        heads = indices(heads, site.axis, "give a slice or whole numbers")
    mask = isinstance(positions, Tensor) and positions.dtype == torch.bool
    if positions is not None and not mask and not isinstance(positions, slice):
        positions = indices(positions, "position", "give a slice, whole numbers, or a bool mask [batch, pos]")
    edits = []
    for layer in layers:
        facts = anatomy.layers[layer]
        groups = n_vectors(site, facts, grouping)
        edits.append(
            make(
                model=model,
                site=site,
                target=anatomy.target(site, layer),
                where=anatomy.where(site, layer),
                layer=layer,
                facts=facts,
                heads=None if heads is None else choose_heads(heads, groups, site.axis),
                positions=positions,
                grouping=grouping,
                batch=batch or Batch(),
            )
        )
    return edits


def position_mask(positions: Any, change: Float[Tensor, "batch pos ..."], where: str) -> Bool[Tensor, "batch pos"]:
    """Which tokens of a batch are meant. Raises HookError for a mask that does not fit and a place there is not."""
    batch, length = change.shape[:2]
    if isinstance(positions, Tensor):
        if positions.shape != (batch, length):
            raise HookError(
                f"a position mask of shape {tuple(positions.shape)} does not fit {(batch, length)}",
                where=where,
                cure="give one mask entry per token of the batch that is run",
            )
        return positions.to(change.device)
    mask = torch.zeros(batch, length, dtype=torch.bool, device=change.device)
    if isinstance(positions, slice):
        mask[:, positions] = True
        return mask
    for position in positions:
        if not -length <= position < length:
            raise HookError(
                f"there is no position {position} in a sequence of {length}",
                where=where,
                cure="choose positions inside the sequence that is run",
            )
        mask[:, position] = True
    return mask
