"""Vectors on the last axis, in working precision: what the algebra is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from lens_geometry.errors import GeometryError


def prepare(update: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Working-precision update, reference scaled by a power of two to be near 1, and that power.

    Without the scaling |r|^2 underflows below |r| = 1e-19 in float32, and a small reference would be
    taken for a zero one. A power of two scales without rounding.
    """
    if update.shape != reference.shape:
        raise GeometryError(
            f"update {tuple(update.shape)} and reference {tuple(reference.shape)} differ in shape",
            cure="give both the same shape; nothing is broadcast, so that no wrong reference slips through",
        )
    if not (update.is_floating_point() and reference.is_floating_point()):
        raise GeometryError(
            f"update {update.dtype} and reference {reference.dtype} must both be floating point",
            cure="pass activations, not token ids",
        )
    if update.ndim == 0 or update.shape[-1] == 0:
        raise GeometryError("vectors need a last axis of at least one component", cure="pass [..., d] tensors")
    double = torch.float64 in (update.dtype, reference.dtype)
    working = torch.float64 if double else torch.float32
    u, r = update.to(working), reference.to(working)
    largest = torch.maximum(r.detach().amax(-1, keepdim=True), -r.detach().amin(-1, keepdim=True))
    limit = 1022 if double else 126
    exponent = torch.frexp(largest).exponent.clamp(-limit, limit)
    scale = torch.ldexp(torch.ones_like(largest), -exponent)
    return u, r * scale, scale


def coefficient_of(u: Tensor, r: Tensor, length: Tensor | None = None) -> Tensor:
    """<u, r> / |r|^2 with the last axis kept; 0 for a zero reference."""
    square = dot(r, r) if length is None else length.square()
    return dot(u, r) / square.masked_fill(square == 0, 1.0)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """<a, b>, the last axis kept."""
    kind = a.device.type
    if torch.is_autocast_enabled(kind):  # it would compute this product, of all that is done here, in half precision
        with torch.autocast(kind, enabled=False):
            return dot(a, b)
    product: Tensor = torch.linalg.vecdot(a, b)
    return product.unsqueeze(-1)


def norm(a: Tensor) -> Tensor:
    """|a|, the last axis kept."""
    length: Tensor = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
    return length


def column(scale: float | Tensor, like: Tensor) -> float | Tensor:
    """A scale as a number, or as a tensor with an axis of size 1 for the vector components."""
    if not isinstance(scale, Tensor):
        return float(scale)
    return scale.to(device=like.device, dtype=like.dtype).unsqueeze(-1)


def unit(a: Tensor) -> Tensor:
    """a / |a|; zero for a zero vector."""
    length = norm(a)
    return a / length.masked_fill(length == 0, 1.0)
