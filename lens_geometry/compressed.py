"""What a compressed model knows of its compression: the record that `describe` shows, sizes, calibration windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lens_geometry.provenance import COMPRESSION

DENSE_BITS = 16
"""Bits of a weight that was not compressed, and of a group's scale and zero point, whatever dtype was loaded."""


@dataclass(frozen=True)
class Storage:
    """What one matrix takes when it is stored as its method means it to be.

    Attributes:
        bits: of a weight that is kept.
        density: share of the weights that are kept; below 1 a bit per weight says which. 0 takes nothing.
        scales: bits per weight of the groups' scales and zero points.
        factors: bits per weight of a product of two thin matrices, instead of all of this; None for no such product.
    """

    bits: float = DENSE_BITS
    density: float = 1.0
    scales: float = 0.0
    factors: float | None = None

    @property
    def bits_per_weight(self) -> float:
        if self.factors is not None:
            return self.factors
        return self.density * self.bits + (0 < self.density < 1) + self.scales


@dataclass(frozen=True)
class Compression:
    """What was done to a model's weights.

    Attributes:
        record: what `describe(model)["compression"]` shows.
        storage: by matrix.
        windows: of the calibration text, rows of (tokens in a window, its hash); None where nothing was calibrated.
    """

    record: Mapping[str, Any]
    storage: Mapping[str, Storage] = field(default_factory=dict)
    windows: np.ndarray[Any, np.dtype[np.uint64]] | None = None


def compression_state(model: Any) -> Compression | None:
    """The whole of it, for the next step and for saving; None for a model that was not compressed."""
    return model.__dict__.get(COMPRESSION)  # type: ignore[no-any-return]
