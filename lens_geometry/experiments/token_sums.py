"""Numbers per token put into running sums: what is finite is summed, what is not is counted."""

from __future__ import annotations

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from lens_geometry.stats import Floats, RunningSummary


def add_tokens(
    summary: RunningSummary,
    values: Float[Tensor, "metric batch pos group"],
    real: Bool[Tensor, "batch pos 1"],
    weights: Floats,
) -> None:
    """Add a batch's tokens, those of `real`, to a summary; `weights` are the batch's `poisson_weights`."""
    values = values.double()
    finite = torch.isfinite(values) & real
    kept = torch.where(finite, values, 0.0)

    def per_sequence(x: Tensor) -> Floats:
        return rearrange(x.double().sum(2), "metric batch group -> batch group metric").numpy()

    def per_group(x: Tensor) -> NDArray[np.int64]:
        return rearrange((x & real).sum((1, 2)), "metric group -> group metric").numpy()

    summary.add(per_sequence(finite), per_sequence(kept), per_sequence(kept.square()), weights)
    summary.infinite += per_group(values.isinf())
    summary.undefined += per_group(values.isnan())
