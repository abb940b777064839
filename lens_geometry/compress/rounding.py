"""Round to nearest: every weight to one of 2^bits values between the smallest and the largest of its group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from lens_geometry.compress.matrices import Matrix
from lens_geometry.compress.records import Step, Work
from lens_geometry.compressed import DENSE_BITS, Storage
from lens_geometry.errors import CompressionError

Bits = int | Mapping[int, int]


def round_matrix(
    weight: Float[Tensor, "out in"], bits: int, *, group_size: int | None = None, symmetric: bool = False
) -> Float[Tensor, "out in"]:
    """The weights rounded to `bits` bits, in float32 at least, bit for bit as compressed-tensors does it.

    Asymmetric: scale and zero point of a group from its smallest and largest weight, zero always among its values.
    Symmetric: the scale from the largest absolute weight.

    Args:
        weight: [out, in].
        bits: 2 to 8.
        group_size: weights along the inputs that share a scale; None for a whole row (an output channel).
        symmetric: without zero points.

    Raises:
        CompressionError: bits that are not 2 to 8, or a group size that does not divide the inputs.
    """
    check_grid(bits, group_size)
    if group_size is not None and weight.shape[1] % group_size:
        raise CompressionError(
            f"groups of {group_size} do not divide {weight.shape[1]} inputs",
            cure=f"a divisor such as {_divisor(weight.shape[1], group_size)}, or None for one scale per output channel",
        )
    working = weight.to(torch.promote_types(weight.dtype, torch.float32))
    groups = rearrange(working, "out (group each) -> out group each", each=group_size or weight.shape[1])
    least = groups.amin(-1, keepdim=True).clamp_max(0)
    most = groups.amax(-1, keepdim=True).clamp_min(0)
    low, high = -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1
    if symmetric:
        scale = torch.maximum(least.abs(), most.abs()) / ((high - low) / 2)
        zero = torch.zeros_like(scale)
    else:
        scale = (most - least) / (high - low)
        zero = (low - least / scale).clamp(low, high).nan_to_num(0.0).round()
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    rounded = (groups / scale + zero).clamp(low, high).round()
    return rearrange((rounded - zero) * scale, "out group each -> out (group each)")


def round_to_nearest(
    model: Any,
    *,
    bits: Bits = 4,
    group_size: int | None = None,
    symmetric: bool = False,
    layers: Any = None,
) -> Any:
    """A new model whose blocks' matrices are rounded to nearest; the one that was given stays as it is.

        small = round_to_nearest(model, bits=4, group_size=64)
        mixed = round_to_nearest(model, bits={0: 8, 1: 4, 2: 4, 3: 16})

    Args:
        model: a TransformerLens model, or a Hugging Face one.
        bits: 2 to 8, or for each layer its own; 16, 32 and layers that are not named stay as they are.
        group_size: weights along the inputs that share a scale; None for a whole row.
        symmetric: without zero points.
        layers: None for all, or which ("4-11", [0, 3]).

    Raises:
        CompressionError: bits or groups that make no sense here, or nothing to do.
        SiteError: layers that the model does not have.
        ModelError: a model whose weights cannot be copied or are no matrices.
    """
    work = Work(model, layers)
    by_layer = bits_by_layer(bits, work.layers, work.n_layers)
    work.layers = tuple(layer for layer in work.layers if by_layer[layer] < DENSE_BITS)

    def change(matrix: Matrix, weight: Tensor, stored: Storage) -> tuple[Tensor, Storage]:
        new = round_matrix(weight, by_layer[matrix.layer], group_size=group_size, symmetric=symmetric)
        return new, stored_rounded(stored, new, by_layer[matrix.layer], group_size, symmetric)

    work.change(change)
    settings = {
        "bits": bits if isinstance(bits, int) else {str(k): v for k, v in bits.items()},
        "group_size": group_size,
        "symmetric": symmetric,
    }
    return work.done(Step("rtn", settings))


def check_grid(bits: int, group_size: int | None) -> None:
    """Raise CompressionError for bits or a group size that no matrix can have."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not 2 <= bits <= 8:
        raise CompressionError(f"weights cannot be rounded to {bits!r} bits", cure="2 to 8")
    if group_size is not None and (not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 1):
        raise CompressionError(
            f"a group size of {group_size!r} is none", cure="such as 64, or None for one scale per output channel"
        )


def bits_by_layer(bits: Bits, layers: tuple[int, ...], n_layers: int) -> dict[int, int]:
    """Bits of every chosen layer.

    Raises CompressionError for layers that do not exist, bits that make no sense, or when all stay as they are.
    """
    given = dict.fromkeys(layers, bits) if isinstance(bits, int) else {int(key): bits[key] for key in bits}
    if wrong := sorted(set(given) - set(range(n_layers))):
        raise CompressionError(f"there is no layer {wrong[0]}", cure=f"the model has layers 0 to {n_layers - 1}")
    found = {layer: given.get(layer, DENSE_BITS) for layer in layers}
    if all(number in (16, 32) for number in found.values()):
        raise CompressionError("with 16 bits or more there is nothing to round", cure="2 to 8 bits")
    for number in found.values():
        if number not in (16, 32):
            check_grid(number, None)
    return found


def stored_rounded(stored: Storage, new: Tensor, bits: int, group_size: int | None, symmetric: bool) -> Storage:
    """Of a matrix that was rounded; a sparse one stays sparse where its zeros were kept."""
    kept = stored.density if float((new == 0).double().mean()) >= 1 - stored.density - 0.01 else 1.0
    scales = (DENSE_BITS if symmetric else 2 * DENSE_BITS) / (group_size or new.shape[1])
    return Storage(bits, kept, scales)


def _divisor(number: int, near: int) -> int:
    """The divisor of a number that is next to `near`."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - near))
