"""Hook functions that need several activations of one layer: what they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lens_geometry.anatomy import LayerFacts, attention_error
from lens_geometry.errors import HookError
from lens_geometry.mlp_anatomy import mlp_vectors
from lens_geometry.sites import HOOKS, causal_pattern

HookFn = Callable[..., "Tensor | None"]
Hooks = list[tuple[str, HookFn]]


class Collector:
    """The activations of one layer that have been seen in the current forward pass.

    It belongs to one edit of one layer. The first hook of the layer empties it, so a pass that died half-way
    leaves nothing to the next; `take` empties it too, so nothing outlives the pass.
    """

    def __init__(self, layer: int, reads: Sequence[str], facts: LayerFacts, model: Any) -> None:
        self.layer, self.facts, self.model = layer, facts, model
        self.reads = [name for name in facts.shapes if name in reads]  # in firing order
        self.seen: dict[str, Tensor] = {}

    def readers(self) -> Hooks:
        """One hook for each activation that is read, in firing order; none of them edits."""
        return [(HOOKS[name].format(self.layer), self._reader(name)) for name in self.reads]

    def take(self, target: str, tensor: Tensor) -> dict[str, Tensor]:
        """Everything read in this pass, with the target's own activation; the collector is empty afterwards.

        Raises HookError when a hook has not fired in this pass, or the shapes are not the model's.
        """
        acts, self.seen = {**self.seen, target: tensor}, {}
        missing = [HOOKS[name].format(self.layer) for name in self.reads if name not in acts]
        if missing:
            raise HookError(
                f"{HOOKS[target].format(self.layer)} fired before {', '.join(missing)}",
                where=f"layer {self.layer}",
                cure="add the whole list that the edit returned; its hooks work together",
            )
        self._check_shapes(acts)
        if "q" in self.reads and self.facts.score_scale is not None:
            acts["pattern"] = self._pattern(acts)
        return self.completed(acts)

    def completed(self, acts: dict[str, Tensor]) -> dict[str, Tensor]:
        """The activations, and what the MLP's sites need besides them: live weights, and the input they make."""
        return {**acts, **mlp_vectors(self.model, self.layer, self.facts.mlp, acts)}

    def _reader(self, name: str) -> HookFn:
        first = name == self.reads[0]

        def read(tensor: Tensor, hook: Any) -> None:
            if first:
                self.seen.clear()
            self.seen[name] = tensor

        return tag(read, self)

    def _pattern(self, acts: dict[str, Tensor]) -> Tensor:
        """The pattern from q and k, where the model shows its own too late; checked against z every time."""
        assert self.facts.score_scale is not None
        if acts["q"].shape[1] == acts["k"].shape[1]:
            pattern = causal_pattern(acts["q"], acts["k"], self.facts.score_scale)
            if attention_error(pattern, acts["v"], acts["z"]) < 1e-4:  # softmax may be in float32 in any dtype
                return pattern
        raise HookError(
            "this pass attends otherwise than causally to all tokens (left padding, or a KV cache), and the model "
            "shows its pattern only after hook_z",
            where=HOOKS["z"].format(self.layer),
            cure="run without padding on the left and without a cache, or load the model with backend='hooked'",
        )

    def _check_shapes(self, acts: dict[str, Tensor]) -> None:
        for name, tensor in acts.items():
            expected = self.facts.shapes[name]
            widths = slice(1, 2) if name == "pattern" else slice(2, None)  # a pattern's lengths are free
            if tensor.ndim != len(expected) or tensor.shape[widths] != expected[widths]:
                raise HookError(
                    f"the activation is {tuple(tensor.shape)}, where the model gave {expected} when it was inspected",
                    where=HOOKS[name].format(self.layer),
                    cure="build the edit for this model, and keep other hooks from changing shapes",
                )
        if len({tensor.shape[:2] for name, tensor in acts.items() if name != "pattern"}) > 1:
            raise HookError(
                "the hooks of one edit saw different batches or lengths",
                where=f"layer {self.layer}",
                cure="keep batch and length the same within one forward pass",
            )


def tag(fn: HookFn, collector: Collector, *, must_change: bool = False) -> HookFn:
    """Let `applied` find the state behind a hook, and know that it has to change its activation."""
    fn.collector, fn.must_change = collector, must_change  # type: ignore[attr-defined]
    return fn
