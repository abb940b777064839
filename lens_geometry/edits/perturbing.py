"""L2-matched perturbation: hidden states turned, or made longer and shorter, by the same Euclidean distance.

    magnitude:  h' = (1 ± d/|h|) h
    angular:    h' = |h| (cos t h/|h| + sin t v)        v orthogonal to h, t = arccos(1 - d^2 / (2 |h|^2))

Both move every token by exactly d, so that what differs in their effect is due to direction and magnitude. The
published run differs from its text in ways that are switches here, since each of them changes the comparison.

Source: "Disentangling Direction and Magnitude in Transformer Representations: A Double Dissociation Through
L2-Matched Perturbation Analysis" (arXiv 2602.11169).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lens_geometry.anatomy import require
from lens_geometry.edits.hooks import Hooks
from lens_geometry.edits.layer_edit import Heads, LayerEdit, Layers, Positions, layer_edits
from lens_geometry.edits.noise import Batch, token_noise
from lens_geometry.errors import DisplacementError, GeometryError, HookError
from lens_geometry.geometry import rescaling_change, rotation_change
from lens_geometry.sites import Grouping, group_heads

Kind = Literal["angular", "magnitude"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Unit = Literal["relative", "absolute"]
Noise = Literal["fresh", "shared"]
Signs = Literal["redrawn", "fixed", "grow", "shrink"]
Matching = Literal["per_token", "mean"]
Tangent = Literal["random", "principal", "semantic"]
OFF_FIRST = slice(1, None)  # every position but 0, where models keep massive activations


@dataclass(frozen=True)
class Perturbation:
    """The switches of a perturbation: what the published text and its run leave open, or do differently.

    Attributes:
        noise: "fresh" directions for each layer, sequence and token, or "shared": those of a position are the same in
            all layers and sequences, so that the pushes of several layers add up.
        signs: of magnitude changes. "redrawn" for each layer, sequence and token, so that several layers cancel like
            a random walk; "fixed" for each sequence and token over layers; or all "grow" or all "shrink".
        matching: "per_token" moves every token by exactly the displacement. "mean" has one scale for all tokens of a
            sequence, made for the mean norm, and noise that is not made orthogonal (as the published run did).
        tangent: where angular changes go. "random"; "principal", a random mixture of principal directions of the
            activations (`principal_directions`); or "semantic", towards a random earlier token of the sequence.
        clip: move a token as far as possible where the displacement is not, instead of raising.
        allow_flip: let shrinking by more than the norm turn a vector round, instead of raising.
    """

    noise: Noise = "fresh"
    signs: Signs = "redrawn"
    matching: Matching = "per_token"
    tangent: Tangent = "random"
    clip: bool = False
    allow_flip: bool = False

    def __post_init__(self) -> None:
        for name, known in (("noise", Noise), ("signs", Signs), ("matching", Matching), ("tangent", Tangent)):
            if getattr(self, name) not in get_args(known):
                raise GeometryError(
                    f"{name} is {getattr(self, name)!r}", cure=f"choose one of {', '.join(get_args(known))}"
                )
        if self.tangent != "random" and (self.matching == "mean" or self.noise == "shared"):
            raise GeometryError(
                f"a {self.tangent} tangent is made for each token, and noise is {self.noise}, matching {self.matching}",
                cure="use noise='fresh' and matching='per_token' with it",
            )


PRESETS: Mapping[str, Perturbation] = {
    "default": Perturbation(),
    "paper": Perturbation(),  # the published text says what is the default here
    "as_run": Perturbation(noise="shared", matching="mean", clip=True, allow_flip=True),
}
"""Perturbations by name: the published text, and what its code ran. There displacements are absolute and position 0 is
moved too: `perturb(..., unit="absolute", positions=None)`."""

Record = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""`record(layer, before, after, wanted, chosen, clipped)`: vectors as the model gave and got them, the displacement
that was asked of each, which of them were to be moved, and which of those as far as possible instead."""


def perturb(
    model: Any,
    kind: Kind,
    displacement: float | Float[Tensor, " layer"],
    how: Perturbation | str = "default",
    *,
    site: str = "resid",
    layers: Layers = None,
    heads: Heads = None,
    positions: Positions = OFF_FIRST,
    grouping: Grouping = "each",
    unit: Unit = "relative",
    directions: Float[Tensor, "layer k d"] | None = None,
    seed: int = 0,
    batch: Batch | None = None,
    record: Record | None = None,
) -> Hooks:
    """Move the hidden states of a site by the same distance, by turning them or by changing their length.

    Args:
        model: any TransformerLens model with decoder blocks.
        kind: "angular" or "magnitude".
        displacement: how far each token is moved; 0 changes no bit. A number, or one for each layer of the model.
        how: a name of `PRESETS` ("default", "paper", "as_run") or a `Perturbation`.
        site: which vectors: "resid" (the stream that enters a block) or any other of `sites.SITES`, whose update
            is moved.
        layers, heads, positions, grouping: which ones, as in `scale`. Position 0 is left alone unless asked for: many
            models keep a massive activation there.
        unit: of the displacement: "relative" to each token's own norm where it is moved (after what earlier layers'
            perturbations did to it), or "absolute".
        directions: for `tangent="principal"`: orthonormal directions per layer, from `principal_directions`.
        seed, batch: of the noise. The same seed gives a sequence the same noise whatever the batch, the order and
            the device; `Batch(ids=...)` names the sequences, and rows with one id get one noise.
        record: called with what was really done, see `Record`.

    Returns hooks in firing order. Raises SiteError for what the model does not have, GeometryError for settings that
    do not fit; when run, DisplacementError (with the layer, the share of tokens and the largest possible
    displacement) where a token cannot be moved so far, unless `clip` or `allow_flip` say otherwise; HookError
    for one-token passes, whose position is not known.
    """
    if kind not in KINDS:
        raise GeometryError(f"there is no perturbation {kind!r}", cure=f"choose one of {', '.join(KINDS)}")
    if isinstance(how, str) and how in PRESETS:
        how = PRESETS[how]
    if not isinstance(how, Perturbation):
        raise GeometryError(
            f"there is no way of perturbing {how!r}", cure=f"pass a Perturbation, or one of {', '.join(PRESETS)}"
        )
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise GeometryError(f"seed is {seed!r}", cure="give a whole number of 0 or more")
    if unit not in get_args(Unit):
        raise GeometryError(f"unit is {unit!r}", cure=f"choose one of {', '.join(get_args(Unit))}")
    anatomy, found, chosen = require(model, site, layers, editing=True)
    distances = _checked(displacement, anatomy.n_layers)
    if how.tangent == "principal" and kind == "angular":
        usable = isinstance(directions, Tensor) and directions.ndim == 3 and len(directions) == anatomy.n_layers
        if not usable:
            shape = tuple(directions.shape) if isinstance(directions, Tensor) else directions
            raise GeometryError(
                f"principal tangents need directions [layer, k, d] of {anatomy.n_layers} layers, and got {shape}",
                cure="pass directions=principal_directions(model, data, ...)",
            )
    elif directions is not None:
        raise GeometryError("directions are for angular changes with tangent='principal'", cure="leave them out")

    def make(layer: int, **common: Any) -> _Perturbing:
        basis = None if directions is None else directions[layer]
        return _Perturbing(
            layer=layer, kind=kind, distance=distances[layer], how=how, unit=unit, basis=basis, seed=seed,
            record=record, **common,
        )  # fmt: skip

    edits = layer_edits(
        make, model, anatomy, chosen, found, heads=heads, positions=positions, grouping=grouping, batch=batch
    )
    return [hook for edit in edits for hook in edit.hooks(anatomy.reads(found, edit.layer, editing=True))]


@dataclass(frozen=True)
class _Perturbing(LayerEdit):
    """How the vectors of one site of one layer are moved."""

    kind: Kind
    distance: float
    how: Perturbation
    unit: Unit
    basis: Tensor | None
    seed: int
    record: Record | None

    @property
    def idle(self) -> bool:
        return self.distance == 0.0

    @property
    def knows_place(self) -> bool:
        return True  # noise belongs to positions

    def edited(self, tensor: Tensor, acts: dict[str, Tensor]) -> Tensor:
        new = super().edited(tensor, acts)
        if self.record is not None and "moved" in acts:
            before, after = self._vectors(acts), acts["moved"]
            if self.site.name != "mlp_contribution":  # whose slices the model sees added up only
                after = self._vectors({**acts, self.target: new})
            self.record(self.layer, before, after, acts["wanted"], acts["chosen"], acts["clipped"])
        return new

    def _vectors(self, acts: dict[str, Tensor]) -> Tensor:
        """The site's vectors in an activation as it is given to the model, in its dtype where the site allows."""
        update, _ = self.site.vectors(acts)
        return group_heads(update, self.grouping, self.facts.n_kv_heads) if self.site.has_heads else update

    def change(self, update: Tensor, reference: Tensor, acts: dict[str, Tensor]) -> Tensor:
        h = update.to(torch.promote_types(update.dtype, torch.float32))
        chosen = self._moved(h)
        norm = torch.linalg.vector_norm(h, dim=-1)
        size = self._mean(norm, chosen) if self.how.matching == "mean" else norm
        wanted = size * self.distance if self.unit == "relative" else torch.full_like(size, self.distance)
        wanted = wanted.expand_as(norm)
        possible = self._possible(wanted, size, chosen)
        if self.kind == "magnitude":
            signed = possible * self._signs(norm)
            change = rescaling_change(h, signed if self.how.matching == "per_token" else signed / size * norm)
        else:
            change = self._turned(h, norm, size, possible)
        change = self.inside(torch.where(chosen.unsqueeze(-1), change, 0.0))
        if not change.isfinite().all():
            raise DisplacementError(
                "there is no direction to move a token in: its vector is zero, or (tangent='semantic') that of an "
                "earlier token, as at layer 0 where a token is said again",
                where=self.where,
                cure="leave these layers or positions out, or use tangent='random'",
            )
        acts |= {"wanted": wanted, "chosen": chosen, "clipped": chosen & (possible < wanted), "moved": h + change}
        return change

    def _moved(self, h: Tensor) -> Bool[Tensor, "batch pos *group"]:
        """Which vectors are moved: the chosen heads and positions of real tokens."""
        chosen = self.chosen(h).squeeze(-1)
        if self.batch.real is not None:
            real = self.batch.real
            if real.shape != h.shape[:2]:
                raise HookError(
                    f"Batch.real is {tuple(real.shape)} for a batch of {tuple(h.shape[:2])}",
                    where=self.where,
                    cure="set it for each batch that is run",
                )
            chosen = chosen & real.to(h.device).reshape(*real.shape, *[1] * (h.ndim - 3))
        return chosen.expand(h.shape[:-1])

    def _mean(self, norm: Tensor, chosen: Tensor) -> Tensor:
        """The mean norm of a sequence's moved vectors, head by head where there are heads."""
        total = torch.where(chosen, norm, 0.0).sum(1, keepdim=True)
        return (total / chosen.sum(1, keepdim=True).clamp_min(1)).expand_as(norm)

    def _possible(self, wanted: Tensor, size: Tensor, chosen: Tensor) -> Tensor:
        """The displacement as far as it can be; raises where that is less and was not asked for."""
        if self.kind == "angular":
            limit, too_far = 2 * size, wanted > 2 * size
        elif self.how.allow_flip:
            return wanted
        else:
            limit, too_far = size, (wanted >= size) & (self._signs(wanted) < 0)
        too_far = too_far & chosen
        if too_far.any() and not self.how.clip:
            smallest = float(torch.where(chosen, limit, torch.inf).detach().min())
            raise self._impossible(int(too_far.sum()), int(chosen.sum()), smallest)
        return torch.where(too_far, limit, wanted)

    def _impossible(self, n_far: int, n_all: int, smallest: float) -> DisplacementError:
        turned = self.kind == "angular"
        return DisplacementError(
            f"{n_far} of {n_all} tokens ({n_far / n_all:.1%}) cannot be {'turned' if turned else 'made shorter'} by a "
            f"displacement of {self.distance:g} ({self.unit})",
            where=self.where,
            cure=f"displace by {'at most 2' if turned else 'less than 1'} (relative) or {smallest:.4g} (absolute: the "
            f"smallest limit here), or choose clip{'' if turned else ' or allow_flip'}",
        )

    def _signs(self, like: Tensor) -> Tensor:
        if self.how.signs in ("grow", "shrink"):
            return torch.full_like(like, 1.0 if self.how.signs == "grow" else -1.0)
        layer = self.layer if self.how.signs == "redrawn" else None
        return token_noise(like, self.batch, "sign", seed=self.seed, layer=layer, shared=False)

    def _turned(self, h: Tensor, norm: Tensor, size: Tensor, wanted: Tensor) -> Tensor:
        direction = self.inside(self._direction(h))
        if self.how.matching == "per_token":
            return rotation_change(h, direction, wanted)
        share = wanted / size  # 2 sin(t / 2), one for the sequence
        sine = share * (1 - share.square() / 4).clamp_min(0).sqrt()
        unit = direction / torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
        change: Tensor = (sine * norm).unsqueeze(-1) * unit - (share.square() / 2).unsqueeze(-1) * h
        return change

    def _direction(self, h: Tensor) -> Tensor:
        """Where vectors are turned to, not yet orthogonal to them."""
        noise = partial(token_noise, batch=self.batch, seed=self.seed)
        if self.how.tangent == "semantic":
            chance = noise(
                h[..., 0].flatten(2)[..., 0] if h.ndim > 3 else h[..., 0],
                draw="uniform",
                layer=self.layer,
                shared=False,
            )
            return _earlier(h, chance) - h
        if self.basis is not None:
            basis = self.basis.to(h)
            if basis.shape[-1] != h.shape[-1]:
                raise GeometryError(
                    f"directions of {basis.shape[-1]} components do not fit vectors of {h.shape[-1]}",
                    where=self.where,
                    cure="make them for this site and grouping",
                )
            weights = noise(h[..., :1].expand(*h.shape[:-1], len(basis)), draw="normal", layer=self.layer, shared=False)
            return weights @ basis
        shared = self.how.noise == "shared"
        return noise(h, draw="normal", layer=None if shared else self.layer, shared=shared)


def _earlier(
    h: Float[Tensor, "batch pos *rest"], chance: Float[Tensor, "batch pos"]
) -> Float[Tensor, "batch pos *rest"]:
    """For every token the vector of an earlier one, not the first where there is a choice; position 0 keeps its own."""
    place = torch.arange(h.shape[1], device=h.device)
    first = (place > 1).long()
    earlier = torch.where(place > 0, first + (chance * (place - first)).long(), 0)
    return h.gather(1, earlier.reshape(*earlier.shape, *[1] * (h.ndim - 2)).expand_as(h))


def _checked(displacement: Any, n_layers: int) -> list[float]:
    """A displacement for every layer. Raises GeometryError for what is negative, not finite, or of another length."""
    cure = f"give a number of 0 or more, or {n_layers} of them, one for each layer"
    try:
        number = torch.as_tensor(displacement, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GeometryError(f"a displacement of {displacement!r} is no number", cure=cure) from error
    if number.shape not in ((), (n_layers,)) or not torch.isfinite(number).all() or (number < 0).any():
        raise GeometryError(f"a displacement of {displacement!r} cannot be used", cure=cure)
    found: list[float] = number.expand(n_layers).tolist()
    return found
