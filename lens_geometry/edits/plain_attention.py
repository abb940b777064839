"""The attention weights of a plain Hugging Face model while a block is being computed.

transformers gives the weights away only after the output projection. Its attention interface lets a function of one's
own be named in the configuration; ours calls the model's own eager function and shows the weights on the way. Kernels
that never have the weights (sdpa, flash, flex) cannot show them, and are refused.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from lens_geometry.errors import SiteError

SHOWING = "eager_shown_to_lens_geometry"
_WATCHERS = "_lens_geometry_watchers"  # on the module itself, so that DataParallel's replicas have it too

Watcher = Callable[[Tensor], None]


def require_weights(attention: nn.Module, where: str) -> None:
    """Raise SiteError where the attention weights cannot be had."""
    config: Any = attention.config
    kind = config._attn_implementation
    if kind not in ("eager", SHOWING):
        raise SiteError(
            f"site 'value_excl_self' needs each token's attention to itself, which {kind!r} attention never has",
            where=where,
            cure='call model.set_attn_implementation("eager") first, or use site="value"',
        )
    if getattr(config, "reorder_and_upcast_attn", False) or _own_eager(attention) is None:
        raise SiteError(
            f"this {type(attention).__name__} does not compute its attention through transformers' interface",
            where=where,
            cure='use site="value", or wrap the model with TransformerLens and use lg.scale',
        )


def show_weights(attention: nn.Module, watcher: Watcher) -> None:
    """Call `watcher` with the weights [batch, head, query, key] of every pass, as they multiply the values."""
    interface = importlib.import_module("transformers.modeling_utils").AttentionInterface
    masking = importlib.import_module("transformers.masking_utils")
    interface.register(SHOWING, _attend)
    masking.AttentionMaskInterface.register(SHOWING, masking.eager_mask)
    setattr(attention, _WATCHERS, [*getattr(attention, _WATCHERS, []), watcher])
    config: Any = attention.config
    config._attn_implementation = SHOWING


def hide_weights(attention: nn.Module, watcher: Watcher, others: Iterable[nn.Module]) -> None:
    """The inverse; the configuration is as it was when no layer of the model is watched any more."""
    with suppress(ValueError):
        getattr(attention, _WATCHERS, []).remove(watcher)
    config: Any = attention.config
    if config._attn_implementation == SHOWING and not any(getattr(other, _WATCHERS, []) for other in others):
        config._attn_implementation = "eager"


def _attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    own = _own_eager(module)
    assert own is not None
    output, weights = own(module, *args, **kwargs)
    for watcher in getattr(module, _WATCHERS, ()):
        watcher(weights)
    return output, weights


def _own_eager(attention: nn.Module) -> Callable[..., Any] | None:
    """The eager function of the file that the attention class is from."""
    for kind in type(attention).__mro__:
        own = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if callable(own):
            found: Callable[..., Any] = own
            return found
    return None
