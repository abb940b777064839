"""What `dissociation` runs: its settings, and the pairs and layers that they name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lens_geometry.anatomy import inspect
from lens_geometry.errors import DataError
from lens_geometry.experiments.variants import check_variants
from lens_geometry.metrics import Scoring
from lens_geometry.pair import Pairs
from lens_geometry.pairs import load_pairs
from lens_geometry.runner import RunSettings, at_least


@dataclass(frozen=True)
class DissociationSettings(RunSettings):
    """Settings of `dissociation`.

    Attributes:
        displacements: how far every token is moved at every perturbed layer.
        unit: of the displacements: "relative" to each token's own norm, "median" (to the median norm of the layer's
            tokens in the unedited model), or "absolute".
        layers: layer sets, each perturbed in all of its layers at once: "middle" (the middle third), "10-17", "all";
            "windows:8" stands for windows of 8 layers over the depth, each half a window further.
        seeds: how many draws of noise, numbered from `seed` on; each is run on all text and pairs.
        variants: ways of making the perturbation: "default" (fresh directions, signs redrawn in every layer), "as_run"
            (as published code: shared directions, redrawn signs, one scale for all tokens), "shared_noise",
            "fixed_signs", "shared_and_fixed" (each token's sign, or direction, the same in all layers),
            "mean_displacement", "growing", "shrinking", "with_position_0", "paper" (position 0 moved too), "principal"
            (turned along principal directions), "semantic" (towards an earlier token); see `VARIANTS`.
        site: which vectors are moved; "resid" is the stream that enters a block.
        scoring: of pairs: "sentence", "word" (the critical one) or "normalised" (per token).
        max_pairs: so many pairs are drawn of each set that is given by name; None takes all.
        equal_loss: also compare at displacements that cost this much loss (nats per token), found from each kind's
            dose-response: what is left of a difference on pairs there is no matter of dose.
        low_regime: displacements up to this one are the low regime; None takes their median.
        components: principal directions of the "principal" variant.
    """

    sequence_length: int = 128
    displacements: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    unit: Literal["relative", "median", "absolute"] = "relative"
    layers: tuple[str, ...] = ("middle",)
    seeds: int = 5
    variants: tuple[str, ...] = ("default", "as_run")
    site: str = "resid"
    scoring: Scoring = "sentence"
    max_pairs: int | None = 200
    equal_loss: tuple[float, ...] = ()
    low_regime: float | None = None
    components: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, seeds=1, components=1)
        check_variants(self.variants)
        for name, least in (("displacements", 1), ("equal_loss", 0)):
            found = getattr(self, name)
            if not isinstance(found, tuple | list) or len(found) < least or not all(map(_is_size, found)):
                raise DataError(f"{name} is {found!r}", cure=f"give a tuple of numbers above 0, such as {name}=(0.1,)")
            if len(set(found)) < len(found):
                raise DataError(f"{name} {found!r} has one twice", cure="name each once")
        if self.low_regime is not None and not _is_size(self.low_regime):
            raise DataError(f"low_regime is {self.low_regime!r}", cure="give a displacement, or None for their median")
        if isinstance(self.layers, str) or not self.layers:
            raise DataError(f"layers is {self.layers!r}", cure="give a tuple of layer sets, such as ('10-17',)")
        if self.unit not in ("relative", "median", "absolute"):
            raise DataError(f"unit is {self.unit!r}", cure="choose one of relative, median, absolute")


def _is_size(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < np.inf


def pair_sets(pairs: Any, settings: DissociationSettings) -> list[Pairs]:
    """The sets of pairs, drawn where they are given by name. Raises DataError for two of one name."""
    if pairs is None:
        return []
    given = [pairs] if isinstance(pairs, Pairs | str | os.PathLike) else list(pairs)
    found = [
        one if isinstance(one, Pairs) else load_pairs(one, max_pairs=settings.max_pairs, seed=settings.seed)
        for one in given
    ]
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise DataError(f"pairs {names} have a name twice", cure="give each set once")
    return found


def layer_texts(model: Any, settings: DissociationSettings) -> Iterator[str]:
    """The layer sets as texts, windows written out."""
    for text in settings.layers:
        if not isinstance(text, str):
            raise DataError(f"{text!r} names no layer set", cure='write it as text: "middle", "10-17", "windows:8"')
        if not text.startswith("windows:"):
            yield text
            continue
        n_layers, width = inspect(model).n_layers, text.removeprefix("windows:")
        if not width.isdecimal() or not 0 < int(width) <= n_layers:
            raise DataError(f"{text!r} are no windows of layers", cure=f"write windows:1 to windows:{n_layers}")
        size = int(width)
        last = n_layers - size
        for first in sorted({*range(0, last, max(1, size // 2)), last}):
            yield f"{first}-{first + size - 1}" if size > 1 else str(first)
