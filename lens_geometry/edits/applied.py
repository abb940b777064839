"""Running with hooks, and making sure that they did something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lens_geometry.anatomy import attached, hook_points
from lens_geometry.edits.hooks import HookFn, Hooks
from lens_geometry.errors import HookError

IDLE = {
    "edit": "check heads, positions and scales; when='new' needs passes over new tokens, and when='prompt' one "
    "over the prompt; in a sequence of one token value_excl_self has nothing to edit",
    "repair": "perturb something before it, in an earlier layer or earlier in the same one, and put that edit's hooks "
    "first in the list",
}
"""What to do about a kind of hooks of which none changed anything."""


@contextmanager
def applied(model: Any, hooks: Hooks, *, require_change: bool = True) -> Iterator[Counter[str]]:
    """Run a model with hooks; leaving raises when one of them did nothing.

    Yields a counter of how often each hook fired, by name. Other hooks that the user has added stay.
    On leaving, raises HookError when a hook never fired, or (unless `require_change` is False) when edits that
    should change something left every activation of every layer as it was; repairs are looked at by themselves.
    One layer may be left alone: its update may be zero. An exception from inside is passed on as it is. Whatever the
    edits kept between their hooks is dropped in every case. Raises HookError at once when one edit is in the list
    twice.

    >>> with applied(model, scale(model, "mlp", parallel=0.0)) as fired:  # doctest: +SKIP
    ...     logits = model(tokens)
    """
    named = _named(model, hooks)
    if len({(name, id(fn)) for name, fn in named}) < len(named):
        raise HookError("one edit is in the list twice", cure="call `scale` once for each edit; lists add up with +")
    fired: Counter[str] = Counter()
    calls = [0] * len(named)
    changed = [False] * len(named)

    def watched(index: int, name: str, fn: HookFn) -> HookFn:
        def run(tensor: Tensor, hook: Any) -> Tensor | None:
            fired[name] += 1
            calls[index] += 1
            out = fn(tensor, hook=hook)
            if out is not None and not changed[index]:
                changed[index] = not torch.equal(out, tensor)
            return out

        return run

    try:
        with attached(model, [(name, watched(i, name, fn)) for i, (name, fn) in enumerate(named)]):
            yield fired
    finally:
        for _, fn in named:
            if hasattr(fn, "collector"):
                fn.collector.seen.clear()
    silent = [name for (name, _), count in zip(named, calls, strict=True) if not count]
    if silent:
        raise HookError(
            f"{len(silent)} of {len(named)} hooks never fired" + ("" if any(calls) else " (no forward pass was run)"),
            where=", ".join(silent[:3]) + (" ..." if len(silent) > 3 else ""),
            cure="run the model inside the `with`, and edit only layers that this pass reaches",
        )
    due: dict[str, list[tuple[str, bool]]] = {}
    for (name, fn), did in zip(named, changed, strict=True):
        if getattr(fn, "must_change", False):
            due.setdefault(getattr(fn, "kind", "edit"), []).append((name, did))
    for kind, found in due.items():
        if require_change and not any(did for _, did in found):
            raise HookError(
                f"the {kind} left every activation as it was",
                where=", ".join(name for name, _ in found[:3]) + (" ..." if len(found) > 3 else ""),
                cure=IDLE[kind],
            )


def _named(model: Any, hooks: Hooks) -> Hooks:
    """The hooks with filters (callables of a name) replaced by what they match, which must be something."""
    if not any(callable(name) for name, _ in hooks):
        return hooks
    known = hook_points(model)
    named: Hooks = []
    for name, fn in hooks:
        matches = sorted(filter(name, known)) if callable(name) else [name]
        if not matches:
            raise HookError(
                "the filter matches no hook of this model", where=repr(name), cure="see model.hook_dict for the names"
            )
        named += [(match, fn) for match in matches]
    return named
