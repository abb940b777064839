"""What an edit is told of the batch being run, and noise that is the same for a sequence in whatever batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_geometry.errors import HookError

When = Literal["always", "prompt", "new"]
WHEN: tuple[When, ...] = get_args(When)


@dataclass
class Batch:
    """What is being run, for edits that draw noise or tell prompt from new tokens. A runner changes it per batch.

    With `ids` a sequence has its own noise wherever it stands; without, row i of every batch gets the noise
    of sequence i; rows with the same id get the same noise. `prompt_length` is the number of places that the prompt
    takes in every row, left padding included. `real` says which tokens are no padding; None, that all are real.
    """

    ids: Sequence[int] | None = None
    prompt_length: int | None = None
    real: Bool[Tensor, "batch pos"] | None = None

    def generators(self, rows: int, seed: int, layer: int) -> list[torch.Generator]:
        """One for each row of a batch. Raises HookError when `ids` are those of another batch."""
        return [sequence_generator(seed, layer, number) for number in self.numbers(rows)]

    def numbers(self, rows: int) -> Sequence[int]:
        """The sequence number of each row. Raises HookError when `ids` are those of another batch."""
        ids = self.ids if self.ids is not None else range(rows)
        if len(ids) != rows:
            raise HookError(f"Batch has {len(ids)} ids for {rows} sequences", cure="set ids for each batch that is run")
        return ids

    def edited_places(self, when: When, length: int, where: str) -> slice:
        """Which places of a pass over `length` tokens an edit with `when` changes.

        A pass of several tokens starts at position 0: it is the prompt, or the whole sequence without a cache. A
        pass of one token is a new token with a cache. Raises HookError where that cannot be known.
        """
        if when == "always":
            return slice(None)
        prompt = self.prompt_length
        if isinstance(prompt, bool) or not isinstance(prompt, int) or prompt < 1:
            raise HookError(
                f"an edit with when={when!r} has to know how long the prompt is, and prompt_length is {prompt!r}",
                where=where,
                cure="pass batch=Batch(prompt_length=...), the number of tokens in the prompt",
            )
        if length == 1 and prompt == 1:
            raise HookError(
                f"with a prompt of one token, a pass of one token may be prompt or new, and when is {when!r}",
                where=where,
                cure="use a prompt of two tokens or more (a BOS counts), or when='always'",
            )
        if 1 < length < prompt:
            raise HookError(
                f"this pass is {length} tokens long, which is neither the whole prompt of {prompt} nor one new token",
                where=where,
                cure="set Batch.prompt_length to the prompt that is run, and run it in one pass",
            )
        first_new = 0 if length == 1 else prompt
        return slice(first_new, None) if when == "new" else slice(0, first_new)


def check_when(when: str, batch: Batch | None, site: str) -> None:
    """Raise HookError for an unknown `when`, and for one that is to know a prompt of which nothing was said."""
    if when not in WHEN:
        raise HookError(f"there is no when={when!r}", cure=f"choose one of {', '.join(WHEN)}")
    if batch is not None and not isinstance(batch, Batch):
        raise HookError(f"batch is {batch!r}", where=f"site {site}", cure="pass batch=Batch(prompt_length=...)")
    if when != "always" and batch is None:
        raise HookError(
            f"an edit with when={when!r} has to know how long the prompt is",
            where=f"site {site}",
            cure="pass batch=Batch(prompt_length=...), the number of tokens in the prompt",
        )


class SharedNoise(Batch):
    """Every sequence has the same noise, whatever batch it is run in and whoever runs it."""

    def numbers(self, rows: int) -> Sequence[int]:
        """One number for all."""
        return [-1] * rows


def sequence_generator(seed: int, layer: int, sequence: int) -> torch.Generator:
    """The random generator of one sequence at one layer, on the CPU: the same on every machine."""
    digest = blake2b(f"{seed}/{layer}/{sequence}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def normal_noise(like: Tensor, batch: Batch, seed: int, layer: int) -> Tensor:
    """Standard normal noise of the shape and on the device of `like` [batch, ...], float32 or float64."""
    numbers = batch.numbers(len(like))
    drawn = {
        n: torch.randn(like.shape[1:], generator=sequence_generator(seed, layer, n)) for n in dict.fromkeys(numbers)
    }
    return torch.stack([drawn[n] for n in numbers]).to(like.device, torch.promote_types(like.dtype, torch.float32))


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


Draw = Literal["normal", "sign", "uniform"]
STREAMS: dict[Draw, int] = {"normal": 4, "sign": 5, "uniform": 6}  # apart, so that one seed serves all


def token_noise(
    like: Float[Tensor, "batch pos *rest"], batch: Batch, draw: Draw, *, seed: int, layer: int | None, shared: bool
) -> Float[Tensor, "batch pos *rest"]:
    """Noise whose first places are the same however long the sequence is: standard normal, +1 or -1, or in [0, 1).

    `layer=None` draws for all layers alike, and `shared` for all sequences alike. Unlike `normal_noise`, padding and
    what follows a token change nothing, so that the two sentences of a minimal pair have the same noise up to where
    they differ. Drawn on the CPU; float32, or float64 for float64.
    """
    stream = (seed, STREAMS[draw], *(() if layer is None else (layer,)))
    length, rest = like.shape[1], like.shape[2:]

    def drawn(*sequence: int) -> Tensor:
        generator = np.random.default_rng((*stream, len(stream), *sequence))
        if draw == "normal":
            return torch.from_numpy(generator.standard_normal((length, *rest), dtype=np.float32))
        chance = torch.from_numpy(generator.random((length, *rest), dtype=np.float32))
        return chance if draw == "uniform" else torch.where(chance < 0.5, -1.0, 1.0)

    numbers = batch.numbers(len(like))
    if shared:
        noise = drawn().expand(like.shape)
    else:
        rows = {number: drawn(number) for number in dict.fromkeys(numbers)}
        noise = torch.stack([rows[number] for number in numbers])
    return noise.to(like.device, torch.promote_types(like.dtype, torch.float32))
