"""The pathways that can be repaired: which hooks they are on a live model, and what of a clean run they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lens_geometry.anatomy import inspect, require
from lens_geometry.edits.reach import require_map
from lens_geometry.errors import SiteError
from lens_geometry.norm_anatomy import NormFacts, require_final_norm, require_norms
from lens_geometry.sites import HOOKS

Pathway = Literal[
    "attention_pattern",
    "head_output",
    "attention_output",
    "layernorm_scale",
    "layernorm_output",
    "mlp_output",
    "final_norm",
]
PATHWAYS: tuple[Pathway, ...] = get_args(Pathway)
WITH_HEADS = {"attention_pattern": 1, "head_output": 2}
"""Pathways that have heads, and the axis that they stand on."""


@dataclass(frozen=True)
class Target:
    """One hook that a repair changes.

    Attributes:
        pathway, layer: what it belongs to; the final norm's layer is the number of layers.
        where: the full name of the hook that is changed.
        needs: the hooks whose clean activations it takes.
        norm: the norm whose output is rescaled, where its scale cannot be set by itself.
    """

    pathway: str
    layer: int
    where: str
    needs: tuple[str, ...]
    norm: NormFacts | None = None


def targets(model: Any, pathway: str | Sequence[str], layers: Any = None) -> list[Target]:
    """The hooks that a repair of these pathways changes, layer by layer, a norm's scale before its output.

    Raises SiteError with the reason for a pathway that the model does not have, or shows without using it.
    """
    wanted = [pathway] if isinstance(pathway, str) else list(pathway)
    unknown = [name for name in wanted if name not in PATHWAYS]
    if unknown or not wanted:
        raise SiteError(f"there is no pathway {unknown or wanted}", cure=f"choose among {', '.join(PATHWAYS)}")
    return [target for name in PATHWAYS if name in wanted for target in _TARGETS[name](model, name, layers)]


def needed_hooks(model: Any, pathway: str | Sequence[str], layers: Any = None) -> tuple[str, ...]:
    """Names of the hooks whose clean activations a repair takes. Raises SiteError as `repair` does."""
    return tuple(dict.fromkeys(name for target in targets(model, pathway, layers) for name in target.needs))


def _by_layer(hook: str, site: str) -> Callable[[Any, str, Any], list[Target]]:
    def find(model: Any, pathway: str, layers: Any) -> list[Target]:
        chosen = require_map(model, layers)[1] if hook == "pattern" else require(model, site, layers)[2]
        names = [(layer, HOOKS[hook].format(layer)) for layer in chosen]
        return [Target(pathway, layer, name, (name,)) for layer, name in names]

    return find


def _norm_outputs(model: Any, pathway: str, layers: Any) -> list[Target]:
    found = require_norms(model, layers)
    return [Target(pathway, layer, n.output, (n.output,)) for layer, norms in found.items() for n in norms]


def _norm_scales(model: Any, pathway: str, layers: Any) -> list[Target]:
    found = require_norms(model, layers, scale=True)
    return [_norm_scale(pathway, layer, norm) for layer, norms in found.items() for norm in norms]


def _norm_scale(pathway: str, layer: int, norm: NormFacts) -> Target:
    if norm.scale_is_set:
        return Target(pathway, layer, norm.scale, (norm.scale,))
    return Target(pathway, layer, norm.output, (norm.scale, norm.output) if norm.flat else (norm.scale,), norm)


def _final_norm(model: Any, pathway: str, layers: Any) -> list[Target]:
    output = require_final_norm(model).output
    return [Target(pathway, inspect(model).n_layers, output, (output,))]


_TARGETS: Mapping[str, Callable[[Any, str, Any], list[Target]]] = {
    "attention_pattern": _by_layer("pattern", "value"),
    "head_output": _by_layer("z", "value"),
    "attention_output": _by_layer("attn_out", "attn"),
    "layernorm_scale": _norm_scales,
    "layernorm_output": _norm_outputs,
    "mlp_output": _by_layer("mlp_out", "mlp"),
    "final_norm": _final_norm,
}
