"""Noise that is the same for a sequence whatever batch, order or device it is run in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from jaxtyping import Float
from torch import Tensor

from lens_geometry.errors import HookError


@dataclass
class Batch:
    """Which sequences are being run, for edits that draw noise. A runner changes it batch by batch.

    With `ids` a sequence has its own noise wherever it stands; without, row i of every batch gets the noise
    of sequence i.
    """

    ids: Sequence[int] | None = None

    def generators(self, rows: int, seed: int, layer: int) -> list[torch.Generator]:
        """One for each row of a batch. Raises HookError when `ids` are those of another batch."""
        ids = self.ids if self.ids is not None else range(rows)
        if len(ids) != rows:
            raise HookError(f"Batch has {len(ids)} ids for {rows} sequences", cure="set ids for each batch that is run")
        return [sequence_generator(seed, layer, ids[row]) for row in range(rows)]


def sequence_generator(seed: int, layer: int, sequence: int) -> torch.Generator:
    """The random generator of one sequence at one layer, on the CPU: the same on every machine."""
    digest = blake2b(f"{seed}/{layer}/{sequence}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def normal_noise(like: Tensor, batch: Batch, seed: int, layer: int) -> Tensor:
    """Standard normal noise of the shape and on the device of `like` [batch, ...], float32 or float64."""
    rows = [torch.randn(like.shape[1:], generator=g) for g in batch.generators(len(like), seed, layer)]
    return torch.stack(rows).to(like.device, torch.promote_types(like.dtype, torch.float32))


def earlier_tokens(
    vectors: Float[Tensor, "batch pos ..."], batch: Batch, seed: int, layer: int
) -> Float[Tensor, "batch pos ..."]:
    """Every vector from a random earlier token of the same sequence, not the first one where there is a choice.

    Earlier, so that no token learns of those it has to predict. Position 0 keeps its own.
    """
    rows = []
    for row, generator in enumerate(batch.generators(len(vectors), seed, layer)):
        place = torch.arange(vectors.shape[1])
        first = (place > 1).long()
        chance = torch.rand(vectors.shape[1], generator=generator)
        earlier = first + (chance * (place - first)).long()
        rows.append(vectors[row, torch.where(place > 0, earlier, 0).to(vectors.device)])
    return torch.stack(rows)
