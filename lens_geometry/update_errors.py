"""How far a compressed model's update is from the dense one, per token. Knows no model and no hook.

    e = u' - u      split against u:  e_par along u (u' is u made longer or shorter), e_perp beside it (u' is turned)

Source: "Disentangling Representation Evolution in Transformers through Directional Decomposition".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lens_geometry.geometry import lengths
from lens_geometry.vectors import norm

ERRORS = (
    "error",
    "perpendicular_error",
    "parallel_error",
    "parallel_shift",
    "perpendicular_share",
    "parallel_share",
    "update_cosine_distance",
    "error_over_reference",
    "perpendicular_error_over_reference",
)
DENSE = ("update_over_reference", "reference_cosine_distance", "cosine_link")


class ErrorLengths(NamedTuple):
    """The numbers per token that every metric of an error is computed from (float32 or float64)."""

    shift: Float[Tensor, "*batch"]
    """Signed: <e, u> / |u|^2, by how much of itself the update has become longer along itself."""
    error: Float[Tensor, "*batch"]
    parallel: Float[Tensor, "*batch"]
    perpendicular: Float[Tensor, "*batch"]
    update: Float[Tensor, "*batch"]
    compressed: Float[Tensor, "*batch"]
    reference: Float[Tensor, "*batch"]


class DenseLengths(NamedTuple):
    """The same for the dense update against its reference x."""

    update: Float[Tensor, "*batch"]
    reference: Float[Tensor, "*batch"]
    along: Float[Tensor, "*batch"]
    """Signed length of x + u_par along x."""
    perpendicular: Float[Tensor, "*batch"]


def error_lengths(
    update: Float[Tensor, "*batch d"],
    compressed: Float[Tensor, "*batch d"],
    reference: Float[Tensor, "*batch d"],
) -> ErrorLengths:
    """The lengths of e = compressed - update and of its parts along and beside the update.

    The difference is taken in float32 at least (float64 for float64 input). A zero update has no direction:
    all of the error is perpendicular to it. Raises GeometryError as `decompose` does.
    """
    working = torch.promote_types(update.dtype, torch.float32)
    u, other = update.to(working), compressed.to(working)
    found = lengths(other - u, u)
    return ErrorLengths(
        shift=found.alpha,
        error=found.update,
        parallel=found.parallel,
        perpendicular=found.perpendicular,
        update=found.reference,
        compressed=norm(other).squeeze(-1),
        reference=norm(reference.to(working)).squeeze(-1),
    )


def dense_lengths(update: Float[Tensor, "*batch d"], reference: Float[Tensor, "*batch d"]) -> DenseLengths:
    """The lengths of an update and of its parts against its reference. Raises GeometryError as `decompose` does."""
    found = lengths(update, reference)
    return DenseLengths(found.update, found.reference, found.reference * (1 + found.alpha), found.perpendicular)


def error_metrics(found: ErrorLengths) -> dict[str, Tensor]:
    """The named numbers of each token, one tensor of shape `batch` for each name in `ERRORS`.

    | name | value |
    |---|---|
    | `error`, `perpendicular_error`, `parallel_error` | norms of e, e_perp, e_par / norm of u |
    | `parallel_shift` | signed, <e, u> / abs(u)^2; -1 where the update is gone |
    | `perpendicular_share`, `parallel_share` | squares of the parts' norms / square of e's; they sum to 1 |
    | `update_cosine_distance` | 1 - cos(u, u') |
    | `error_over_reference`, `perpendicular_error_over_reference` | norms of e, e_perp / norm of x |

    Shares of no error, the cosine of a zero vector and 0 / 0 are NaN ("undefined"); an error where the update is zero
    is infinitely large.
    """
    turned = cosine_distance(found.update * (1 + found.shift), found.perpendicular)
    has_direction = (found.compressed > 0) & (found.update > 0)
    return {
        "error": found.error / found.update,
        "perpendicular_error": found.perpendicular / found.update,
        "parallel_error": found.parallel / found.update,
        "parallel_shift": torch.where(found.update > 0, found.shift, torch.nan),
        "perpendicular_share": (found.perpendicular / found.error).square(),
        "parallel_share": (found.parallel / found.error).square(),
        "update_cosine_distance": torch.where(has_direction, turned, torch.nan),
        "error_over_reference": found.error / found.reference,
        "perpendicular_error_over_reference": found.perpendicular / found.reference,
    }


def dense_metrics(found: DenseLengths) -> dict[str, Tensor]:
    """The named numbers of each token, one tensor of shape `batch` for each name in `DENSE`.

    | name | value |
    |---|---|
    | `update_over_reference` | norm of u / norm of x |
    | `reference_cosine_distance` | 1 - cos(x, x + u): how far the update turns what it is added to |
    | `cosine_link` | 0.5 (abs(u_perp) / abs(x + u_par))^2, what that is close to where it is small |
    """
    return {
        "update_over_reference": found.update / found.reference,
        "reference_cosine_distance": cosine_distance(found.along, found.perpendicular),
        "cosine_link": 0.5 * (found.perpendicular / found.along).square(),
    }


def cosine_distance(along: Float[Tensor, "*batch"], beside: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """1 - cos of the angle to a direction that a vector has so much along (signed) and beside; no digit is cancelled.

    NaN for the zero vector, which has no angle.

    >>> cosine_distance(torch.tensor([1.0, 0.0, -2.0]), torch.tensor([0.0, 3.0, 0.0])).tolist()
    [0.0, 1.0, 2.0]
    """
    distance = 2 * (torch.atan2(beside, along) / 2).sin().square()
    return torch.where((along == 0) & (beside == 0), torch.nan, distance)


def error_squares(found: ErrorLengths) -> ErrorLengths:
    """What is summed over tokens for `pooled_errors`: the lengths' squares, and <e, u> for the shift; float64."""
    wide = ErrorLengths(*(part.double() for part in found))
    return ErrorLengths(wide.shift * wide.update.square(), *(part.square() for part in wide[1:]))


def pooled_errors(sums: ErrorLengths) -> dict[str, Tensor]:
    """The metrics of root-sum-squares over tokens, from sums of `error_squares`; the cosine distance has none."""
    return {
        "error": (sums.error / sums.update).sqrt(),
        "perpendicular_error": (sums.perpendicular / sums.update).sqrt(),
        "parallel_error": (sums.parallel / sums.update).sqrt(),
        "parallel_shift": sums.shift / sums.update,
        "perpendicular_share": sums.perpendicular / sums.error,
        "parallel_share": sums.parallel / sums.error,
        "error_over_reference": (sums.error / sums.reference).sqrt(),
        "perpendicular_error_over_reference": (sums.perpendicular / sums.reference).sqrt(),
    }


def dense_squares(found: DenseLengths) -> DenseLengths:
    """What is summed over tokens for `pooled_dense`: the lengths' squares; float64."""
    return DenseLengths(*(part.double().square() for part in found))


def pooled_dense(sums: DenseLengths) -> dict[str, Tensor]:
    """The metrics of root-sum-squares over tokens, from sums of `dense_squares`; the cosine distance has none."""
    return {
        "update_over_reference": (sums.update / sums.reference).sqrt(),
        "cosine_link": 0.5 * sums.perpendicular / sums.along,
    }
