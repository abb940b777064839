"""Whole layers: blanked, so that they write nothing and the depth stays, or dropped, so that the model is shorter."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lens_geometry.compress.matrices import Matrix
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
