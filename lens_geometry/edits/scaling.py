"""Component scaling: keep so much of an update's parallel part and so much of its perpendicular part."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lens_geometry.anatomy import Anatomy, require
from lens_geometry.edits.hooks import Hooks
from lens_geometry.edits.layer_edit import Heads, LayerEdit, Layers, Positions, layer_edits
from lens_geometry.edits.noise import Batch, When, check_when, earlier_tokens, normal_noise
from lens_geometry.errors import GeometryError, HookError, SiteError
from lens_geometry.geometry import component_change, matched_direction
from lens_geometry.sites import Grouping, Site

Scale = float | Tensor | Callable[[Tensor], Tensor]
Control = Literal["none", "random_reference", "shuffled_reference", "isotropic", "gain", "matched_random_reference"]
CONTROLS: tuple[Control, ...] = get_args(Control)


def scale(
    model: Any,
    site: str,
    *,
    parallel: Scale = 1.0,
    perpendicular: Scale = 1.0,
    layers: Layers = None,
    heads: Heads = None,
    positions: Positions = None,
    grouping: Grouping = "each",
    control: Control = "none",
    seed: int = 0,
    batch: Batch | None = None,
    when: When = "always",
) -> Hooks:
    """Keep `parallel` of an update's parallel part and `perpendicular` of the rest.

        u' = s_par u_par + s_perp u_perp        value_excl_self:  o'_t = A_tt v_t + s_par c_par + s_perp c_perp

    Args:
        model: any TransformerLens model with decoder blocks.
        site: "attn", "mlp", "block", "value", "value_excl_self", "resid", "mlp_carrier", "mlp_carrier_stream" or
            "mlp_contribution" (see `sites.SITES`).
        parallel, perpendicular: *retained* scales; (1, 1) changes no bit. A number; a tensor over [layer],
            [layer, head], [layer, batch, pos] or [layer, batch, pos, head], with size 1 where it is the
            same for all; or a callable of the layer's input (hook_resid_pre, [batch, pos, d_model]) that
            returns [batch, pos] or [batch, pos, head].
        layers, heads, positions: which ones are edited; None is all. Layers may be text ("1-", "4-11"). Heads are
            query heads, or KV groups with `grouping="kv_group"`; inside the MLP they are slices of the carrier, as
            everywhere below. Positions may be a mask [batch, pos].
        grouping: which value-space vector is decomposed: "each" head, "kv_group" or "merged".
        control: a comparison in the edit's place. "random_reference" and "shuffled_reference" (that of
            an earlier token) scale along the wrong direction; "isotropic" makes a change of the same norm in
            a random direction; "gain" scales the whole update by the one scale that is not 1.
            "matched_random_reference" scales along a random direction at the reference's own angle to the update,
            so that it changes the update by as much and leaves it as long (at value_excl_self the self
            message is kept, and a random direction of equal strength is scaled in the rest).
        seed, batch: the noise of the controls, and the prompt's length for `when`; see `Batch`.
        when: edit "always", or in generation only the tokens of the "prompt" or only the "new" ones. It needs
            `batch=Batch(prompt_length=...)`, and does the same with and without a KV cache.

    Returns hooks in firing order. The first call on a model runs one small forward pass to check the site.
    Raises SiteError when the model, a layer or a head does not have the site; GeometryError for scales that do
    not fit; HookError, when run, for activations that are not what the model gave before.

    Source: component scaling of "Disentangling Representation Evolution in Transformers through Directional
    Decomposition".
    """
    anatomy, found, chosen = require(model, site, layers, editing=True)
    edits = scalings(
        model,
        anatomy,
        found,
        chosen,
        parallel=parallel,
        perpendicular=perpendicular,
        heads=heads,
        positions=positions,
        grouping=grouping,
        control=control,
        seed=seed,
        batch=batch,
        when=when,
    )
    return [hook for edit in edits for hook in edit.hooks(anatomy.reads(found, edit.layer, editing=True))]


def scalings(
    model: Any,
    anatomy: Anatomy,
    found: Site,
    chosen: tuple[int, ...],
    *,
    parallel: Scale,
    perpendicular: Scale = 1.0,
    heads: Heads = None,
    positions: Positions = None,
    grouping: Grouping = "each",
    control: Control = "none",
    seed: int = 0,
    batch: Batch | None = None,
    when: When = "always",
) -> list[Scaling]:
    """What `scale` makes hooks of: one edit for each layer, checked. Raises as `scale` does."""
    parallel, perpendicular = (checked_scale(s, anatomy.n_layers, found) for s in (parallel, perpendicular))
    if control not in CONTROLS:
        raise SiteError(f"there is no control {control!r}", cure=f"choose one of {', '.join(CONTROLS)}")
    check_when(when, batch, found.name)
    if control == "gain" and not all(_is_one(parallel, i) or _is_one(perpendicular, i) for i in chosen):
        raise GeometryError(
            "the gain control scales the whole update by one number",
            cure="leave parallel or perpendicular at 1",
        )
    if found.name == "resid" and not all(_is_one(perpendicular, i) for i in chosen):
        raise SiteError(
            "the stream is its own reference and has no perpendicular part",
            where="site resid",
            cure="scale `parallel` (a plain gain), or choose another site",
        )
    make = partial(
        Scaling,
        parallel=parallel,
        perpendicular=perpendicular,
        control=control,
        seed=seed,
        when=when,
    )
    return layer_edits(
        make, model, anatomy, chosen, found, heads=heads, positions=positions, grouping=grouping, batch=batch
    )


@dataclass(frozen=True)
class ScaledEdit(LayerEdit):
    """An edit by scales, which change nothing where they are 1 and may be made from the layer's input."""

    parallel: Scale
    perpendicular: Scale

    @property
    def idle(self) -> bool:
        return _is_one(self.parallel, self.layer) and _is_one(self.perpendicular, self.layer)

    @property
    def gated(self) -> bool:
        return any(callable(s) or _has_gradient(s) for s in (self.parallel, self.perpendicular))

    @property
    def extra_reads(self) -> tuple[str, ...]:
        return ("resid_pre",) if callable(self.parallel) or callable(self.perpendicular) else ()


@dataclass(frozen=True)
class Scaling(ScaledEdit):
    """How the components of one site of one layer are scaled."""

    control: Control
    seed: int
    when: When

    @property
    def knows_place(self) -> bool:
        return self.control not in ("none", "gain") or super().knows_place

    @property
    def extra_reads(self) -> tuple[str, ...]:
        fired = list(self.facts.shapes)
        tells = self.when != "always" and "pattern" in fired[: fired.index(self.target)]
        return (*super().extra_reads, *(("pattern",) if tells else ()))  # shows whether a pass goes on from a cache

    def places(self, tensor: Tensor, acts: dict[str, Tensor]) -> slice:
        """The places of this pass that are edited, by `when`."""
        places = self.batch.edited_places(self.when, tensor.shape[1], self.where)
        if self.when != "always" and tensor.shape[1] > 1 and "pattern" in acts:
            queries, keys = acts["pattern"].shape[-2:]
            if keys > queries:
                raise HookError(
                    f"this pass of {queries} tokens goes on from a KV cache, so its first position is not known",
                    where=self.where,
                    cure="run the prompt in one pass and new tokens one by one, or use when='always'",
                )
        return places

    def change(self, update: Tensor, reference: Tensor, acts: dict[str, Tensor]) -> Tensor:
        parallel = scale_values(self, self.parallel, update, acts)
        perpendicular = scale_values(self, self.perpendicular, update, acts)
        if self.control == "gain":
            gain = perpendicular if _is_one(self.parallel, self.layer) else parallel
            return component_change(update, update, gain)
        if self.control == "random_reference":
            reference = normal_noise(update, self.batch, self.seed, self.layer)
        elif self.control == "shuffled_reference":
            reference = earlier_tokens(reference, self.batch, self.seed, self.layer)
        change = component_change(update, reference, parallel, perpendicular)
        if self.control == "matched_random_reference":
            noise = self.inside(normal_noise(update, self.batch, self.seed, self.layer))
            control = component_change(update, matched_direction(update, reference, noise), parallel, perpendicular)
            if not self.site.padded:
                return control
            # the reference has a part in the padding, which the edit drops: equal strength is that of what is left
            size, whole = (self.inside(x).norm(dim=-1, keepdim=True) for x in (change, control))
            return control * torch.where(whole > 0, size / whole, 0.0)
        if self.control == "isotropic":
            direction = self.inside(normal_noise(change, self.batch, self.seed, self.layer))
            change = self.inside(change)
            change = direction * (change.norm(dim=-1, keepdim=True) / direction.norm(dim=-1, keepdim=True))
        return change


def scale_values(edit: LayerEdit, scale: Scale, update: Tensor, acts: dict[str, Tensor]) -> float | Tensor:
    """A number, or a tensor of [batch, pos] or [batch, pos, group]."""
    if isinstance(scale, Tensor):
        picked = scale if scale.ndim == 0 else scale[edit.layer if scale.shape[0] > 1 else 0]
        if scale.ndim == 3 and edit.site.axis:  # one number per token, for every head
            picked = picked.unsqueeze(-1)
    elif callable(scale):
        picked = scale(acts["resid_pre"])
        shape = tuple(getattr(picked, "shape", ()))
        if not isinstance(picked, Tensor) or len(shape) not in (2, 3) or shape[:2] != update.shape[:2]:
            raise GeometryError(
                f"the callable scale gave {f'shape {shape}' if shape else repr(picked)[:60]}",
                where=f"site {edit.site.name}, layer {edit.layer}",
                cure=f"return a tensor [batch, pos] (here {list(update.shape[:2])}) or [batch, pos, head]",
            )
        if picked.ndim == 2 and edit.site.axis:
            picked = picked.unsqueeze(-1)
        elif picked.ndim == 3 and not edit.site.axis:
            picked = picked.squeeze(-1)
    else:
        return float(scale)
    try:
        return picked.broadcast_to(update.shape[:-1])
    except RuntimeError as error:
        raise GeometryError(
            f"a scale of shape {tuple(picked.shape)} does not fit updates of {tuple(update.shape[:-1])}",
            where=f"site {edit.site.name}, layer {edit.layer}",
            cure=f"{SCALE_SHAPES}; a callable gives [batch, pos] or [batch, pos, head]",
        ) from error


SCALE_SHAPES = "give [layer], [layer, head], [layer, batch, pos] or [layer, batch, pos, head]"


def _is_one(scale: Scale, layer: int = 0) -> bool:
    """Whether a checked scale changes nothing in a layer, and is not there for its gradient."""
    if isinstance(scale, Tensor):
        return (
            not _has_gradient(scale) and scale.ndim > 0 and bool((scale[layer if scale.shape[0] > 1 else 0] == 1).all())
        )
    return not callable(scale) and scale == 1


def _has_gradient(scale: Scale) -> bool:
    return isinstance(scale, Tensor) and scale.requires_grad


def checked_scale(scale: Any, n_layers: int, site: Site) -> Scale:
    """A float, a tensor with its layer axis, or a callable. Raises GeometryError for anything else."""
    if callable(scale) and not isinstance(scale, Tensor):
        return scale  # type: ignore[no-any-return]
    if isinstance(scale, numbers.Real):
        scale = torch.tensor(float(scale), dtype=torch.float64)
    try:
        number = torch.as_tensor(scale)
        number = number if number.is_floating_point() else number.double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise GeometryError(f"a scale of {scale!r} is no number", cure=f"give a number, or {SCALE_SHAPES}") from error
    if not torch.isfinite(number).all():
        raise GeometryError(f"a scale of {scale} is not finite", cure="give finite numbers")
    if number.ndim == 0 and not number.requires_grad:
        return float(number)
    if number.ndim > 4 or (number.ndim and number.shape[0] not in (1, n_layers)):
        problem = f"a scale tensor of shape {tuple(number.shape)} has no [layer] axis of 1 or {n_layers}"
        raise GeometryError(problem, cure=SCALE_SHAPES)
    if number.ndim in (2, 4) and not site.axis:
        problem = f"a scale tensor of shape {tuple(number.shape)} has heads, and site {site.name!r} has none"
        raise GeometryError(problem, cure="give [layer] or [layer, batch, pos]")
    return number
