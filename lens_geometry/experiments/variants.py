"""Ways of making an L2-matched perturbation, by name: the default, what was published, and one switch at a time.

Every variant but the default is a control: it says what of the comparison between direction and magnitude is due to
how the noise was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from lens_geometry.edits import PRESETS, Batch, Hooks, Kind, Perturbation, Unit, perturb
from lens_geometry.edits.perturbing import Record
from lens_geometry.errors import DataError


@dataclass(frozen=True)
class Variant:
    """A perturbation and whether it moves position 0 too. `changes` is what it has that the default has not."""

    how: Perturbation
    changes: str
    position_0: bool = False

    def key(self, kind: str, components: int) -> str:
        """What of the switches bears on this kind, in words: variants that differ in the rest are one run."""
        how, turned = self.how, kind == "angular"
        tangent = f"{how.tangent} of {components}" if how.tangent == "principal" else how.tangent
        parts = [kind, *((f"{how.noise} noise", tangent) if turned else (f"{how.signs} signs",)), how.matching]
        flips = how.allow_flip and not turned
        parts += [word for word, on in (("clip", how.clip), ("flip", flips), ("position 0", self.position_0)) if on]
        return ", ".join(parts)


_default = PRESETS["default"]
VARIANTS = {
    "default": Variant(_default, "fresh noise, signs redrawn, every token moved by exactly the displacement"),
    "paper": Variant(PRESETS["paper"], "as the published text has it: position 0 is moved too", position_0=True),
    "as_run": Variant(PRESETS["as_run"], "as published code ran: shared noise, one scale for all tokens, clips, flips"),
    "shared_noise": Variant(replace(_default, noise="shared"), "the same directions in all layers and sequences"),
    "fixed_signs": Variant(replace(_default, signs="fixed"), "a token grows, or shrinks, in all layers alike"),
    "shared_and_fixed": Variant(
        replace(_default, noise="shared", signs="fixed"), "both add up over layers: same directions, same signs"
    ),
    "mean_displacement": Variant(
        replace(_default, matching="mean"), "one scale for all tokens of a sequence, noise not made orthogonal"
    ),
    "growing": Variant(replace(_default, signs="grow"), "magnitude changes are all upwards"),
    "shrinking": Variant(replace(_default, signs="shrink"), "magnitude changes are all downwards"),
    "with_position_0": Variant(_default, "position 0 is moved too", position_0=True),
    "principal": Variant(replace(_default, tangent="principal"), "turned along principal directions of the stream"),
    "semantic": Variant(replace(_default, tangent="semantic"), "turned towards an earlier token's vector"),
}


def check_variants(names: Any) -> tuple[str, ...]:
    """The names, each once. Raises DataError for one that there is not, for none, and for a text instead of several."""
    known = ", ".join(VARIANTS)
    if isinstance(names, str) or not names:
        raise DataError(f"variants are {names!r}", cure=f"give a tuple of some of {known}")
    for name in names:
        if name not in VARIANTS:
            raise DataError(f"there is no variant {name!r}", cure=f"choose among {known}")
    return tuple(dict.fromkeys(names))


def variant_hooks(
    model: Any,
    variant: str,
    kind: Kind,
    displacement: float | Tensor,
    *,
    layers: Any,
    unit: Unit,
    seed: int,
    site: str = "resid",
    directions: Tensor | None = None,
    record: Record | None = None,
) -> Callable[[Batch], Hooks]:
    """What a `runner.Condition` takes: the perturbation's hooks, made for the batches to come."""
    chosen = VARIANTS[variant]
    principal = chosen.how.tangent == "principal" and kind == "angular"
    make = partial(
        perturb,
        model,
        kind,
        displacement,
        chosen.how,
        site=site,
        layers=layers,
        positions=None if chosen.position_0 else slice(1, None),
        unit=unit,
        directions=directions if principal else None,
        seed=seed,
        record=record,
    )
    return lambda batch: make(batch=batch)
