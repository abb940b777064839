"""A model run one block at a time, each block on whatever stream it is given.

What is in memory is one block's activations, not a model's: so two models can be run side by side over long text, and a
block of one can be run on the stream of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from lens_geometry.anatomy import at_rest, attached, inspect
from lens_geometry.edits import observe
from lens_geometry.edits.hooks import HookFn, Hooks
from lens_geometry.errors import HookError
from lens_geometry.prefix import can_start_inside, is_hooked, starting_at
from lens_geometry.sites import HOOKS, Site


@dataclass
class BlockRun:
    """What a block was given, what it made of it, and its sites' vectors."""

    before: Float[Tensor, "batch pos d_model"]
    after: Float[Tensor, "batch pos d_model"]
    vectors: dict[str, tuple[Tensor, Tensor]]


class Blocks:
    """The blocks of a model; made by `block_by_block`, inside of which they can be run.

    Where the model does not repeat a pass from a stored stream to the last bit, the blocks before the one that is run
    are run as well, and overruled.
    """

    def __init__(self, model: Any, sites: Sequence[str]) -> None:
        self.model, self.sites, self.n_layers = model, sites, inspect(model).n_layers
        self.steps_over = not is_hooked(model) and can_start_inside(model)
        self._layer = -1  # the block that is being run; the hooks of all others look away
        self._given: Tensor | None = None
        self._instead: Tensor | None = None
        self._seen: dict[str, Any] = {}

    def run(
        self, ids: Int[Tensor, "batch pos"], layer: int, stream: Float[Tensor, "batch pos d_model"] | None = None
    ) -> BlockRun:
        """Run a block on a stream; without one, on what the blocks before it make of the ids.

        Raises HookError when the block did not show its stream.
        """
        seen, _ = self._pass(ids, layer, stream, None, stop_at_layer=layer + 1)
        return BlockRun(**seen)

    def logits(
        self,
        ids: Int[Tensor, "batch pos"],
        layer: int,
        stream: Float[Tensor, "batch pos d_model"] | None = None,
        *,
        instead: Float[Tensor, "batch pos d_model"] | None = None,
    ) -> Float[Tensor, "batch pos vocab"]:
        """Run the blocks from this one on, to the end; `instead` is put in the place of this block's own output."""
        return self._pass(ids, layer, stream, instead, return_type="logits")[1]

    def _pass(
        self, ids: Tensor, layer: int, stream: Tensor | None, instead: Tensor | None, **how: Any
    ) -> tuple[dict[str, Any], Any]:
        self._layer, self._given, self._instead, self._seen = layer, stream, instead, {"vectors": {}}
        shorter = starting_at(self.model, layer) if stream is not None and self.steps_over else nullcontext()
        try:
            with shorter as shortcut:
                if shortcut is not None:
                    shortcut.stream = stream
                found = self.model(ids, **how)
            if missing := {"before", "after"} - self._seen.keys():
                raise HookError(
                    f"a block never showed its stream {' and '.join(sorted(missing))} it",
                    where=f"layer {layer}",
                    cure="check the model with `lens-geometry validate`",
                )
            return self._seen, found
        finally:
            self._layer, self._given, self._instead, self._seen = -1, None, None, {}

    def hooks(self) -> Hooks:
        """The hooks of every layer, which do something in the layer that is being run."""
        hooks: Hooks = []
        for layer in range(self.n_layers):
            here: Hooks = [(HOOKS["resid_pre"].format(layer), self._begin)]
            if self.sites:
                here += observe(self.model, self.sites, self._visit, layers=(layer,))
            here.append((HOOKS["resid_post"].format(layer), self._end))
            hooks += [(name, self._only(layer, fn)) for name, fn in here]
        return hooks

    def _only(self, layer: int, fn: HookFn) -> HookFn:
        def look(tensor: Tensor, hook: Any) -> Tensor | None:
            return fn(tensor, hook=hook) if self._layer == layer else None

        return look

    def _begin(self, tensor: Tensor, hook: Any) -> Tensor | None:
        given = None if self._given is None else self._given.to(tensor.device)
        self._seen["before"] = tensor if given is None else given
        return given

    def _end(self, tensor: Tensor, hook: Any) -> Tensor | None:
        self._seen["after"] = tensor
        return None if self._instead is None else self._instead.to(tensor.device)

    def _visit(self, site: Site, layer: int, update: Tensor, reference: Tensor) -> None:
        self._seen["vectors"][site.name] = (update, reference)


@contextmanager
def block_by_block(model: Any, sites: Sequence[str] = ()) -> Iterator[Blocks]:
    """Run a model block by block, reading sites; evaluation mode, without gradients.

    Raises SiteError when the model does not have one of the sites.
    """
    blocks = Blocks(model, sites)
    with at_rest(model), attached(model, blocks.hooks()):
        yield blocks
