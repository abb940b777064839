"""The diagonal view: component scaling written on the attention map, where nothing but A_tt changes.

In value space a head's output is a sum of values, the token's own among them. What scaling along that own value
adds can therefore be said as a change of one number per token and head, the weight of the token's own message:

| site | change of A_tt | what it does |
|---|---|---|
| `value` | (s_par - 1) <o_t, v_t> / abs(v_t)^2 | exactly the edit of hook_z: the same logits |
| `value_excl_self` | (s_par - 1) <c_t, v_t> / abs(v_t)^2 | likewise exact; c_t = o_t - A_tt v_t |
| `attn` | (s_par - 1) <y_t, h_t> / <W_O v_t, h_t>, one number for all heads | only <y', h> = s_par <y, h> |
| `attn_per_head` | the same for every head's own W_O o_t and W_O v_t, without b_O | only that product, head by head |

y is what attention adds to the stream (b_O included), h the stream before it, W_O v_t the sum over heads.
Rows are not renormalised. Arithmetic is in float32 at least, with one cast to the pattern's dtype: in bfloat16
or float16 A_tt itself is rounded, which the edit of hook_z is spared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from lens_geometry.edits.hooks import Collector, Hooks, tag
from lens_geometry.edits.layer_edit import Heads, Layers, Positions, layer_edits
from lens_geometry.edits.reach import require_map
from lens_geometry.edits.scaling import Scale, ScaledEdit, checked_scale, scale_values
from lens_geometry.errors import HookError, SiteError
from lens_geometry.geometry import diagonal_change, message_change
from lens_geometry.sites import (
    Activations,
    Grouping,
    Site,
    expand_kv,
    group_heads,
    self_weight,
    ungroup_heads,
)
from lens_geometry.weights import attention_output

DiagonalSite = Literal["value", "value_excl_self", "attn", "attn_per_head"]
DIAGONAL_SITES: tuple[DiagonalSite, ...] = get_args(DiagonalSite)

DiagonalVisit = Callable[[int, Tensor, Tensor], None]


def diagonal(
    model: Any,
    site: str,
    *,
    parallel: Scale = 1.0,
    layers: Layers = None,
    heads: Heads = None,
    positions: Positions = None,
    grouping: Grouping = "each",
) -> Hooks:
    """Component scaling at `site` as a change of the attention map's diagonal, off-diagonal entries fixed.

    Args:
        model: any TransformerLens model whose attention map can be edited.
        site: "value", "value_excl_self", "attn" or "attn_per_head", see the table above. "attn" is one number
            per layer and token, not a map of heads; where <W_O v_t, h_t> is near zero it is huge, and it is
            never clipped: `observe_diagonal` shows it.
        parallel: the retained scale, as in `scale`; 1 changes no bit.
        layers, heads, positions: which ones are edited; None is all. "attn" has no heads to choose.
        grouping: as in `scale`, for "value" and "value_excl_self": heads of a group share their change.

    Returns hooks on hook_pattern (and readers), in firing order.
    Raises SiteError when the model's map cannot be edited, or what attention adds is not z W_O + b_O ("attn");
    GeometryError for scales that do not fit; HookError, when run, under a KV cache (the values of earlier tokens
    are not shown) and where no finite change of A_tt does it.
    """
    edits = _edits(model, site, parallel, layers, heads, positions, grouping)
    return [hook for edit in edits for hook in edit.hooks(edit.site.reads)]


def observe_diagonal(
    model: Any,
    site: str,
    visit: DiagonalVisit,
    *,
    parallel: Scale = 0.0,
    layers: Layers = None,
    grouping: Grouping = "each",
) -> Hooks:
    """Hooks that call `visit(layer, weight, change)` for what `diagonal` would do, and change nothing.

    `weight` is A_tt, [batch, pos, head]; `change` is what would be added to it, of the same shape, or
    [batch, pos, 1] for the layer-level number of "attn". It is infinite where no weight would do.
    Raises as `diagonal` does.
    """
    edits = _edits(model, site, parallel, layers, None, None, grouping)
    return [hook for edit in edits for hook in edit.watching(visit)]


def _edits(
    model: Any, site: str, parallel: Any, layers: Any, heads: Any, positions: Any, grouping: Grouping
) -> list[_DiagonalEdit]:
    if site not in FORMS:
        raise SiteError(f"there is no diagonal form of {site!r}", cure=f"choose one of {', '.join(DIAGONAL_SITES)}")
    form, residual = FORMS[site], site not in ("value", "value_excl_self")
    if not form.has_heads and heads is not None:
        raise SiteError(
            f"the diagonal form of {site!r} is one number for all heads",
            cure="leave heads out, or use 'attn_per_head', which is another edit",
        )
    if residual and grouping != "each":
        raise SiteError(f"the diagonal form of {site!r} has no head groups", cure="leave grouping out")
    anatomy, chosen = require_map(model, layers, output=residual)
    scale = checked_scale(parallel, anatomy.n_layers, form)
    make = partial(
        _DiagonalEdit, parallel=scale, perpendicular=1.0, output=partial(attention_output, model) if residual else None
    )
    return layer_edits(make, model, anatomy, chosen, form, heads=heads, positions=positions, grouping=grouping)


def _aggregate(acts: Activations) -> tuple[Tensor, Tensor]:
    """o_t and v_t in float32 at least, from the map as it is."""
    return _sum_of_values(acts, acts["pattern"])


def _aggregate_excl_self(acts: Activations) -> tuple[Tensor, Tensor]:
    """c_t, summed over the other tokens alone, and v_t."""
    own = torch.eye(acts["pattern"].shape[-1], dtype=torch.bool, device=acts["pattern"].device)
    return _sum_of_values(acts, acts["pattern"].masked_fill(own, 0.0))


def _sum_of_values(acts: Activations, pattern: Tensor) -> tuple[Tensor, Tensor]:
    working = torch.promote_types(torch.promote_types(pattern.dtype, acts["v"].dtype), torch.float32)
    v = expand_kv(acts["v"], pattern.shape[1]).to(working)
    return torch.einsum("bhqk,bkhd->bqhd", pattern.to(working), v), v


_SUM = "z = pattern @ v"
FORMS = {
    form.name: form
    for form in (
        Site("value", "pattern", ("v",), "head", _aggregate, _SUM),
        Site("value_excl_self", "pattern", ("v",), "head", _aggregate_excl_self, _SUM),
        Site("attn", "pattern", ("v", "resid_pre"), "", _aggregate, "attn_out = z W_O + b_O"),
        Site("attn_per_head", "pattern", ("v", "resid_pre"), "head", _aggregate, "attn_out = z W_O + b_O"),
    )
}


@dataclass(frozen=True)
class _DiagonalEdit(ScaledEdit):
    """How the diagonal of one layer's map is edited. `output` gives W_O and b_O of a layer, where they are needed."""

    output: Callable[[int], tuple[Tensor, Tensor | None]] | None

    def watching(self, visit: DiagonalVisit) -> Hooks:
        collector = Collector(self.layer, self.site.reads, self.facts, self.model)

        def watch(tensor: Tensor, hook: Any) -> None:
            weight = self_weight(tensor).squeeze(-1)
            visit(self.layer, weight, self.weight_change(collector.take("pattern", tensor)))

        return [*collector.readers(), (self.where, tag(watch, collector))]

    def edited(self, tensor: Tensor, acts: dict[str, Tensor]) -> Tensor:
        change = self.weight_change(acts)
        finite = change.isfinite()
        if self.output is not None and not finite.all():
            raise HookError(
                f"no finite change of A_tt does it for {int((~finite).sum())} tokens: their own message has no part "
                "along the reference",
                where=self.where,
                cure="leave these positions out, or use `scale` at 'attn'",
            )
        working = torch.promote_types(tensor.dtype, change.dtype)
        diagonal = torch.diag_embed(rearrange(change, "batch pos head -> batch head pos"))
        return (tensor.to(working) + diagonal).to(tensor.dtype)

    def weight_change(self, acts: dict[str, Tensor]) -> Float[Tensor, "batch pos head"]:
        """What is added to A_tt, zero outside the chosen heads and positions; one head at the layer level."""
        n_heads, queries, keys = acts["pattern"].shape[1:]
        if queries != keys:
            raise HookError(
                f"this pass has {queries} queries for {keys} keys: under a KV cache the values of earlier tokens are "
                "not shown",
                where=self.where,
                cure="use `scale`, which is the same edit, or generate with use_past_kv_cache=False",
            )
        update, reference = self.site.vectors(acts)
        if self.output is not None:
            return self.selected(self._residual_change(update, reference, acts).unsqueeze(-1)).squeeze(-1)
        update, reference = (group_heads(x, self.grouping, self.facts.n_kv_heads) for x in (update, reference))
        grouped = diagonal_change(update, reference, scale_values(self, self.parallel, update, acts))
        chosen = self.selected(grouped.unsqueeze(-1))
        return ungroup_heads(chosen.expand(-1, -1, -1, n_heads // chosen.shape[2]), n_heads).squeeze(-1)

    def _residual_change(self, o: Tensor, v: Tensor, acts: dict[str, Tensor]) -> Float[Tensor, "batch pos head"]:
        assert self.output is not None
        w_o, b_o = (None if part is None else part.to(o.dtype) for part in self.output(self.layer))
        h = acts["resid_pre"].to(o.dtype)
        assert w_o is not None
        if self.site.has_heads:  # <W_O o, h> = <o, W_O^T h>, head by head
            pulled = torch.einsum("hdm,bpm->bphd", w_o, h)
            return message_change(o, pulled, v, scale_values(self, self.parallel, o, acts))
        y, message = (torch.einsum("bphd,hdm->bpm", x, w_o) for x in (o, v))
        y = y if b_o is None else y + b_o
        return message_change(y, h, message, scale_values(self, self.parallel, y, acts)).unsqueeze(-1)
