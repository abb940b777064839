"""The MLP's carrier cut into slices as wide as the stream, and what each slice writes to it.

Slice g holds the carrier's components g * d_model to (g + 1) * d_model; the last one is filled up with zeros where
d_mlp is no multiple of d_model. W_out has no rows for the filling, so it adds nothing and nothing reads it.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def count_slices(d_mlp: int, width: int) -> int:
    """How many slices of `width` a carrier of `d_mlp` components has."""
    return -(-d_mlp // width)


def split_carrier(carrier: Float[Tensor, "batch pos d_mlp"], width: int) -> Float[Tensor, "batch pos slice width"]:
    """The carrier in slices, the last one padded with zeros.

    >>> split_carrier(torch.tensor([[[1.0, 2.0, 3.0]]]), 2).tolist()
    [[[[1.0, 2.0], [3.0, 0.0]]]]
    """
    missing = count_slices(carrier.shape[-1], width) * width - carrier.shape[-1]
    padded = functional.pad(carrier, (0, missing)) if missing else carrier
    return rearrange(padded, "batch pos (slice width) -> batch pos slice width", width=width)


def join_slices(slices: Float[Tensor, "batch pos slice width"], d_mlp: int) -> Float[Tensor, "batch pos d_mlp"]:
    """The inverse of `split_carrier`; what stands in the padding is dropped."""
    return rearrange(slices, "batch pos slice width -> batch pos (slice width)")[..., :d_mlp]


def contributions(
    carrier: Float[Tensor, "batch pos d_mlp"], w_out: Float[Tensor, "d_mlp d_model"]
) -> Float[Tensor, "batch pos slice d_model"]:
    """y_g = W_out[:, I_g] h_g of every slice of width d_model, in float32 (float64 for float64 input).

    With the bias they add up to the MLP's output: sum_g y_g + b_out.
    """
    working = torch.promote_types(carrier.dtype, torch.float32)
    parts = zip(carrier.to(working).split(w_out.shape[1], -1), w_out.to(working).split(w_out.shape[1]), strict=True)
    return torch.stack([part @ rows for part, rows in parts], 2)
