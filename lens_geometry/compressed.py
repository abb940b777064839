"""What a compressed model knows of its compression: the record that `describe` shows, sizes, calibration windows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lens_geometry.errors import ModelError
from lens_geometry.provenance import COMPRESSION

COMPRESSION_FILE, WINDOWS_FILE, FORMAT = "compression.json", "calibration-windows.npy", 1

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


def write_compression(directory: Path, state: Compression) -> None:
    """Write `compression.json`, and `calibration-windows.npy` where there was a calibration text."""
    storage = {key: asdict(stored) for key, stored in state.storage.items()}
    text = json.dumps({"format": FORMAT, "record": dict(state.record), "storage": storage}, indent=2)
    (directory / COMPRESSION_FILE).write_text(text + "\n", encoding="utf-8")
    if state.windows is not None:
        np.save(directory / WINDOWS_FILE, state.windows, allow_pickle=False)


def attach_compression(model: Any, directory: Path) -> None:
    """Let a model that was loaded from a directory know how it was compressed, if that is written there.

    Raises ModelError for files that cannot be read.
    """
    path = directory / COMPRESSION_FILE
    if not path.is_file():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"format {found['format']!r}")
        storage = {key: Storage(**stored) for key, stored in found["storage"].items()}
        windows = directory / WINDOWS_FILE
        hashes = np.load(windows, allow_pickle=False) if windows.is_file() else None
        if hashes is not None and (hashes.dtype != np.uint64 or hashes.ndim != 2 or hashes.shape[1] != 2):
            raise ValueError(f"{WINDOWS_FILE} holds no hashes")
        record = dict(found["record"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"how this model was compressed cannot be read ({type(error).__name__}: {error})",
            where=str(path),
            cure=f"copy the model again, whole, or remove {COMPRESSION_FILE} to load its weights alone",
        ) from error
    model.__dict__[COMPRESSION] = Compression(record, storage, hashes)
