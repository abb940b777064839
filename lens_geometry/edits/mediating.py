"""Hooks that read what may carry a push to the output: where attention goes, and how far every stream has moved.

A clean pass is kept for as long as its batch is run; edited passes are compared with it token by token, one layer's
activations at a time, and only sums over tokens are left of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_geometry.anatomy import inspect
from lens_geometry.attention_anatomy import query_keys
from lens_geometry.edits.hooks import Hooks
from lens_geometry.metrics import attention_entropy, query_key_alignment
from lens_geometry.sites import HOOKS

ATTENTION = ("attention_entropy", "query_key_alignment", "attention_to_first")
STREAM = ("displacement", "relative_displacement", "angle", "norm_ratio")
BRANCHES = {"attn_out": "attention_output", "mlp_out": "mlp_output"}
BRANCH = tuple(f"{name}_{what}" for name in BRANCHES.values() for what in ("displacement", "relative_displacement"))
GROWTH = ("growth", "growth_of_pushes")
MEDIATORS = (*ATTENTION, *STREAM, *BRANCH, *GROWTH)


class Tally:
    """Sums over a pass's measured tokens and their number, both [sequence, mediator, level].

    Level L is layer L, and the last level the stream that leaves the last layer. What is not finite is left out.
    `clipped` and `flipped` count, for each sequence, places that were moved less than asked or turned right round.
    """

    def __init__(self, measured: Bool[Tensor, "batch pos"], levels: int) -> None:
        self.measured = measured.cpu()
        self.sums = torch.zeros(len(measured), len(MEDIATORS), levels, dtype=torch.float64)
        self.counts = torch.zeros(self.sums.shape, dtype=torch.int64)
        self.clipped, self.flipped = (torch.zeros(len(measured), dtype=torch.int64) for _ in range(2))

    def put(self, mediator: str, level: int, values: Float[Tensor, "batch pos"]) -> None:
        values = values.detach().cpu().double()
        counted = self.measured & values.isfinite()
        place = MEDIATORS.index(mediator)
        self.sums[:, place, level] = torch.where(counted, values, 0.0).sum(1)
        self.counts[:, place, level] = counted.sum(1)


class MediatorReader:
    """Reads the mediators of one model: `keep` a clean pass, then `compare` edited ones with it.

    `start` must be called before every pass. Growth is read where `record` was told of a push (as `record=` of
    `perturb`, whose hooks must come before those of `compare`).

    | mediator | of a token |
    |---|---|
    | `attention_entropy` | nats, mean over heads of the row in which the token is the query |
    | `query_key_alignment` | attention-weighted mean cosine of its query with the keys, mean over heads |
    | `attention_to_first` | its attention to position 0, mean over heads |
    | `displacement`, `relative_displacement` | abs(h' - h), and over abs(h): the stream as its layer reads it |
    | `angle`, `norm_ratio` | between h' and h in degrees; abs(h') / abs(h) |
    | `attention_output_...`, `mlp_output_...` | the same displacements of what the two branches add |
    | `growth` | abs(h' - h)^2 over the mean square of the pushes so far, just after a push |
    | `growth_of_pushes` | the same of the pushes' own sum, as if the layers between had done nothing to it |
    """

    def __init__(self, model: Any) -> None:
        anatomy = inspect(model)
        self.shapes = [facts.shapes for facts in anatomy.layers]
        self.levels = anatomy.n_layers + 1
        self.sources = query_keys(model)
        self.clean: dict[tuple[str, int], Tensor] = {}
        self._seen: list[dict[str, Tensor]] = [{} for _ in self.shapes]
        self.start(torch.zeros(0, 0, dtype=torch.bool))

    def left_out(self) -> list[str]:
        """What this model does not show, in words."""
        missing = {
            "attention entropy and all that needs the pattern": ["pattern" not in shapes for shapes in self.shapes],
            "query-key alignment": [source is None for source in self.sources],
            **{f"the displacement of {name}": [name not in shapes for shapes in self.shapes] for name in BRANCHES},
        }
        return [
            f"{what} left out in {'every layer' if all(lacks) else 'layers ' + _numbers(lacks)}: no hook shows it"
            for what, lacks in missing.items()
            if any(lacks)
        ]

    def start(self, measured: Bool[Tensor, "batch pos"]) -> Tally:
        """Where the coming pass is summed up."""
        self._pushes, self._pushed_at = 0, -1
        self._sum, self._squares = torch.zeros(()), torch.zeros(())
        for seen in self._seen:
            seen.clear()
        self.tally = Tally(measured, self.levels)
        return self.tally

    def keep(self) -> Hooks:
        """For the clean pass: its attention is measured, its streams are kept for `compare`."""

        def keeper(name: str, layer: int) -> Callable[..., None]:
            return lambda tensor, hook: self.clean.update({(name, layer): tensor.detach()})

        streams = [(HOOKS[name].format(layer), keeper(name, layer)) for name, layer in self._streams()]
        return [*streams, *self._attention()]

    def compare(self) -> Hooks:
        """For an edited pass, after the hooks that edit."""

        def comparer(name: str, layer: int) -> Callable[..., None]:
            return lambda tensor, hook: self._compare(name, layer, tensor)

        streams = [(HOOKS[name].format(layer), comparer(name, layer)) for name, layer in self._streams()]
        return [*streams, *self._attention()]

    def record(
        self, layer: int, before: Tensor, after: Tensor, wanted: Tensor, chosen: Tensor, clipped: Tensor
    ) -> None:
        """A push at a layer's input; see `edits.perturbing.Record`."""
        working = torch.promote_types(before.dtype, torch.float32)
        before, after = before.to(working), after.to(working)
        push = after - before
        self.tally.clipped += clipped.sum(1).cpu()
        self.tally.flipped += (chosen & (torch.linalg.vecdot(before, after) < 0)).sum(1).cpu()
        self._pushes, self._pushed_at = self._pushes + 1, layer
        self._sum, self._squares = self._sum + push, self._squares + push.square().sum(-1)

    def _streams(self) -> list[tuple[str, int]]:
        layers = range(self.levels - 1)
        branches = [(name, layer) for layer in layers for name in BRANCHES if name in self.shapes[layer]]
        return [*(("resid_pre", layer) for layer in layers), ("resid_post", self.levels - 2), *branches]

    def _compare(self, name: str, layer: int, tensor: Tensor) -> None:
        clean = self.clean[name, layer]
        working = torch.promote_types(clean.dtype, torch.float32)
        before, after = clean.to(working), tensor.detach().to(working)
        size, distance = before.norm(dim=-1), (after - before).norm(dim=-1)
        if name in BRANCHES:
            self.tally.put(f"{BRANCHES[name]}_displacement", layer, distance)
            self.tally.put(f"{BRANCHES[name]}_relative_displacement", layer, distance / size)
            return
        level = layer + (name == "resid_post")
        self.tally.put("displacement", level, distance)
        self.tally.put("relative_displacement", level, distance / size)
        self.tally.put("angle", level, angle(before, after))
        self.tally.put("norm_ratio", level, after.norm(dim=-1) / size)
        if name == "resid_pre" and layer == self._pushed_at:
            one = self._squares / self._pushes
            self.tally.put("growth", level, distance.square() / one)
            self.tally.put("growth_of_pushes", level, self._sum.square().sum(-1) / one)

    def _attention(self) -> Hooks:
        hooks: Hooks = []
        for layer, shapes in enumerate(self.shapes):
            source = self.sources[layer]
            if "pattern" not in shapes:
                continue
            names = [HOOKS["pattern"].format(layer), *(source.names if source else ())]
            hooks += [(name, self._attention_reader(layer, name, names)) for name in names]
        return hooks

    def _attention_reader(self, layer: int, name: str, names: list[str]) -> Callable[..., None]:
        seen = self._seen[layer]

        def read(tensor: Tensor, hook: Any) -> None:
            seen[name] = tensor.detach()
            if len(seen) < len(names):
                return
            self._measure_attention(layer, dict(seen))
            seen.clear()

        return read

    def _measure_attention(self, layer: int, acts: dict[str, Tensor]) -> None:
        pattern, source = acts[HOOKS["pattern"].format(layer)], self.sources[layer]
        self.tally.put("attention_entropy", layer, attention_entropy(pattern).mean(1))
        self.tally.put("attention_to_first", layer, pattern[..., 0].mean(1))
        if source is not None:
            products = acts[source.scores] / source.scale if source.scores else None
            aligned = query_key_alignment(acts[source.q], acts[source.k], pattern, products)
            self.tally.put("query_key_alignment", layer, aligned.mean(1))


def angle(one: Float[Tensor, "*batch d"], other: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """The angle between two vectors in degrees, exact for small ones too; NaN for a zero vector."""
    a, b = (x / x.norm(dim=-1, keepdim=True) for x in (one, other))
    found: Tensor = 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1)) * (180 / math.pi)
    return found


def _numbers(flags: list[bool]) -> str:
    return ", ".join(str(number) for number, flag in enumerate(flags) if flag)
