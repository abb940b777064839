"""Does an edit of the attention map arrive? Seen on the live model: z must be the *changed* pattern @ v.

Some models only show their pattern (their attention is computed elsewhere), and what follows W_O may be more than a
bias: a norm, after which no weight of a token's own message scales a component of the branch's output.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lens_geometry.anatomy import (
    Anatomy,
    alone,
    at_rest,
    attached,
    attention_error,
    hook_points,
    probe_tokens,
    require,
)
from lens_geometry.edits.hooks import Hooks
from lens_geometry.errors import SiteError
from lens_geometry.sites import HOOKS
from lens_geometry.weights import attention_output

_errors: weakref.WeakKeyDictionary[Any, dict[tuple[torch.dtype, bool], list[float]]] = weakref.WeakKeyDictionary()


def require_map(model: Any, layers: Any = None, *, output: bool = False) -> tuple[Anatomy, tuple[int, ...]]:
    """The model's anatomy and the layers, where an edit of hook_pattern acts on z; or a SiteError with the reason.

    With `output`, what attention adds to the stream must also be z W_O + b_O, or a constant times it.
    """
    anatomy, _, chosen = require(model, "value", layers)
    if output:
        require(model, "attn", layers)
    for layer in chosen:
        fired = list(anatomy.layers[layer].shapes)
        late = [name for name in ("v", "resid_pre") if fired.index(name) > fired.index("pattern")]
        if late:
            raise _refusal(layer, f"fires before {HOOKS[late[0]].format(layer)}, which the edit is made from")
        if fired.index("pattern") > fired.index("z"):
            raise _refusal(layer, f"fires after {HOOKS['z'].format(layer)}: the map is shown, not used")
        if not _known(model, anatomy, output=False)[layer] <= anatomy.tolerance:
            raise _refusal(layer, "can be changed without a change of z: the map is shown, not used")
        if output and not _known(model, anatomy, output=True)[layer] <= anatomy.tolerance:
            raise SiteError(
                f"in layer {layer}, what attention adds to the stream is not z W_O + b_O, nor a constant times it (off "
                f"by {_known(model, anatomy, output=True)[layer]:.2g}: a norm follows), so no change of A_tt scales it",
                where=HOOKS["attn_out"].format(layer),
                cure="use the diagonal form of 'value' or 'value_excl_self', or `scale` at 'attn'",
            )
    return anatomy, chosen


def _refusal(layer: int, why: str) -> SiteError:
    return SiteError(
        f"the attention map cannot be edited in layer {layer}: it {why}",
        where=HOOKS["pattern"].format(layer),
        cure="use `scale` at 'value' or 'value_excl_self', or load the model as another class (backend='hooked')",
    )


def _known(model: Any, anatomy: Anatomy, *, output: bool) -> list[float]:
    """Per layer, how far z is from pattern @ v, or attn_out from z W_O + b_O, under a changed pattern; remembered."""
    found = _errors.setdefault(model, {})
    key = anatomy.dtype, output
    if key not in found:
        found[key] = _look(model, anatomy, output)
    return found[key]


def _look(model: Any, anatomy: Anatomy, output: bool) -> list[float]:
    """One pass over 2 x 6 tokens in which every token attends to itself by a half more, in every layer."""
    seen: list[dict[str, Tensor]] = [{} for _ in range(anatomy.n_layers)]

    def keeper(layer: int, name: str) -> Callable[..., None]:
        def keep(tensor: Tensor, hook: Any) -> None:
            seen[layer][name] = tensor.detach().clone()

        return keep

    def pusher(layer: int) -> Callable[..., Tensor]:
        def push(tensor: Tensor, hook: Any) -> Tensor:
            seen[layer]["pattern"] = tensor + torch.diag_embed(torch.full_like(tensor[..., 0], 0.5))
            return seen[layer]["pattern"]

        return push

    layers = [layer for layer in range(anatomy.n_layers) if anatomy.layers[layer].shapes.keys() >= {"pattern", "z"}]
    names = ("v", "z", "attn_out") if output else ("v", "z")
    hooks: Hooks = [(HOOKS[name].format(layer), keeper(layer, name)) for layer in layers for name in names]
    hooks += [(HOOKS["pattern"].format(layer), pusher(layer)) for layer in layers]
    device = next(model.parameters()).device.type
    with at_rest(model), alone(hook_points(model)), attached(model, hooks), torch.autocast(device, enabled=False):
        model(probe_tokens(model), return_type="logits")
    if output:
        return [_output_error(model, layer, acts) for layer, acts in enumerate(seen)]
    return [attention_error(a["pattern"], a["v"], a["z"]) if a else float("inf") for a in seen]


def _output_error(model: Any, layer: int, acts: dict[str, Tensor]) -> float:
    """How far attn_out is from the best constant times z W_O + b_O, relative to its size, per token."""
    if "attn_out" not in acts:
        return float("inf")
    w_o, b_o = (None if part is None else part.detach().cpu().double() for part in attention_output(model, layer))
    z, out = acts["z"].cpu().double(), acts["attn_out"].cpu().double()
    assert w_o is not None
    made = torch.einsum("bphd,hdm->bpm", z, w_o) + (0.0 if b_o is None else b_o)
    gap = made * ((made * out).sum() / (made * made).sum()) - out
    return float((gap.norm(dim=-1) / out.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)).max())
