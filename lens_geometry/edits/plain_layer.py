"""One edited layer of a plain Hugging Face model: what is read, where the edit goes, and whether it did anything."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from lens_geometry.anatomy import Anatomy
from lens_geometry.edits.plain_layouts import PlainBlock
from lens_geometry.edits.scaling import Scale, Scaling
from lens_geometry.errors import HookError

_EDITED = {"attn_out": "attn_out", "mlp_out": "mlp_out", "z": "z", "resid_post": ""}
"""The hook that a site edits -> the part of the block where that is."""


class PlainLayer:
    """The hooks of one edit in one block.

    All of them but those of site "block" are on modules inside the block's forward, which gradient checkpointing runs
    again; from transformers 5.23 on it does not run the hooks of the block itself again, and those are then
    outside with everything that they read.
    """

    def __init__(self, block: PlainBlock, edit: Scaling, anatomy: Anatomy) -> None:
        part = _EDITED[edit.target]
        self.block, self.n_layers = block, anatomy.n_layers
        self.edit = replace(edit, where=block.where(part) if part else block.name)
        self.reads = anatomy.reads(edit.site, edit.layer, editing=True)
        self.reads_weights = "pattern" in self.reads
        self.fired = self.changed = self.due = self.active = False
        self._seen: dict[int, dict[str, Tensor]] = {}
        self._handles: list[Any] = []
        self._pending: list[weakref.ref[Tensor]] = []

    def attach(self) -> None:
        """Put the hooks on."""
        whole = self.edit.target == "resid_post"
        start = self.block.module if whole else self.block.part("start")
        self._handles.append(start.register_forward_pre_hook(self._begin, with_kwargs=True))
        if "v" in self.reads:
            self._handles.append(self.block.part("values").register_forward_hook(self._see_values))
        if "resid_mid" in self.reads:
            self._handles.append(self.block.part("mid").register_forward_pre_hook(self._see_middle, with_kwargs=True))
        if self.reads_weights:
            self._handles.append(
                self.block.module.register_forward_pre_hook(self._refuse_static_cache, with_kwargs=True)
            )
        if self.edit.target == "z":
            self._handles.append(self.block.part("z").register_forward_pre_hook(self._edit_input))
        else:
            target = self.block.module if whole else self.block.part(_EDITED[self.edit.target])
            self._handles.append(target.register_forward_hook(self._edit_output))
        self.active = True

    def detach(self) -> None:
        """Take the hooks off. A pass that checkpointing still has to compute again is watched for."""
        self.active = False  # compiled code has the hooks in it, and asks for this
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._seen.clear()
        if any(stream() is not None for stream in self._pending):
            self._guard()

    def set_parallel(self, parallel: Scale) -> None:
        self.edit = replace(self.edit, parallel=parallel)

    def see_weights(self, weights: Tensor) -> None:
        self._acts()["pattern"] = weights

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.active:
            return
        stream = _stream(args, kwargs)
        acts = self._acts()
        acts.clear()  # of a pass that died half-way, or of a recomputation that stopped early
        acts["resid_pre"] = stream
        if not torch.compiler.is_compiling() and _will_be_computed_again(self.block.module):
            self._pending = [other for other in self._pending if other() is not None] + [weakref.ref(stream)]

    def _see_values(self, module: nn.Module, args: Any, projected: Tensor) -> None:
        if self.active:
            self._acts()["v"] = self.block.values(projected)

    def _see_middle(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.active:
            self._acts()["resid_mid"] = _stream(args, kwargs)

    def _edit_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.active:
            return None
        merged = args[0]
        if merged.shape[-1] != self.block.n_heads * self.block.width:
            raise HookError(
                f"the heads' aggregate is {merged.shape[-1]} wide, where {self.block.n_heads} heads of "
                f"{self.block.width} are expected",
                where=self.edit.where,
                cure="take the edit off a model whose heads have been pruned or split over devices",
            )
        out = self._edited(rearrange(merged, "batch pos (head d) -> batch pos head d", d=self.block.width))
        return None if out is None else (rearrange(out, "batch pos head d -> batch pos (head d)"), *args[1:])

    def _edit_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.active:
            return None
        first, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
        out = self._edited(first)
        return out if out is None or rest is None else (out, *rest)

    def _edited(self, tensor: Tensor) -> Tensor | None:
        seen = self._acts()
        acts = {name: seen[name].to(tensor.device) for name in ("resid_pre", *self.reads) if name in seen}
        acts[self.edit.target] = tensor
        seen.clear()
        missing = [name for name in self.reads if name not in acts]
        if missing:
            raise HookError(
                f"the edit ran before {', '.join(missing)} had been seen in this pass",
                where=self.edit.where,
                cure='keep the attention implementation "eager" while the edit is on',
            )
        self.fired = True
        if self.edit.idle:
            return None
        out = self.edit.edited(tensor, acts)
        self.due = self.due or not self.edit.gated
        if torch.compiler.is_compiling():
            self.changed = True  # cannot be looked at while tracing
        elif not self.changed:
            self.changed = not torch.equal(out, tensor)
        return out

    def _acts(self) -> dict[str, Tensor]:
        """What this pass has shown; DataParallel runs one pass in each thread."""
        return self._seen.setdefault(0 if torch.compiler.is_compiling() else threading.get_ident(), {})

    def _refuse_static_cache(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        for cache in (kwargs.get("past_key_values"), kwargs.get("layer_past")):
            if getattr(cache, "is_compileable", False):
                raise HookError(
                    "under a static cache the queries are not the last keys, and a token's own weight is not known",
                    where=self.edit.where,
                    cure='generate with the default cache, or use site="value"',
                )

    def _guard(self) -> None:
        """Let a backward pass fail that would compute this layer again without the edit it was computed with."""
        pending, where = self._pending, self.edit.where
        handles: list[Any] = []

        def guard(module: nn.Module, args: Any) -> None:
            if not any(stream() is not None for stream in pending):
                handles.pop().remove()
            elif _in_backward():
                raise HookError(
                    "gradient checkpointing computes this layer again after its edit was taken off",
                    where=where,
                    cure="call backward() before the edit is removed (inside the `with`)",
                )

        handles.append(self.block.part("start").register_forward_pre_hook(guard))


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    stream: Tensor = args[0] if args else kwargs["hidden_states"]
    return stream


def _will_be_computed_again(block: nn.Module) -> bool:
    return block.training and bool(getattr(block, "gradient_checkpointing", False)) and not _in_backward()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
