"""One step of compression: change the matrices of a fresh copy, see that they changed, and write down what was done.

Sizes are what the model takes when it is stored as its method means it to be: a matrix of b bits in groups of g takes
b + 32/g bits per weight (16 for each scale and zero point), one of density p takes 16 p, and a bit per weight that
says which are kept, a product of rank r what its two factors take. Everything else (embeddings, norms, biases, layers
that were left alone) counts 16 bits per weight, whatever dtype it is loaded in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lens_geometry.compress.matrices import Matrix, blocks, matrices
from lens_geometry.compress.plain import fresh_copy, is_hooked, returned
from lens_geometry.compressed import DENSE_BITS, Compression, Storage, compression_state
from lens_geometry.errors import CompressionError
from lens_geometry.provenance import COMPRESSION
from lens_geometry.sites import choose_layers

Change = Callable[[Matrix, Float[Tensor, "out in"], Storage], tuple[Float[Tensor, "out in"], Storage]]
"""A matrix, its weights in float32 at least and how it was stored -> new weights and how they are stored."""


@dataclass(frozen=True)
class Step:
    """What a method says of itself."""

    method: str
    settings: Mapping[str, Any]
    sparsity: float | None = None


class Work:
    """A model that is being compressed.

    Attributes:
        model: the one that was given, which stays as it is.
        copied: its copy, whose weights are changed.
        layers: the chosen ones.
    """

    def __init__(self, model: Any, layers: Any = None) -> None:
        self.started = time.perf_counter()
        self.model, self.copied = model, fresh_copy(model)
        self.before = compression_state(model)
        self.n_layers = len(blocks(self.copied))
        self.layers = choose_layers(layers, self.n_layers)
        self.storage: dict[str, Storage] = dict(self.before.storage) if self.before else {}
        self.errors: dict[str, tuple[float, float]] = {}
        self.dense_bytes = int(self.before.record["dense_bytes"]) if self.before else dense_bytes(self.copied)

    def matrices(self) -> list[Matrix]:
        """Of the chosen layers."""
        return [matrix for matrix in matrices(self.copied) if matrix.layer in self.layers]

    @torch.no_grad()
    def change(self, change: Change, only: Sequence[Matrix] | None = None) -> None:
        """Change every chosen matrix, or some.

        Raises CompressionError when none differs afterwards, or new weights are not finite.
        """
        changed = False
        for matrix in self.matrices() if only is None else only:
            weight = matrix.read()
            stored = self.storage.get(matrix.key, Storage())
            new, self.storage[matrix.key] = change(matrix, weight.to(working_dtype(weight)), stored)
            if not bool(torch.isfinite(new).all()):
                raise CompressionError(
                    "its new weights are not finite", where=matrix.name, cure="check the model and the calibration text"
                )
            new, before = new.to(weight.dtype), weight.double()
            self.errors[matrix.key] = (
                float((new.double() - before).square().sum()),
                float(before.square().sum()),
            )
            changed = changed or not torch.equal(new, weight)
            matrix.write(new)
        if not changed:
            raise CompressionError(
                "not one weight of the selected layers changed", cure="choose other settings, or other layers"
            )

    def done(self, step: Step, *, calibration: Any = None) -> Any:
        """The compressed model, of the class that was given, with the record of what was done."""
        return finished(self, step, calibration)


def working_dtype(weight: Tensor) -> torch.dtype:
    """Float32, or float64 for weights of that dtype."""
    return torch.promote_types(weight.dtype, torch.float32)


def dense_bytes(model: Any) -> int:
    """16 bits for each weight; biases that are all zero, which some classes add, do not count."""
    counted = 0
    for name, weight in model.named_parameters():  # tied ones are named once
        bias = name.rsplit(".", 1)[-1].lstrip("_").startswith("b")
        counted += 0 if bias and not bool(weight.any()) else weight.numel()
    if is_hooked(model) and "W_U" in model.unembed._parameters and torch.equal(model.W_U.T, model.W_E):
        counted -= model.W_U.numel()  # tied, though this class keeps two
    return counted * DENSE_BITS // 8


def finished(work: Work, step: Step, calibration: Any) -> Any:
    """Give the copy its class and its record back."""
    found = matrices(work.copied)
    sizes = {matrix.key: matrix.read().numel() for matrix in found}
    bits = sum(size * work.storage.get(key, Storage()).bits_per_weight for key, size in sizes.items())
    weights = sum(sizes.values())
    record: dict[str, Any] = {
        "method": step.method,
        "settings": dict(step.settings),
        "layers": list(work.layers),
        "bits_per_weight": bits / weights,
        "sparsity": step.sparsity,
        "size_bytes": round(dense_bytes(work.copied) - (weights * DENSE_BITS - bits) / 8),
        "dense_bytes": work.dense_bytes,
        "weight_error": _weight_error(found, work.errors),
        "calibration": None if calibration is None else calibration.about,
        "seconds": time.perf_counter() - work.started,
    }
    windows = None if calibration is None else calibration.windows
    if work.before is not None:
        earlier = work.before.record
        record["steps"] = [*earlier.get("steps", [dict(earlier)]), dict(record)]
        known = [found for found in (work.before.windows, windows) if found is not None]
        windows = np.unique(np.concatenate(known), axis=0) if known else None
    new = returned(work.model, work.copied)
    new.__dict__[COMPRESSION] = Compression(record, work.storage, windows)
    return new


def _weight_error(found: Sequence[Matrix], errors: Mapping[str, tuple[float, float]]) -> float | None:
    """|W' - W|_F / |W|_F over all matrices of the blocks, W before this step; None where matrices were not changed."""
    if not errors:
        return None
    same = [matrix.read().double().square().sum() for matrix in found if matrix.key not in errors]
    total = sum(before for _, before in errors.values()) + float(sum(same))
    return float((sum(wrong for wrong, _ in errors.values()) / total) ** 0.5) if total else None


def stored_sparse(stored: Storage, density: float) -> Storage:
    """Of a matrix that was made sparse, whatever its weights are rounded to."""
    return replace(stored, density=min(stored.density, density), factors=None)
