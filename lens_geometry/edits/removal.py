"""Hard removal of the attention map's diagonal: the blunt control beside `diagonal`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from lens_geometry.edits.diagonal import FORMS
from lens_geometry.edits.hooks import Hooks
from lens_geometry.edits.layer_edit import Heads, LayerEdit, Layers, Positions, layer_edits
from lens_geometry.edits.reach import require_map
from lens_geometry.errors import HookError, SiteError
from lens_geometry.gradients import WithoutDiagonal, without_diagonal


def remove_diagonal(
    model: Any,
    *,
    layers: Layers = None,
    heads: Heads = None,
    positions: Positions = None,
    renormalise: bool,
    keep_first: bool = True,
) -> Hooks:
    """A_tt = 0: no token attends to itself. The blunt control beside `diagonal`.

    Args:
        model: any TransformerLens model whose attention map can be edited.
        layers, heads, positions: which ones are edited; None is all.
        renormalise: divide the rest of the row by its sum, so that it sums to 1 as it did.
        keep_first: rows that have no other entry stay as they are: token 0, and the first real token after
            padding on the left. Without it such rows become zero, and there is nothing to renormalise.

    It needs no values, and so works under a KV cache too. Raises SiteError when the model's map cannot be edited,
    or for `renormalise` without `keep_first`; HookError, when run, for positions in a cached step.
    """
    if renormalise and not keep_first:
        raise SiteError(
            "a row whose only entry is removed has nothing left to renormalise",
            where="token 0",
            cure="use keep_first=True, or renormalise=False (such rows are zero then)",
        )
    anatomy, chosen = require_map(model, layers)
    make = partial(_Removal, renormalise=renormalise, keep_first=keep_first)
    edits = layer_edits(make, model, anatomy, chosen, FORMS["value"], heads=heads, positions=positions)
    return [hook for edit in edits for hook in edit.hooks(())]


@dataclass(frozen=True)
class _Removal(LayerEdit):
    """How the diagonal of one layer's map is removed."""

    renormalise: bool
    keep_first: bool

    def edited(self, tensor: Tensor, acts: dict[str, Tensor]) -> Tensor:
        queries, keys = tensor.shape[-2:]
        if queries != keys and self.positions is not None and not isinstance(self.positions, Tensor):
            raise HookError(
                f"this pass has {queries} queries for {keys} keys: under a KV cache its positions are not known",
                where=self.where,
                cure="generate with use_past_kv_cache=False, or leave positions out",
            )
        whole = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        chosen = None
        if self.heads is not None or self.positions is not None:
            everywhere = whole.new_ones(tensor.shape[0], queries, tensor.shape[1], 1)
            chosen = rearrange(self.selected(everywhere), "batch query head one -> batch head query one") != 0
        if torch.is_grad_enabled() and whole.requires_grad:
            found: Tensor = WithoutDiagonal.apply(whole, chosen, self.renormalise, self.keep_first)  # type: ignore[no-untyped-call]
        else:
            found = without_diagonal(whole, chosen, self.renormalise, self.keep_first)[0]
        return found.to(tensor.dtype)
