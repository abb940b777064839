"""WHERE an update is read and edited: each site names its update, its reference and its hooks once.

A site's `vectors` turns one layer's activations into (update, reference); everything else in the package
(profile, scaling, perturbation, compression error, suppression, patching) is a verb on that pair.

Nothing here has seen a model; whether a live model has a site is `anatomy.py`'s question.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from einops import rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from lens_geometry.errors import SiteError
from lens_geometry.slices import contributions, join_slices, split_carrier

Activations = Mapping[str, Tensor]
Grouping = Literal["each", "kv_group", "merged"]
GROUPINGS: tuple[Grouping, ...] = ("each", "kv_group", "merged")
Axis = Literal["", "head", "slice"]

HOOKS = {
    "resid_pre": "blocks.{}.hook_resid_pre",
    "q": "blocks.{}.attn.hook_q",
    "k": "blocks.{}.attn.hook_k",
    "v": "blocks.{}.attn.hook_v",
    "pattern": "blocks.{}.attn.hook_pattern",
    "z": "blocks.{}.attn.hook_z",
    "attn_out": "blocks.{}.hook_attn_out",
    "resid_mid": "blocks.{}.hook_resid_mid",
    "ln2_normalized": "blocks.{}.ln2.hook_normalized",
    "mlp_in": "blocks.{}.mlp.hook_in",
    "mlp_in_linear": "blocks.{}.mlp.in.hook_in",
    "mlp_pre": "blocks.{}.mlp.hook_pre",
    "mlp_post": "blocks.{}.mlp.hook_post",
    "mlp_raw": "blocks.{}.mlp.hook_out",
    "mlp_out": "blocks.{}.hook_mlp_out",
    "resid_post": "blocks.{}.hook_resid_post",
}
"""Short name -> TransformerLens hook name, in a block's usual firing order (`anatomy.py` records the real one)."""


@dataclass(frozen=True)
class Site:
    """One place in a block.

    Attributes:
        name: the field's name for it.
        target: short name of the hook that an edit changes; the update is all or part of it.
        reads: short names of the hooks that must have fired before, for the reference.
        axis: what a token has several vectors of: "head" in value space, "slice" inside the MLP, "" nothing.
        vectors: activations -> (update, reference), both [batch, pos, (head or slice,) d].
        identity: the sum that must hold on a live model, in words.
        merge: `(change of the update, target's activation) -> change of the target`, for updates that are not
            laid out as their target is.
        padded: whether the last vector of a token is filled up with components that the target does not have.
    """

    name: str
    target: str
    reads: tuple[str, ...]
    axis: Axis
    vectors: Callable[[Activations], tuple[Tensor, Tensor]]
    identity: str
    merge: Callable[[Tensor, Tensor], Tensor] = lambda change, target: change
    padded: bool = False

    @property
    def has_heads(self) -> bool:
        return self.axis == "head"


def expand_kv(v: Float[Tensor, "batch pos kv d"], n_heads: int) -> Float[Tensor, "batch pos head d"]:
    """Give each query head the value vector of its own KV head (grouped-query attention).

    Heads 0..g-1 share KV head 0, the next g share KV head 1, and so on.
    Raises SiteError when the number of heads is no multiple of the number of KV heads.
    """
    if v.ndim != 4 or n_heads % v.shape[2]:
        raise SiteError(
            f"values of shape {tuple(v.shape)} cannot serve {n_heads} query heads",
            where="hook_v",
            cure="hook_v must be [batch, pos, kv_head, d_head] with kv_head dividing the query heads",
        )
    return repeat(v, "batch pos kv d -> batch pos (kv group) d", group=n_heads // v.shape[2])


def self_weight(pattern: Float[Tensor, "batch head query key"]) -> Float[Tensor, "batch query head 1"]:
    """A_tt, the attention each token pays to itself. With a KV cache the queries are the last keys."""
    queries, keys = pattern.shape[-2:]
    diagonal = torch.diagonal(pattern, offset=keys - queries, dim1=-2, dim2=-1)
    return rearrange(diagonal, "batch head query -> batch query head 1")


def causal_pattern(
    q: Float[Tensor, "batch pos head d"], k: Float[Tensor, "batch pos kv d"], score_scale: float
) -> Float[Tensor, "batch head query key"]:
    """softmax(score_scale q k^T) under a causal mask, in float32 at least: plain attention without positions.

    For models whose own pattern is known too late; `anatomy.py` checks that it is theirs.
    """
    working = torch.promote_types(q.dtype, torch.float32)
    keys = expand_kv(k, q.shape[2]).to(working)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(working), keys) * score_scale
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1)


def _value(acts: Activations) -> tuple[Tensor, Tensor]:
    return acts["z"], expand_kv(acts["v"], acts["z"].shape[2])


def _value_excl_self(acts: Activations) -> tuple[Tensor, Tensor]:
    z, v = _value(acts)
    working = torch.promote_types(z.dtype, torch.float32)  # the difference, too, before any cast back
    return z.to(working) - self_weight(acts["pattern"]).to(working) * v.to(working), v


def _block(acts: Activations) -> tuple[Tensor, Tensor]:
    before = acts["resid_pre"]
    working = torch.promote_types(before.dtype, torch.float32)
    return acts["resid_post"].to(working) - before.to(working), before


def _mlp_reference(acts: Activations) -> Tensor:
    return acts["resid_mid"] if "resid_mid" in acts else acts["resid_pre"]


def _carrier(acts: Activations, reference: Tensor) -> tuple[Tensor, Tensor]:
    """The slices of the carrier, each against the same vector of the stream's width."""
    update = split_carrier(acts["mlp_post"], reference.shape[-1])
    return update, repeat(reference, "batch pos d -> batch pos slice d", slice=update.shape[2])


def _contribution(acts: Activations) -> tuple[Tensor, Tensor]:
    update = contributions(acts["mlp_post"], acts["W_out"])
    return update, split_carrier(acts["mlp_post"], update.shape[-1])


SITES: Mapping[str, Site] = {
    site.name: site
    for site in (
        Site(
            "attn", "attn_out", ("resid_pre",), "",
            lambda acts: (acts["attn_out"], acts["resid_pre"]),
            "resid_pre + attn_out = resid_mid",
        ),
        Site(
            "mlp", "mlp_out", ("resid_mid",), "",
            lambda acts: (acts["mlp_out"], _mlp_reference(acts)),
            "resid_mid + mlp_out = resid_post",
        ),
        Site(
            "block", "resid_post", ("resid_pre",), "",
            _block,
            "resid_post of a layer = resid_pre of the next",
        ),
        Site("value", "z", ("v",), "head", _value, "z = pattern @ v"),
        Site("value_excl_self", "z", ("v", "pattern"), "head", _value_excl_self, "z = pattern @ v"),
        Site(
            "resid", "resid_pre", (), "",
            lambda acts: (acts["resid_pre"], acts["resid_pre"]),
            "resid_pre is read by the block",
        ),
        Site(
            "mlp_carrier", "mlp_post", ("mlp_in",), "slice",
            lambda acts: _carrier(acts, acts["x"]),
            "hook_pre = x @ W_in + b_in (W_gate, b_gate if gated)",
            lambda change, target: join_slices(change, target.shape[-1]), padded=True,
        ),
        Site(
            "mlp_carrier_stream", "mlp_post", ("resid_mid",), "slice",
            lambda acts: _carrier(acts, _mlp_reference(acts)),
            "resid_mid + mlp_out = resid_post",
            lambda change, target: join_slices(change, target.shape[-1]), padded=True,
        ),
        Site(
            "mlp_contribution", "mlp_out", ("mlp_post",), "slice",
            _contribution,
            "hook_post @ W_out + b_out = mlp_out",
            lambda change, target: change.sum(2),
        ),
    )
}  # fmt: skip


def choose_layers(layers: Any, n_layers: int) -> tuple[int, ...]:
    """Layer numbers from None (all), an int, a slice, an iterable of ints, or text; negatives count from the end.

    Text is "all", "middle" (the middle third), "4", "1-" (all but the first), "4-11", "0,3,6" or a mixture such as
    "0,4-7".
    Raises SiteError for a layer that does not exist, for none at all, and for one given twice.
    """
    return _choose(_numbers(layers, n_layers) if isinstance(layers, str) else layers, n_layers, "layer")


def _numbers(text: str, n_layers: int) -> list[int] | None:
    if text.strip() == "all":
        return None
    if text.strip() == "middle":
        return list(range(n_layers // 3, max(2 * n_layers // 3, n_layers // 3 + 1)))
    chosen: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise SiteError(f"{text!r} names no layers", cure='write "all", "middle", "4", "1-", "4-11" or "0,3,6"')
        end = int(last) if last else (n_layers - 1 if dash else int(first))
        chosen += range(int(first), end + 1)
    return chosen


def choose_heads(heads: Any, n_heads: int, what: str = "head") -> tuple[int, ...]:
    """As `choose_layers`, for heads (or head groups), or for what else a token has several vectors of."""
    return _choose(heads, n_heads, what)


def indices(which: Any, what: str, cure: str) -> list[int]:
    """A whole number or an iterable of them (Python's, numpy's, torch's) as a list. Raises SiteError for others."""
    try:
        try:
            items = [operator.index(which)]
        except TypeError:
            items = list(which)
        if isinstance(which, bool) or any(isinstance(item, bool) for item in items):
            raise TypeError
        return [operator.index(item) for item in items]
    except TypeError:
        raise SiteError(f"there is no {what} {which!r}", cure=cure) from None


def _choose(which: Any, count: int, what: str) -> tuple[int, ...]:
    if which is None:
        return tuple(range(count))
    if isinstance(which, slice):
        which = range(count)[which]
    numbers = indices(which, what, f"the model has {what}s 0 to {count - 1}")
    for number in numbers:
        if not -count <= number < count:
            raise SiteError(f"there is no {what} {number}", cure=f"the model has {what}s 0 to {count - 1}")
    chosen = tuple(sorted(number % count for number in numbers))
    if not chosen or len(set(chosen)) < len(chosen):
        wrong = "select one twice" if chosen else f"select no {what}: the model has {what}s 0 to {count - 1}"
        raise SiteError(f"{what}s {numbers} {wrong}", cure=f"name each {what} once" if chosen else "choose among them")
    return chosen


def group_heads(x: Float[Tensor, "batch pos head d"], grouping: Grouping, n_kv_heads: int) -> Tensor:
    """Value-space vectors by head, KV group or all heads at once: [batch, pos, group, heads_in_group * d].

    Raises SiteError for an unknown grouping.
    """
    if grouping == "each":
        return x
    if grouping == "kv_group":
        return rearrange(x, "batch pos (kv group) d -> batch pos kv (group d)", kv=n_kv_heads)
    if grouping == "merged":
        return rearrange(x, "batch pos head d -> batch pos 1 (head d)")
    raise SiteError(f"there is no head grouping {grouping!r}", cure=f"choose one of {', '.join(GROUPINGS)}")


def ungroup_heads(x: Float[Tensor, "batch pos group e"], n_heads: int) -> Float[Tensor, "batch pos head d"]:
    """The inverse of `group_heads`."""
    within = n_heads // x.shape[2]
    return rearrange(x, "batch pos group (within d) -> batch pos (group within) d", within=within)


def token_mask(real: Bool[Tensor, "sequence pos"], *, exclude: Iterable[int] = (0,)) -> Bool[Tensor, "sequence pos"]:
    """Which tokens are measured: the real ones (no padding) outside the excluded positions.

    Position 0 is out by default, BOS or not: a token there attends to itself alone, so in value space its
    update *is* its reference. Raises SiteError for a position outside the sequence.
    """
    mask = real.clone()
    for position in exclude:
        if not -mask.shape[1] <= position < mask.shape[1]:
            raise SiteError(f"no position {position} to leave out", cure=f"positions are 0 to {mask.shape[1] - 1}")
        mask[:, position] = False
    return mask
