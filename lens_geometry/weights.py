"""The two matrices that write to the stream, on every class of model: W_O of attention and W_out of the MLP.

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
    return _weight(model, layer, "attn", "W_O", 3), _bias(model, layer, "attn", "b_O")


def mlp_output(model: Any, layer: int) -> tuple[Float[Tensor, "d_mlp d_model"], Float[Tensor, d_model] | None]:
    """W_out and b_out of a layer. Raises SiteError when the MLP has no W_out (a mixture of experts)."""
    return _weight(model, layer, "mlp", "W_out", 2), _bias(model, layer, "mlp", "b_out")


def _weight(model: Any, layer: int, part: str, name: str, axes: int) -> Tensor:
    try:
        weight = getattr(getattr(model.blocks[layer], part), name)
    except (AttributeError, IndexError, TypeError):
        weight = None
    if not isinstance(weight, Tensor) or weight.ndim != axes:
        raise SiteError(
            f"layer {layer} has no single {name}",
            where=f"blocks.{layer}.{part}",
            cure="use a site that needs no weights (attn, mlp, block, value, value_excl_self)",
        )
    return weight


def _bias(model: Any, layer: int, part: str, name: str) -> Tensor | None:
    try:
        bias = getattr(getattr(model.blocks[layer], part), name)
    except AttributeError:
        return None
    return bias if isinstance(bias, Tensor) else None
