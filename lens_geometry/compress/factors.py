"""Low rank: every matrix as a product of two thin ones, the nearest to its weights or, with calibration, its output."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_geometry.compress.calibrating import Listening, calibration_of
from lens_geometry.compress.matrices import Matrix
from lens_geometry.compress.records import Step, Work
from lens_geometry.compressed import DENSE_BITS, Storage
from lens_geometry.errors import CompressionError


def truncate(
    weight: Float[Tensor, "out in"], rank: int, products: Float[Tensor, "in in"] | None = None
) -> Float[Tensor, "out in"]:
    """The matrix of at most that rank nearest to the weights, or whose output is nearest to theirs.

    With C = sum of x x^T over the inputs x and C = L L^T, the smallest sum of |W x - W' x|^2 has the singular value
    decomposition of W L, cut to `rank`, times L^-1; with U its first left singular vectors that is U U^T W, which no
    inverse is needed for: C may be singular. In float64.

    Args:
        weight: [out, in].
        rank: from 1 to min(out, in).
        products: C, or None for the nearest weights (C the identity).
    """
    working = weight.double()
    if products is None:
        output = working
    else:
        values, vectors = torch.linalg.eigh(products.double())
        output = working @ (vectors * values.clamp_min(0).sqrt())  # a root of C, as L is
    left = torch.linalg.svd(output, full_matrices=False).U[:, :rank]
    return (left @ (left.T @ working)).to(weight.dtype)


def low_rank(model: Any, *, share: float = 0.5, calibration: Any = None, layers: Any = None) -> Any:
    """A new model whose blocks' matrices have a share of their rank.

    Half the rank of a square matrix takes as many numbers as all of it; `describe` gives the size.

    Args:
        model: a TransformerLens model, or a Hugging Face one; it stays as it is.
        share: of the rank min(out, in) of each matrix, above 0 and below 1.
        calibration: text or tokens whose outputs are to stay near; None for the nearest weights.
        layers: None for all, or which ("4-11", [0, 3]).

    Raises:
        CompressionError: a share outside (0, 1), one that leaves a matrix without rank, or inputs that are not finite.
        DataError: a calibration text that cannot be used.
        SiteError: layers that the model does not have.
        ModelError: a model whose weights cannot be copied or are no matrices.
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise CompressionError(f"{share!r} is no share of a rank", cure="above 0 and below 1, such as 0.5")
    text = None if calibration is None else calibration_of(model, calibration)
    work = Work(model, layers)
    heard = None if text is None else Listening(work.copied, work.matrices(), text, products=True)

    def change(matrix: Matrix, weight: Tensor, stored: Storage) -> tuple[Tensor, Storage]:
        rank = round(share * min(weight.shape))
        if rank < 1:
            raise CompressionError(
                f"{share:g} of {min(weight.shape)} is a rank of 0", where=matrix.name, cure="give a larger share"
            )
        new = truncate(weight, rank, None if heard is None else heard.products[matrix.key])
        return new, Storage(factors=DENSE_BITS * rank * sum(weight.shape) / weight.numel())

    work.change(change)
    return work.done(Step("low-rank", {"share": float(share)}), calibration=text)
