"""Whole layers: blanked, so that they write nothing and the depth stays, or dropped, so that the model is shorter."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lens_geometry.compress.matrices import Matrix
from lens_geometry.compress.plain import is_hooked, shortened, shortened_hooked
from lens_geometry.compress.records import Step, Work
from lens_geometry.compressed import Storage
from lens_geometry.errors import CompressionError, ModelError

Part = Literal["block", "attn", "mlp"]
_ROLES = {"block": ("o", "out"), "attn": ("o",), "mlp": ("out",)}


def blank_layers(model: Any, layers: Any, *, part: Part = "block") -> Any:
    """A new model in which some layers, or their attention or MLP, write nothing to the stream. Its depth stays.

    What is zeroed are W_O and W_out, and the biases that are added to what they give.

    Args:
        model: a TransformerLens model, or a Hugging Face one; it stays as it is.
        layers: which ("4-11", [0, 3]).
        part: "block" for both branches, "attn" or "mlp" for one.

    Raises:
        CompressionError: no such part, no layers, or layers that write nothing already.
        SiteError: layers that the model does not have.
        ModelError: a model whose weights cannot be copied, or whose writing matrices are not known.
    """
    if part not in _ROLES:
        raise CompressionError(f"a layer has no part {part!r}", cure=f"one of {', '.join(_ROLES)}")
    if layers is None:
        raise CompressionError("no layers are named to blank", cure='such as layers=[3], or "all"')
    work = Work(model, layers)
    writing = [matrix for matrix in work.matrices() if matrix.role in _ROLES[part]]
    for layer in work.layers:
        for role in _ROLES[part]:
            if not any(matrix.role == role and matrix.layer == layer for matrix in writing):
                raise ModelError(
                    f"which matrix of layer {layer} writes its {'attention' if role == 'o' else 'MLP'}'s output is not "
                    "known",
                    cure="blank another part, or drop the layer",
                )

    def change(matrix: Matrix, weight: Tensor, stored: Storage) -> tuple[Tensor, Storage]:
        return torch.zeros_like(weight), Storage(density=0.0)

    work.change(change, writing)
    with torch.no_grad():
        for matrix in writing:
            if matrix.bias is not None:
                matrix.bias.zero_()
    return work.done(Step("blank", {"part": part}))


def drop_layers(model: Any, layers: Any) -> Any:
    """A new, shorter model without some of its layers; those that stay are numbered anew from 0.

    Args:
        model: a TransformerLens model, or a Hugging Face one; it stays as it is.
        layers: which go ("4-11", [0, 3]).

    Raises:
        CompressionError: no layers, all of them, or attention that depends on its layer's number.
        SiteError: layers that the model does not have.
        ModelError: a model whose weights cannot be copied.
    """
    if layers is None:
        raise CompressionError("no layers are named to drop", cure="such as layers=[3]")
    work = Work(model, layers)
    stay = [layer for layer in range(work.n_layers) if layer not in work.layers]
    if not stay:
        raise CompressionError("all layers would be dropped", cure="leave one at least")
    settings = getattr(work.copied, "cfg" if is_hooked(work.copied) else "config", None)
    if getattr(settings, "scale_attn_by_inverse_layer_idx", False):
        raise CompressionError(
            "attention of this model is scaled by its layer's number, which dropping would change",
            cure="use blank_layers",
        )
    shorten = shortened_hooked if is_hooked(work.copied) else shortened
    work.copied = shorten(work.copied, stay)
    kept = {str(old): str(new) for new, old in enumerate(stay)}
    split = [(*key.partition("."), stored) for key, stored in work.storage.items()]
    work.storage = {f"{kept[layer]}.{rest}": stored for layer, _, rest, stored in split if layer in kept}
    return work.done(Step("drop", {}))
