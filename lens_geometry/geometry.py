"""The algebra of an update and its reference. Knows no model and no hook.

Every function works on the last axis and treats all other axes as batch. Arithmetic is done in float32
(float64 input stays float64) and cast back to the input's dtype once, at the end.

Source: "Disentangling Representation Evolution in Transformers through Directional Decomposition".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lens_geometry.errors import GeometryError
from lens_geometry.gradients import Change, Matched, change_of, matched_of
from lens_geometry.vectors import coefficient_of, column, dot, norm, prepare, unit

METRICS = (
    "alpha",
    "parallel_ratio",
    "parallel_fraction",
    "perpendicular_fraction",
    "parallel_energy",
    "perpendicular_energy",
    "cosine",
    "update_over_reference",
)


class Decomposition(NamedTuple):
    """`parallel + perpendicular = update`, and `parallel = alpha * reference`."""

    alpha: Float[Tensor, "*batch"]
    parallel: Float[Tensor, "*batch d"]
    perpendicular: Float[Tensor, "*batch d"]


class Lengths(NamedTuple):
    """The five numbers per token that every metric is computed from (float32 or float64)."""

    alpha: Float[Tensor, "*batch"]
    update: Float[Tensor, "*batch"]
    reference: Float[Tensor, "*batch"]
    parallel: Float[Tensor, "*batch"]
    perpendicular: Float[Tensor, "*batch"]


def decompose(update: Float[Tensor, "*batch d"], reference: Float[Tensor, "*batch d"]) -> Decomposition:
    """Split an update into the part along a reference and the part orthogonal to it.

        alpha = <u, r> / |r|^2        u_par = alpha r        u_perp = u - u_par

    A zero reference gives `parallel = 0`, `perpendicular = update`; no epsilon is added anywhere.
    `alpha` is float32 (float64 for float64 input), the parts have the update's dtype.

    >>> alpha, parallel, perpendicular = decompose(torch.tensor([3.0, 4.0]), torch.tensor([2.0, 0.0]))
    >>> alpha.item(), parallel.tolist(), perpendicular.tolist()
    (1.5, [3.0, 0.0], [0.0, 4.0])

    Raises GeometryError when the shapes differ (nothing is broadcast) or a dtype is not floating.
    """
    u, r, scale = prepare(update, reference)
    coefficient = coefficient_of(u, r)
    parallel = coefficient * r
    alpha = (coefficient * scale).squeeze(-1)
    return Decomposition(alpha, parallel.to(update.dtype), (u - parallel).to(update.dtype))


def component_change(
    update: Float[Tensor, "*batch d"],
    reference: Float[Tensor, "*batch d"],
    parallel: float | Float[Tensor, "*#batch"] = 1.0,
    perpendicular: float | Float[Tensor, "*#batch"] = 1.0,
) -> Float[Tensor, "*batch d"]:
    """What component scaling adds to an update: `u' - u`, in float32 (float64 for float64 input).

        u' - u = (s_perp - 1) u + (s_par - s_perp) u_par

    It is exactly zero at (1, 1) and exactly `u_par - u` at (1, 0), for tensors as for numbers, and
    it can be added to whatever activation the update is a part of. `parallel` and `perpendicular` are
    the *retained* scales: numbers, or tensors that broadcast against the batch axes.
    Raises GeometryError as `decompose` does.
    """
    u, r, scale = prepare(update, reference)
    s_par, s_perp = column(parallel, u), column(perpendicular, u)
    if torch.is_grad_enabled() and (u.requires_grad or r.requires_grad):
        wide = reference.to(u.dtype)
        change: Tensor = Change.apply(u, wide, r.detach(), scale, s_par, s_perp)  # type: ignore[no-untyped-call]
        return change
    return change_of(u, r, s_par, s_perp)[0]


def scale_components(
    update: Float[Tensor, "*batch d"],
    reference: Float[Tensor, "*batch d"],
    parallel: float | Float[Tensor, "*#batch"] = 1.0,
    perpendicular: float | Float[Tensor, "*#batch"] = 1.0,
) -> Float[Tensor, "*batch d"]:
    """Keep `parallel` of the parallel part and `perpendicular` of the perpendicular part of an update.

        u' = s_par u_par + s_perp u_perp

    Both are *retained* scales: (1, 1) returns the update to the last bit, (0, 1) removes the parallel
    part. The result has the update's dtype; the only rounding to it happens after the arithmetic, so
    removal in bfloat16 leaves no more than one rounding of residue.

    >>> scale_components(torch.tensor([3.0, 4.0]), torch.tensor([2.0, 0.0]), parallel=0.0).tolist()
    [0.0, 4.0]

    Raises GeometryError as `decompose` does.
    """
    change = component_change(update, reference, parallel, perpendicular)
    return (update.to(change.dtype) + change).to(update.dtype)


def lengths(update: Float[Tensor, "*batch d"], reference: Float[Tensor, "*batch d"]) -> Lengths:
    """Norms of an update, its reference and its two parts, with `alpha`, per token.

    The perpendicular norm is that of the vector `u - u_par` itself, not `sqrt(|u|^2 - |u_par|^2)`, which
    would lose every digit when the update is nearly parallel. Raises GeometryError as `decompose` does.
    """
    u, r, scale = prepare(update, reference)
    reference_norm = norm(r)  # norms without a product in between: memory traffic is what this costs
    coefficient = coefficient_of(u, r, reference_norm)
    return Lengths(
        alpha=(coefficient * scale).squeeze(-1),
        update=norm(u).squeeze(-1),
        reference=(reference_norm / scale).squeeze(-1),
        parallel=(coefficient.abs() * reference_norm).squeeze(-1),
        perpendicular=norm(torch.addcmul(u, coefficient, r, value=-1)).squeeze(-1),
    )


def measure(update: Float[Tensor, "*batch d"], reference: Float[Tensor, "*batch d"]) -> dict[str, Tensor]:
    """The named numbers of each token, one tensor of shape `batch` for each name in `METRICS`.

    | name | value |
    |---|---|
    | `alpha` | signed, <u, r> / abs(r)^2 |
    | `parallel_ratio` | abs(u_par) / abs(u_perp); inf when u_perp = 0 |
    | `parallel_fraction`, `perpendicular_fraction` | norm of the part / norm of u |
    | `parallel_energy`, `perpendicular_energy` | squares of those two; they sum to 1 |
    | `cosine` | cos(u, r); 0 for a zero reference |
    | `update_over_reference` | norm of u / norm of r; inf for a zero reference |

    A zero update has no direction: its ratios, fractions, energies and cosine are NaN ("undefined"),
    its alpha and update_over_reference are 0. Raises GeometryError as `decompose` does.
    """
    return metrics_of(lengths(update, reference))


def metrics_of(found: Lengths) -> dict[str, Tensor]:
    """`measure` for lengths that are at hand already."""
    # 0 / 0 is NaN and x / 0 is inf in IEEE arithmetic, which is what "undefined" and "infinite" mean here.
    parallel, perpendicular = found.parallel / found.update, found.perpendicular / found.update
    return {
        "alpha": found.alpha,
        "parallel_ratio": found.parallel / found.perpendicular,
        "parallel_fraction": parallel,
        "perpendicular_fraction": perpendicular,
        "parallel_energy": parallel.square(),
        "perpendicular_energy": perpendicular.square(),
        "cosine": parallel.copysign(found.alpha),
        "update_over_reference": torch.where(
            found.update == 0, torch.zeros_like(found.update), found.update / found.reference
        ),
    }


def diagonal_change(
    update: Float[Tensor, "*batch d"],
    reference: Float[Tensor, "*batch d"],
    parallel: float | Float[Tensor, "*#batch"],
) -> Float[Tensor, "*batch"]:
    """How much more of its reference turns an update into the one that keeps `parallel` of its parallel part.

        (s_par - 1) <u, r> / |r|^2 = (s_par - 1) alpha

    In value space it is what the edit adds to A_tt, the weight of the token's own value. Zero for a zero
    reference; float32 (float64 for float64 input). Raises GeometryError as `decompose` does.

    >>> diagonal_change(torch.tensor([3.0, 4.0]), torch.tensor([2.0, 0.0]), 0.0).item()
    -1.5
    """
    u, r, scale = prepare(update, reference)
    change: Tensor = (column(parallel, u) - 1.0) * coefficient_of(u, r) * scale
    return change.squeeze(-1)


def message_change(
    update: Float[Tensor, "*batch d"],
    reference: Float[Tensor, "*batch d"],
    message: Float[Tensor, "*batch d"],
    parallel: float | Float[Tensor, "*#batch"],
) -> Float[Tensor, "*batch"]:
    """How much more of `message` scales an update's product with its reference by `parallel`, and nothing else.

        (s_par - 1) <u, r> / <m, r>

    The scalar constraint <u', r> = s_par <u, r> is met and no other: u' - u lies along the message, not along the
    reference. With the reference as its own message it is `diagonal_change`. Zero where nothing has to
    change; infinite where something has to and the message has no part along the reference.
    Float32 (float64 for float64 input). Raises GeometryError as `decompose` does.
    """
    u, r, _ = prepare(update, reference)
    m, r_again, _ = prepare(message, reference)
    double = torch.promote_types(u.dtype, m.dtype)
    wanted = (column(parallel, u) - 1.0) * dot(u, r).to(double)
    change: Tensor = torch.where(wanted == 0, torch.zeros_like(wanted), wanted / dot(m, r_again).to(double))
    return change.squeeze(-1)


def smallest_operator(
    update: Float[Tensor, "*batch d"],
    reference: Float[Tensor, "*batch d"],
    message: Float[Tensor, "*batch d_message"],
    parallel: float | Float[Tensor, "*#batch"],
) -> Float[Tensor, "*batch d d_message"]:
    """The operator of smallest Frobenius norm that adds a scaling's change to what it makes of a message.

        dB = (s_par - 1) <u, r> / (|m|^2 |r|^2) r m^T        dB m = u' - u

    Its rank is one and its norm |u' - u| / |m|: every other operator with that action has a part that acts beside
    the message, and is larger by it. Float32 (float64 for float64 input).
    Raises GeometryError as `decompose` does, and where the message is zero but the change is not: no operator
    makes something of nothing.
    """
    change = component_change(update, reference, parallel)
    m, near_one, scale = prepare(message, message)
    if change.shape[:-1] != m.shape[:-1]:
        raise GeometryError(
            f"update {tuple(update.shape)} and message {tuple(message.shape)} differ in their batch axes",
            cure="give one message per update",
        )
    working = torch.promote_types(change.dtype, m.dtype)
    square = dot(near_one, near_one)
    if ((square == 0) & (change != 0)).any():
        raise GeometryError(
            "the message is zero where the update has to change",
            cure="leave out tokens without a message, or realise the change by another operator",
        )
    row = near_one * (scale / square.masked_fill(square == 0, 1.0))
    return change.to(working).unsqueeze(-1) * row.to(working).unsqueeze(-2)


def matched_direction(
    update: Float[Tensor, "*batch d"],
    reference: Float[Tensor, "*batch d"],
    noise: Float[Tensor, "*batch d"],
) -> Float[Tensor, "*batch d"]:
    """A unit vector at the reference's angle to the update, turned round the update to where the noise points.

        n = cos(u, r) u/|u| + sin(u, r) w        w the unit vector along the noise's part orthogonal to u

    Against it the update has a parallel and a perpendicular part of the same lengths as against its reference, so
    an edit along it changes the update by as much, and leaves it as long; only the direction is another.
    Zero for a zero update. Float32 (float64 for float64 input). Raises GeometryError as `decompose` does.
    """
    u, r, _ = prepare(update, reference)
    wide_noise, near_one, _ = prepare(noise, update)
    working = torch.promote_types(u.dtype, wide_noise.dtype)
    near_one, wide_noise = near_one.to(working), wide_noise.to(working)
    if torch.is_grad_enabled() and (u.requires_grad or r.requires_grad) and not noise.requires_grad:
        wide = reference.to(u.dtype)
        direction: Tensor = Matched.apply(u, wide, r.detach(), near_one.detach(), wide_noise)  # type: ignore[no-untyped-call]
        return direction
    return matched_of(u, r, near_one, wide_noise)[0]


def rotate_by(
    h: Float[Tensor, "*batch d"], direction: Float[Tensor, "*batch d"], distance: float | Float[Tensor, "*#batch"]
) -> Float[Tensor, "*batch d"]:
    """Turn a vector towards a direction until it has moved by `distance`; its length stays.

        h' = |h| (cos t h/|h| + sin t v)        t = arccos(1 - distance^2 / (2 |h|^2))

    v is the unit vector along the direction's part orthogonal to h. The result has the dtype of h.

    >>> rotate_by(torch.tensor([3.0, 0.0]), torch.tensor([5.0, 1.0]), 18**0.5).round(decimals=4).tolist()
    [0.0, 3.0]

    Raises GeometryError where no vector of that length is so far away (distance > 2 |h|) or the direction has no part
    orthogonal to h, and as `decompose` does. Source: "Disentangling Direction and Magnitude in Transformer
    Representations" (arXiv 2602.11169).
    """
    change = rotation_change(h, direction, distance)
    if not change.isfinite().all():
        raise GeometryError(
            "the vector cannot be turned so far: the distance is more than twice its length, or the direction lies "
            "along it",
            cure="choose a shorter distance, or another direction",
        )
    return (h.to(change.dtype) + change).to(h.dtype)


def rotation_change(
    h: Float[Tensor, "*batch d"], direction: Float[Tensor, "*batch d"], distance: float | Float[Tensor, "*#batch"]
) -> Float[Tensor, "*batch d"]:
    """What `rotate_by` adds, in float32 (float64 for float64 input); NaN where it is impossible.

        h' - h = -(c^2 / 2) h + distance sqrt(1 - c^2 / 4) v        c = distance / |h|

    Written like this no digit is lost to cos t near 1. Exactly zero at distance 0.
    Raises GeometryError as `decompose` does.
    """
    _, near_one, scale = prepare(direction, h)
    aside = prepare(h, direction)[1].to(near_one.dtype)
    along, size = unit(near_one), norm(aside)
    for _ in range(2):  # the second time takes away what rounding left of the first
        aside = aside - dot(aside, along) * along
        lost = norm(aside) <= 8 * torch.finfo(aside.dtype).eps * size  # nothing but rounding is orthogonal to h
        aside = (aside / norm(aside)).masked_fill(lost, torch.nan)
        size = torch.ones_like(size)
    d = torch.as_tensor(column(distance, aside), dtype=aside.dtype, device=aside.device)
    share = d * scale / norm(near_one)
    change: Tensor = (-share * d / 2) * along + (d * (1 - share.square() / 4).sqrt()) * aside
    return torch.where(d == 0, torch.zeros_like(change), change)


def rescale_by(h: Float[Tensor, "*batch d"], distance: float | Float[Tensor, "*#batch"]) -> Float[Tensor, "*batch d"]:
    """Make a vector longer by `distance`, or shorter where it is negative; its direction stays.

        h' = (1 + distance / |h|) h

    At -|h| nothing is left of it; beyond, its direction is turned round. The result has the dtype of h.

    >>> rescale_by(torch.tensor([3.0, 4.0]), -2.5).tolist()
    [1.5, 2.0]

    Raises GeometryError for a zero vector, which has no direction to be longer in (a distance of 0 leaves it).
    Source: as for `rotate_by`.
    """
    change = rescaling_change(h, distance)
    if not change.isfinite().all():
        raise GeometryError("a zero vector has no direction to grow in", cure="leave zero vectors out")
    return (h.to(change.dtype) + change).to(h.dtype)


def rescaling_change(
    h: Float[Tensor, "*batch d"], distance: float | Float[Tensor, "*#batch"]
) -> Float[Tensor, "*batch d"]:
    """What `rescale_by` adds, in float32 (float64 for float64 input); NaN where it is impossible."""
    _, near_one, _ = prepare(h, h)
    d, length = column(distance, near_one), norm(near_one)
    change: Tensor = d * (near_one / length)
    return torch.where(torch.as_tensor(d == 0, device=change.device), torch.zeros_like(change), change)


def sum_error(parts: Sequence[Tensor], whole: Tensor) -> float:
    """How far parts are from adding up: max over tokens of |sum of parts - whole| / the largest norm among them.

    In float64; inf when the shapes differ, NaN when something is not finite.
    """
    if any(part.shape != whole.shape for part in parts):
        return float("inf")
    vectors = [part.cpu().double() for part in (*parts, whole)]  # MPS has no float64
    gap = torch.stack(vectors[:-1]).sum(0) - vectors[-1]
    size = torch.stack([vector.norm(dim=-1) for vector in vectors]).amax(0)
    return float((gap.norm(dim=-1) / size.clamp_min(torch.finfo(torch.float64).tiny)).max())
