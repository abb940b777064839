"""What a perturbation really did: every token's distance from where it was, measured on what the model was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Displacements:
    """Running summary of realised displacements, to be passed as `perturb(..., record=Displacements())`.

    Distances are between the activation that the model gave and the one it got back, in its own dtype, computed in
    float64. Only tokens that were to be moved are counted.
    """

    def __init__(self) -> None:
        self.n = self.n_clipped = self.n_flipped = 0
        self.total = self.total_relative = self.total_norm_change = self.largest_error = 0.0
        self.by_layer: dict[int, tuple[int, float]] = {}

    @torch.no_grad()
    def __call__(
        self, layer: int, before: Tensor, after: Tensor, wanted: Tensor, chosen: Tensor, clipped: Tensor
    ) -> None:
        """Add one layer's tokens of one batch; see `edits.perturbing.Record`."""
        if before.device.type == "mps":  # which has no float64
            before, after, wanted, chosen = (x.cpu() for x in (before, after, wanted, chosen))
        h, moved = before[chosen].double(), after[chosen].double()
        if not len(h):
            return
        distance, asked = (moved - h).norm(dim=-1), wanted[chosen].double()
        error, norm = (distance - asked).abs() / asked, h.norm(dim=-1)
        self.n += len(h)
        self.total += float(distance.sum())
        self.total_relative += float((distance / norm).sum())
        self.total_norm_change += float((moved.norm(dim=-1) / norm - 1).abs().sum())
        self.largest_error = max(self.largest_error, float(error.max()))
        self.n_clipped += int(clipped.sum())
        self.n_flipped += int((torch.linalg.vecdot(h, moved) < 0).sum())
        count, total = self.by_layer.get(layer, (0, 0.0))
        self.by_layer[layer] = (count + len(h), total + float(distance.sum()))

    def summary(self) -> dict[str, Any]:
        """Plain numbers for a table.

        `displacement_mean` (in the model's units), `displacement_relative` (over the token's own norm, mean),
        `displacement_max_error` (largest relative error against what was asked of a token; under matching="mean"
        tokens differ by design), `norm_change_mean` (|h'| / |h| - 1, mean of sizes), and counts: `n_places` moved,
        `n_clipped` of them less than asked, `n_flipped` with a component against what they were. NaN where nothing
        was moved.
        """
        n = self.n or float("nan")
        return {
            "displacement_mean": self.total / n,
            "displacement_relative": self.total_relative / n,
            "displacement_max_error": self.largest_error if self.n else float("nan"),
            "norm_change_mean": self.total_norm_change / n,
            "n_places": self.n,
            "n_clipped": self.n_clipped,
            "n_flipped": self.n_flipped,
        }
