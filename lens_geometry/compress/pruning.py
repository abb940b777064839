"""Pruning: the weights that matter least become zero. By their size alone, or by what their inputs make of them."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from lens_geometry.compress.calibrating import Listening, calibration_of
from lens_geometry.compress.matrices import Matrix
from lens_geometry.compress.records import Step, Work, stored_sparse
from lens_geometry.compressed import Storage
from lens_geometry.errors import CompressionError


def smallest(scores: Float[Tensor, "out in"], sparsity: float) -> Bool[Tensor, "out in"]:
    """Where the `sparsity` share of the whole matrix with the smallest scores is; of equal scores the first ones."""
    return _lowest(scores.reshape(1, -1), round(sparsity * scores.numel())).reshape(scores.shape)


def smallest_of_rows(scores: Float[Tensor, "out in"], sparsity: float) -> Bool[Tensor, "out in"]:
    """The same for every row (output) by itself, rounded down to whole weights."""
    return _lowest(scores, int(sparsity * scores.shape[1]))


def smallest_of_groups(scores: Float[Tensor, "out in"], pattern: str) -> Bool[Tensor, "out in"]:
    """The same in every group along the inputs: with "2:4", two of four consecutive weights go.

    Raises CompressionError for a pattern that is none, or whose groups do not divide the inputs.
    """
    kept, size = parse_pattern(pattern)
    if scores.shape[1] % size:
        raise CompressionError(
            f"groups of {size} do not divide {scores.shape[1]} inputs",
            cure="another pattern, or a sparsity without one",
        )
    groups = rearrange(scores, "out (group each) -> (out group) each", each=size)
    return _lowest(groups, size - kept).reshape(scores.shape)


def pruned_share(sparsity: float, pattern: str | None) -> float:
    """The share of weights that go. Raises CompressionError for one outside (0, 1) or a pattern that is none."""
    if pattern is not None:
        kept, size = parse_pattern(pattern)
        return 1 - kept / size
    if isinstance(sparsity, bool) or not isinstance(sparsity, int | float) or not 0 <= sparsity < 1:
        raise CompressionError(f"a sparsity of {sparsity!r} is none", cure="a share above 0 and below 1, such as 0.5")
    if sparsity == 0:
        raise CompressionError("with a sparsity of 0 there is nothing to prune", cure="a share such as 0.5")
    return float(sparsity)


def parse_pattern(pattern: str) -> tuple[int, int]:
    """How many weights stay of how many: "2:4" -> (2, 4). Raises CompressionError."""
    kept, colon, size = str(pattern).partition(":")
    if not (colon and kept.isdecimal() and size.isdecimal() and 0 < int(kept) < int(size)):
        raise CompressionError(f"{pattern!r} is no pattern", cure='"2:4" or "4:8": how many stay of how many')
    return int(kept), int(size)


def magnitude(model: Any, *, sparsity: float = 0.5, pattern: str | None = None, layers: Any = None) -> Any:
    """A new model without its smallest weights: of every matrix the same share, or n of m consecutive inputs.

    Args:
        model: a TransformerLens model, or a Hugging Face one; it stays as it is.
        sparsity: share of a matrix that becomes zero; not used where there is a pattern.
        pattern: "2:4" or "4:8": how many weights stay of how many along the inputs.
        layers: None for all, or which ("4-11", [0, 3]).

    Raises:
        CompressionError: a sparsity outside (0, 1), a pattern that does not fit, or nothing that changed.
        SiteError: layers that the model does not have.
        ModelError: a model whose weights cannot be copied or are no matrices.
    """
    share, work = pruned_share(sparsity, pattern), Work(model, layers)

    def change(matrix: Matrix, weight: Tensor, stored: Storage) -> tuple[Tensor, Storage]:
        away = smallest(weight.abs(), share) if pattern is None else smallest_of_groups(weight.abs(), pattern)
        return weight.masked_fill(away, 0), stored_sparse(stored, 1 - share)

    work.change(change)
    return work.done(Step("magnitude", {"sparsity": share, "pattern": pattern}, share))


def wanda(
    model: Any, calibration: Any, *, sparsity: float = 0.5, pattern: str | None = None, layers: Any = None
) -> Any:
    """A new model without the weights that matter least for their output: |W| times the norm of its input, row by row.

    Every input's norm is that in the uncompressed model; matrices are not pruned one after another.

    Args:
        model: a TransformerLens model, or a Hugging Face one; it stays as it is.
        calibration: text or tokens to measure the inputs on; never the text of an evaluation.
        sparsity: share of every row (output) that becomes zero; not used where there is a pattern.
        pattern: "2:4" or "4:8": how many weights stay of how many along the inputs.
        layers: None for all, or which ("4-11", [0, 3]).

    Raises:
        CompressionError: a sparsity outside (0, 1), a pattern that does not fit, inputs that are not finite, or nothing
            that changed.
        DataError: a calibration text that cannot be used.
        SiteError: layers that the model does not have.
        ModelError: a model whose weights cannot be copied or are no matrices.
    """
    share, text = pruned_share(sparsity, pattern), calibration_of(model, calibration)
    work = Work(model, layers)
    heard = Listening(work.copied, work.matrices(), text, products=False)

    def change(matrix: Matrix, weight: Tensor, stored: Storage) -> tuple[Tensor, Storage]:
        scores = weight.abs() * heard.squares[matrix.key].sqrt().to(weight.dtype)
        away = smallest_of_rows(scores, share) if pattern is None else smallest_of_groups(scores, pattern)
        return weight.masked_fill(away, 0), stored_sparse(stored, 1 - share)

    work.change(change)
    return work.done(Step("wanda", {"sparsity": share, "pattern": pattern}, share), calibration=text)


def _lowest(scores: Float[Tensor, "row each"], count: int) -> Bool[Tensor, "row each"]:
    away = torch.zeros_like(scores, dtype=torch.bool)
    return away.scatter_(1, scores.argsort(dim=1, stable=True)[:, :count], True)
