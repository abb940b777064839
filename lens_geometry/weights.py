"""The matrices that write to the stream, on every class of model: W_O of attention and W_out of the MLP. And what
stands before the MLP: the norm's weights, and the matrix that makes its pre-activation.

They are the live parameters, read anew at each call. Whether a branch really is `z @ W_O + b_O` or `post @ W_out +
b_out` (a norm or a multiplier may follow) is for the caller to check on the activations.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from lens_geometry.errors import SiteError


def attention_output(
    model: Any, layer: int
) -> tuple[Float[Tensor, "head d_head d_model"], Float[Tensor, d_model] | None]:
    """W_O and b_O of a layer; b_O is None where there is no bias. Raises SiteError when the layer has no W_O."""
    return _weight(model, layer, "attn", "W_O", 3), _optional(model, layer, "attn", "b_O")


def mlp_output(model: Any, layer: int) -> tuple[Float[Tensor, "d_mlp d_model"], Float[Tensor, d_model] | None]:
    """W_out and b_out of a layer. Raises SiteError when the MLP has no W_out (a mixture of experts)."""
    return _weight(model, layer, "mlp", "W_out", 2), _optional(model, layer, "mlp", "b_out")


def mlp_input(model: Any, layer: int) -> tuple[Float[Tensor, "d_model d_mlp"], Float[Tensor, d_mlp] | None]:
    """The matrix and the bias that make `mlp.hook_pre`: W_gate and b_gate in a gated MLP, else W_in and b_in.

    Raises SiteError when the layer has none that can be read.
    """
    gated = _optional(model, layer, "mlp", "W_gate") is not None
    name = "gate" if gated else "in"
    return _weight(model, layer, "mlp", f"W_{name}", 2), _optional(model, layer, "mlp", f"b_{name}")


def mlp_norm(model: Any, layer: int) -> tuple[Float[Tensor, d_model] | None, Float[Tensor, d_model] | None]:
    """Weight and bias of the norm before the MLP; None where it has none, or where they are folded away."""
    return _optional(model, layer, "ln2", "w"), _optional(model, layer, "ln2", "b")


def norm_bias(model: Any, name: str) -> Float[Tensor, d_model] | None:
    """Bias of the norm of that name, such as "blocks.3.ln1" or "ln_final"; None where it has none."""
    part = model
    for step in name.split("."):
        part = part[int(step)] if step.isdecimal() else getattr(part, step, None)
    try:
        found = getattr(part, "b", None)
    except NotImplementedError:
        return None
    return found if isinstance(found, Tensor) else None


def _weight(model: Any, layer: int, part: str, name: str, axes: int) -> Tensor:
    try:
        weight = getattr(getattr(model.blocks[layer], part), name)
    except (AttributeError, IndexError, TypeError, NotImplementedError):  # the last: quantised, or on no device
        weight = None
    if not isinstance(weight, Tensor) or weight.ndim != axes:
        raise SiteError(
            f"layer {layer} has no single {name}",
            where=f"blocks.{layer}.{part}",
            cure="use a site that needs no weights (attn, mlp, block, value, value_excl_self)",
        )
    return weight


def _optional(model: Any, layer: int, part: str, name: str) -> Tensor | None:
    try:
        found = getattr(getattr(model.blocks[layer], part), name)
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, Tensor) else None
