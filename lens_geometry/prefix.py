"""Running a model from a stored stream: what comes before an edited layer is computed once and used again.

The blocks before it are stepped over: each hands its input on, and the last of them returns the stored stream. It
works on every class of model, where TransformerLens' `start_at_layer` does not (a bridge of 3.9 has none, and one of
4.x still runs the earlier blocks).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lens_geometry.anatomy import alone, at_rest, attached, hook_points, inspect, probe_tokens
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
        for block in blocks:
            block.__dict__.pop("forward", None)


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
    layers = sorted({1, inspect(model).n_layers - 1} - {0})
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
