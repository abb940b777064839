"""Which hooks of a live model show queries and keys as its attention scores are made of them, found by one small pass.

Rotary models turn q and k by their positions. Most classes show both sides of that; some show them before it only, and
then the scores themselves say what the products are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lens_geometry.anatomy import alone, at_rest, attached, hook_points, inspect, probe_tokens
from lens_geometry.sites import expand_kv

HOOKS = {name: f"blocks.{{}}.attn.hook_{name}" for name in ("q", "k", "rot_q", "rot_k", "attn_scores", "pattern")}
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class QueryKeys:
    """Where a layer's queries and keys are read.

    Attributes:
        q, k: full hook names; the activations are [batch, pos, head, d] and [batch, pos, kv, d].
        scores: the hook that shows `scale <q, k>` after the rotation, where q and k are shown only before it; else "".
        scale: that factor.
    """

    q: str
    k: str
    scores: str = ""
    scale: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.q, self.k, self.scores) if self.scores else (self.q, self.k)


def query_keys(model: Any) -> tuple[QueryKeys | None, ...]:
    """For each layer where q and k are read, None where no hooks show what the scores are made of.

    One forward pass over 2 x 6 tokens; nothing about the model changes.
    """
    points, n_layers = hook_points(model), inspect(model).n_layers
    seen: list[dict[str, Tensor]] = [{} for _ in range(n_layers)]

    def keeper(layer: int, name: str) -> Callable[..., None]:
        def keep(tensor: Tensor, hook: Any) -> None:
            seen[layer][name] = tensor.detach().cpu().double()

        return keep

    wanted = [
        (name.format(layer), keeper(layer, short))
        for layer in range(n_layers)
        for short, name in HOOKS.items()
        if name.format(layer) in points
    ]
    with at_rest(model), alone(points), attached(model, wanted):
        model(probe_tokens(model), return_type="logits")
    tolerance = TOLERANCE.get(inspect(model).dtype, 1e-4)
    return tuple(found_in(acts, layer, tolerance) for layer, acts in enumerate(seen))


def found_in(acts: Mapping[str, Tensor], layer: int, tolerance: float) -> QueryKeys | None:
    """What one layer's activations show; `acts` has those of `HOOKS` that fired, by short name.

    In every row of the pattern more attention must go to the larger product: a softmax keeps their order, whatever
    the scale, and so does a soft cap. Where it does not, a rotation is seen by what it leaves alone: the score of a
    token with itself.
    """
    names = {name: HOOKS[name].format(layer) for name in HOOKS}
    pattern, scores = acts.get("pattern"), acts.get("attn_scores")
    for q, k in (("rot_q", "rot_k"), ("q", "k")):
        dots = _dots(acts.get(q), acts.get(k))
        if dots is not None and pattern is not None and _rises_with(pattern, dots, tolerance):
            return QueryKeys(names[q], names[k])
    dots = _dots(acts.get("q"), acts.get("k"))
    if dots is None or pattern is None or scores is None or scores.shape != dots.shape:
        return None
    own, own_scores = (x.diagonal(dim1=-2, dim2=-1) for x in (dots, scores))
    scale = float((own * own_scores).sum() / own.square().sum())
    if not _near(own * scale, own_scores, tolerance):
        return None
    rest = scores - scale * dots
    if _near(_seen(rest[:1].expand_as(rest)), _seen(rest), tolerance):  # of the places alone: a bias for distance
        return QueryKeys(names["q"], names["k"])
    return QueryKeys(names["q"], names["k"], names["attn_scores"], scale)


def _dots(q: Tensor | None, k: Tensor | None) -> Tensor | None:
    if q is None or k is None or q.ndim != 4 or k.ndim != 4 or q.shape[-1] != k.shape[-1] or q.shape[2] % k.shape[2]:
        return None
    return torch.einsum("bqhd,bkhd->bhqk", q, expand_kv(k, q.shape[2]))


def _seen(x: Tensor) -> Tensor:
    """The entries of keys that are not in the future, [entries]."""
    return x[..., torch.ones(x.shape[-2:], dtype=torch.bool).tril()].flatten()


def _rises_with(pattern: Tensor, dots: Tensor, tolerance: float) -> bool:
    """Whether the attended keys of every row, sorted by their product, are sorted by their attention too."""
    if pattern.shape != dots.shape:
        return False
    attended = pattern > 0
    order = torch.where(attended, dots, -torch.inf).argsort(-1)
    ordered = pattern.gather(-1, order)  # keys without attention come first, and have 0
    return bool((ordered.cummax(-1).values - ordered).max() <= tolerance)


def _near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one - other).abs().max() <= tolerance * other.abs().max())
