"""Running a model from a stored stream: what comes before an edited layer is computed once and used again.

The blocks before it are stepped over: each hands its input on, and the last of them returns the stored stream. It
works on every class of model, where TransformerLens' `start_at_layer` does not (a bridge of 3.9 has none, and one of
4.x still runs the earlier blocks).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lens_geometry.anatomy import alone, at_rest, attached, carried_hooks, hook_points, inspect, probe_tokens
from lens_geometry.data import Tokens
from lens_geometry.edits import Hooks
from lens_geometry.sites import HOOKS


@dataclass
class Shortcut:
    """Where a pass begins: `stream` is hook_resid_pre of `layer`, to be set before each pass."""

    layer: int
    stream: Float[Tensor, "batch pos d_model"] | None = None


@contextmanager
def starting_at(model: Any, layer: int) -> Iterator[Shortcut]:
    """Passes inside begin at a layer, with the shortcut's `stream` as its input; layer 0 is an ordinary pass.

    The ids that are passed still give the lengths, positions and losses. Hooks of the layers before do not fire.
    """
    shortcut, blocks = Shortcut(layer), [model.blocks[i] for i in range(layer)]
    own = [block.__dict__.get("forward") for block in blocks]  # somebody may have put one there
    as_tuple = bool(blocks) and _returns_tuple(model)

    def step_over(last: bool) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs["hidden_states"]
            if last:
                assert shortcut.stream is not None, "set the shortcut's stream before the pass"
                given = shortcut.stream.to(given.device)
            return (given,) if as_tuple else given

        return forward

    try:
        for block in blocks:
            object.__setattr__(block, "forward", step_over(block is blocks[-1]))
        yield shortcut
    finally:
        for block, before in zip(blocks, own, strict=True):
            block.__dict__.pop("forward", None)
            if before is not None:
                object.__setattr__(block, "forward", before)


_tuples: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_exact: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _returns_tuple(model: Any) -> bool:
    """Whether this model's blocks return a tuple, from one small pass."""
    if model not in _tuples:
        seen: list[bool] = []
        handle = model.blocks[0].register_forward_hook(lambda module, args, out: seen.append(isinstance(out, tuple)))
        try:
            with at_rest(model), alone(hook_points(model)):
                model(probe_tokens(model), return_type=None)
        finally:
            handle.remove()
        _tuples[model] = bool(seen and seen[0])
    return _tuples[model]


def can_start_inside(model: Any) -> bool:
    """Whether passes from stored streams give bit-equal logits on this model: tried once on a few tokens."""
    if model not in _exact:
        _exact[model] = _try(model)
    return _exact[model]


def _try(model: Any) -> bool:
    layers = sorted({1, inspect(model).n_layers - 1} & set(range(1, inspect(model).n_layers)))
    streams: dict[int, Tensor] = {}

    def keeper(layer: int) -> Any:
        return lambda tensor, hook: streams.update({layer: tensor.clone()})

    ids = probe_tokens(model)
    with at_rest(model), alone(hook_points(model)):
        with attached(model, [(HOOKS["resid_pre"].format(layer), keeper(layer)) for layer in layers]):
            base = model(ids, return_type="logits")
        for layer in layers:
            with starting_at(model, layer) as shortcut:
                shortcut.stream = streams[layer]
                if not torch.equal(model(ids, return_type="logits"), base):
                    return False
    return True


def is_hooked(model: Any) -> bool:
    """Whether somebody else's hooks are on the model: at its hook points, or PyTorch's own on its blocks."""
    return bool(carried_hooks(model)) or any(b._forward_hooks or b._forward_pre_hooks for b in model.blocks)


class Streams:
    """The unedited model's stream before some layers, kept on the CPU while conditions are run.

    Every layer that a condition starts at is kept, or as many of them, evenly spread, as `most_bytes` hold; none
    where the model does not repeat a pass from a stored stream to the last bit, or carries hooks of its own, which
    would act on a stored stream a second time.
    """

    def __init__(self, model: Any, tokens: Tokens, layers: Sequence[int], *, most_bytes: float = 2e9) -> None:
        wanted = sorted({*layers} - {0})
        self.rows, self.kept = range(0), dict[int, Tensor]()
        anatomy = inspect(model)
        shape = (*tokens.ids.shape, anatomy.d_model)
        room = int(most_bytes // (np.prod(shape) * anatomy.dtype.itemsize))
        if wanted and room and not is_hooked(model) and can_start_inside(model):
            step = -(-len(wanted) // room)
            self.kept = {layer: torch.empty(shape, dtype=anatomy.dtype) for layer in wanted[::step]}

    def keepers(self) -> Hooks:
        """Hooks that store the streams of the batch of `rows`."""

        def keeper(layer: int) -> Callable[..., None]:
            def keep(tensor: Tensor, hook: Any) -> None:
                self.kept[layer][self.rows.start : self.rows.stop] = tensor.detach().cpu()

            return keep

        return [(HOOKS["resid_pre"].format(layer), keeper(layer)) for layer in self.kept]

    def nearest(self, layer: int) -> int:
        """The last layer, at or before this one, that a pass can begin at."""
        return max((kept for kept in self.kept if kept <= layer), default=0)

    def of(self, layer: int, rows: range, copies: int = 1) -> Tensor | None:
        """The stream of some sequences, `copies` times over; None for layer 0."""
        return self.kept[layer][rows.start : rows.stop].repeat(copies, 1, 1) if layer else None
