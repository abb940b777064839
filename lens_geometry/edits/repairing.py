"""Pathway repair: run a perturbed model with some of what it computes replaced by what the clean run computed.

    clean = lg.clean_run(model, tokens, "attention_pattern", layers="8-")
    hooks = lg.perturb(model, "angular", 0.1, layers="8-15") + lg.repair(model, "attention_pattern", clean, layers="8-")

What a repair gives back of the loss that the perturbation cost went through that pathway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_geometry.anatomy import alone, at_rest, attached, hook_points, inspect
from lens_geometry.edits.hooks import HookFn, Hooks
from lens_geometry.edits.layer_edit import position_mask
from lens_geometry.edits.pathways import WITH_HEADS, Target, needed_hooks, targets
from lens_geometry.errors import HookError, SiteError
from lens_geometry.norm_anatomy import bias_of
from lens_geometry.sites import HOOKS, choose_heads, indices


@dataclass
class _Seen:
    """What was read in this pass; emptied by `applied`."""

    seen: dict[str, Tensor] = field(default_factory=dict)


def clean_run(
    model: Any,
    ids: Int[Tensor, "batch pos"],
    pathway: str | Sequence[str],
    *,
    layers: int | str | slice | Iterable[int] | None = None,
) -> dict[str, Tensor]:
    """The unedited model's activations that a repair of these pathways takes, by hook name: nothing more is kept.

    The pass is made in evaluation mode without gradients, and without anybody's hooks, also inside `applied`.
    Raises SiteError as `repair` does.
    """
    names = needed_hooks(model, pathway, layers)
    with at_rest(model):
        return keep_activations(model, ids.to(next(model.parameters()).device), names)


def keep_activations(model: Any, ids: Int[Tensor, "batch pos"], names: Iterable[str]) -> dict[str, Tensor]:
    """One pass without anybody's hooks but the model's own; the activations of the named ones."""
    kept: dict[str, Tensor] = {}

    def keeper(name: str) -> HookFn:
        def keep(tensor: Tensor, hook: Any) -> None:
            kept[name] = tensor.detach().clone()

        return keep

    hooks = [(name, keeper(name)) for name in names]
    with torch.no_grad(), alone(hook_points(model), bare=False), attached(model, hooks):
        model(ids, return_type=None)
    return kept


def repair(
    model: Any,
    pathway: str | Sequence[str],
    clean: Mapping[str, Tensor],
    *,
    layers: int | str | slice | Iterable[int] | None = None,
    heads: int | slice | Iterable[int] | None = None,
    positions: int | slice | Iterable[int] | Bool[Tensor, "batch pos"] | None = None,
) -> Hooks:
    """Give a perturbed run the clean run's values of one pathway, or of several at once.

    | pathway | what is replaced |
    |---|---|
    | `attention_pattern` | the attention weights, `attn.hook_pattern` (positions are queries) |
    | `head_output` | each head's aggregate, `attn.hook_z` |
    | `attention_output` | what attention adds to the stream, `hook_attn_out` |
    | `layernorm_scale` | the denominators alone of the norms that attention and MLP read (ln1, ln2) |
    | `layernorm_output` | those norms' outputs: in parallel attention+MLP models, the input of both branches |
    | `mlp_output` | what the MLP adds to the stream, `hook_mlp_out` |
    | `final_norm` | the output of the norm before the unembedding, which alone decides the logits (no layers) |

    Args:
        model: any TransformerLens model; each pathway is checked on it to be used, not just shown.
        pathway: one name, or several.
        clean: clean activations of the same tokens by hook name: from `clean_run`, or TransformerLens'
            ActivationCache. It is read when the hooks run, so it may be filled later.
        layers, positions: which ones are repaired; None is all.
        heads: which heads, at the pathways that have them; the others are repaired whole.

    Where the activations are the clean ones already, no bit changes. Put the list *after* that of the perturbation:
    hooks run in list order. Raises SiteError when the model does not have a pathway; HookError, when run, where `clean`
    lacks a hook or is of another batch, length or dtype, and under a KV cache. `applied` raises when a repair changes
    nothing at all: nothing was perturbed before it.

    Source: the repairs of "Disentangling Direction and Magnitude in Transformer Representations".
    """
    found, anatomy = targets(model, pathway, layers), inspect(model)
    if heads is not None and not any(target.pathway in WITH_HEADS for target in found):
        raise SiteError("no pathway that is repaired has heads", cure=f"choose among {', '.join(WITH_HEADS)}")
    mask = isinstance(positions, Tensor) and positions.dtype == torch.bool
    if positions is not None and not mask and not isinstance(positions, slice):
        positions = indices(positions, "position", "give a slice, whole numbers, or a bool mask [batch, pos]")
    hooks = _no_cache(model, min(min(target.layer for target in found), anatomy.n_layers - 1))
    for target in found:
        n_heads = anatomy.layers[target.layer].n_heads if target.pathway in WITH_HEADS else 0
        chosen = choose_heads(heads, n_heads) if heads is not None and n_heads else None
        edit = _Repair(model, target, clean, chosen, positions)
        hooks += edit.rescaling() if target.norm else edit.setting()
    return hooks


@dataclass(frozen=True)
class _Repair:
    """How one hook is repaired."""

    model: Any
    target: Target
    clean: Mapping[str, Tensor]
    heads: tuple[int, ...] | None
    positions: Any

    def setting(self) -> Hooks:
        """The hook's activation becomes the clean one."""

        def set_clean(tensor: Tensor, hook: Any) -> Tensor:
            return self._chosen(tensor, self._kept(self.target.where, tensor))

        return [(self.target.where, _tagged(set_clean, _Seen()))]

    def rescaling(self) -> Hooks:
        """A norm's output becomes what it would be under the clean scale: out + (out - b) (scale / clean scale - 1)."""
        norm, state = self.target.norm, _Seen()
        assert norm is not None

        def read(tensor: Tensor, hook: Any) -> None:
            state.seen[norm.scale] = tensor

        def rescale(tensor: Tensor, hook: Any) -> Tensor:
            now = state.seen.pop(norm.scale, None)
            if now is None:
                raise HookError(
                    f"{norm.output} fired before {norm.scale}",
                    where=self.target.where,
                    cure="add the whole list that `repair` returned; its hooks work together",
                )
            if norm.flat:  # the scale does not show batch and length apart; the output does
                self._kept(norm.output, tensor)
            was, bias = self._kept(norm.scale, now), bias_of(self.model, norm.name, norm.output)
            working = torch.promote_types(tensor.dtype, torch.float32)
            ratio = (now.to(working) / was.to(working)).reshape(*tensor.shape[:-1], 1)
            whole = tensor.to(working)
            scaled = whole if bias is None else whole - bias.to(working)
            return self._chosen(tensor, (whole + scaled * (ratio - 1.0)).to(tensor.dtype))

        return [(norm.scale, _tagged(read, state, edits=False)), (self.target.where, _tagged(rescale, state))]

    def _kept(self, name: str, tensor: Tensor) -> Tensor:
        """The clean activation that stands for this one. Raises HookError where there is none that fits."""
        try:
            kept = self.clean[name]
        except KeyError:
            raise HookError(
                f"the clean activations have no {name}",
                where=f"repair of {self.target.pathway}",
                cure="keep it in the clean run: clean_run(model, tokens, pathway, layers=...)",
            ) from None
        if kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            raise HookError(
                f"the clean activation is {kept.dtype} {tuple(kept.shape)} where this pass has {tensor.dtype} "
                f"{tuple(tensor.shape)}",
                where=name,
                cure="take the clean run of the same tokens in the same batch and dtype, and run without a KV cache",
            )
        return kept.to(tensor.device)

    def _chosen(self, tensor: Tensor, clean: Tensor) -> Tensor:
        """A new tensor: clean at the chosen heads and positions, as it was elsewhere."""
        keep = torch.ones((), dtype=torch.bool, device=tensor.device)
        by_query = self.target.pathway == "attention_pattern"
        if self.heads is not None:
            axis = WITH_HEADS[self.target.pathway]
            heads = torch.zeros(tensor.shape[axis], dtype=torch.bool, device=tensor.device)
            heads[list(self.heads)] = True
            keep = keep & heads.reshape(-1, *[1] * (tensor.ndim - axis - 1))
        if self.positions is not None:
            places = position_mask(self.positions, tensor[:, 0] if by_query else tensor, self.target.where)
            keep = keep & (
                places[:, None, :, None] if by_query else places.reshape(*places.shape, *[1] * (tensor.ndim - 2))
            )
        return torch.where(keep, clean, tensor)


def _tagged(fn: HookFn, state: _Seen, *, edits: bool = True) -> HookFn:
    """Let `applied` find the state behind a hook, and know that the repairs have to change something among them."""
    fn.collector, fn.must_change, fn.kind = state, edits, "repair"  # type: ignore[attr-defined]
    return fn


def _no_cache(model: Any, layer: int) -> Hooks:
    """A hook that refuses passes under a KV cache: which of the clean tokens theirs are is not known."""
    if "pattern" not in inspect(model).layers[layer].shapes:
        return []
    where = HOOKS["pattern"].format(layer)

    def refuse(tensor: Tensor, hook: Any) -> None:
        queries, keys = tensor.shape[-2:]
        if keys != queries:
            raise HookError(
                f"this pass has {queries} quer{'y' if queries == 1 else 'ies'} for {keys} keys: under a KV cache its "
                "tokens' places in the clean run are not known",
                where=where,
                cure="run whole sequences, and generate with use_past_kv_cache=False",
            )

    return [(where, refuse)]
