"""Noise that is the same for a sequence whatever batch, order or device it is run in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass
class Batch:
    """Which sequences are being run, for edits that draw noise. A runner changes it batch by batch.

    With `ids` a sequence has its own noise wherever it stands; without, row i of every batch gets the noise
    of sequence i. `mask` [batch, pos] keeps padding out of shuffles.
    """

    ids: Sequence[int] | None = None
    mask: Bool[Tensor, "batch pos"] | None = None

    def generators(self, rows: int, seed: int, layer: int) -> list[torch.Generator]:
        ids = self.ids if self.ids is not None else range(rows)
        return [sequence_generator(seed, layer, ids[row]) for row in range(rows)]


def sequence_generator(seed: int, layer: int, sequence: int) -> torch.Generator:
    """The random generator of one sequence at one layer, on the CPU: the same on every machine."""
    digest = blake2b(f"{seed}/{layer}/{sequence}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def normal_noise(like: Tensor, batch: Batch, seed: int, layer: int) -> Tensor:
    """Standard normal noise of the shape and on the device of `like` [batch, ...], float32 or float64."""
    rows = [torch.randn(like.shape[1:], generator=g) for g in batch.generators(len(like), seed, layer)]
    return torch.stack(rows).to(like.device, torch.promote_types(like.dtype, torch.float32))


def shuffled_tokens(
    vectors: Float[Tensor, "batch pos ..."], batch: Batch, seed: int, layer: int
) -> Float[Tensor, "batch pos ..."]:
    """Every vector from another real token of the same sequence; position 0 and padding stay in place."""
    rows = []
    for row, generator in enumerate(batch.generators(len(vectors), seed, layer)):
        order = torch.arange(vectors.shape[1])
        places = order[1:] if batch.mask is None else torch.nonzero(batch.mask[row].cpu()).flatten()[1:]
        turn = places[torch.randperm(len(places), generator=generator)]
        order[turn] = turn.roll(1)  # a random cycle: no token keeps its own
        rows.append(vectors[row, order.to(vectors.device)])
    return torch.stack(rows)
