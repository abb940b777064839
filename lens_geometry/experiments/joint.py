"""Many layers edited at once, each at its own scale: their losses and applied strengths on one set of sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lens_geometry.anatomy import at_rest, attached
from lens_geometry.data import Tokens
from lens_geometry.edits import Hooks, scale
from lens_geometry.experiments.changes import NO_CHANGE, Change, change
from lens_geometry.experiments.paths import Scales
from lens_geometry.metrics import SequenceLosses
from lens_geometry.runner import Condition, RunSettings, batches, run_conditions
from lens_geometry.sites import HOOKS, SITES, Grouping, token_mask

BRANCH = {"attn": "attn_out", "value": "attn_out", "value_excl_self": "attn_out", "mlp": "mlp_out"}
"""Site -> the hook that holds the output of the branch it is in."""


@dataclass
class JointEdits:
    """A model and some sequences, with the losses found on them so far."""

    model: Any
    tokens: Tokens
    settings: RunSettings
    grouping: Grouping
    skip_position_0: bool
    journal: Path | None
    about: dict[str, Any]
    losses: dict[str, SequenceLosses] = field(default_factory=dict)

    def hooks(self, site: str, scales: Scales) -> Hooks:
        """The edit of a site in several layers, each at its own scale of the parallel part."""
        positions = slice(1, None) if self.skip_position_0 else None
        shared: dict[str, Any] = {"positions": positions, "grouping": self._grouping(site)}
        return [hook for layer, s in scales for hook in scale(self.model, site, parallel=s, layers=layer, **shared)]

    def run(self, site: str, schedules: Iterable[Scales]) -> None:
        """Find the losses under each of these edits, those that are known already left out."""
        new = {self._key(site, scales): scales for scales in schedules if scales}
        conditions = [self._condition(site, scales) for key, scales in new.items() if key not in self.losses]
        if not conditions and self.losses:
            return
        found = run_conditions(
            self.model, self.tokens, conditions, self.settings, journal=self.journal, about=self.about
        )
        self.losses = {**found, **self.losses}

    def change(self, site: str, scales: Scales, against: Scales = ()) -> Change:
        """Change of loss from one edit to another, both run before; the empty one is the unedited model."""
        if scales == against:
            return NO_CHANGE
        one, other = (self.losses[self._key(site, each)] for each in (scales, against))
        return change(one, other, self.settings.seed)

    def strengths(self, site: str, scales: Scales) -> dict[int, float]:
        """Applied strength of each layer, that layer alone edited: mean over tokens of |y' - y| / |y|.

        y is the output of the site's branch. Over real tokens whose y is not zero, position 0 left out.
        """
        if not scales:
            return {}
        names = {layer: HOOKS[BRANCH[site]].format(layer) for layer, _ in scales}
        mask, seen = token_mask(self.tokens.mask), dict[str, Tensor]()

        def reader(name: str) -> tuple[str, Any]:
            return name, lambda tensor, hook: seen.update({name: tensor.detach().clone()})

        ratios: dict[int, list[Tensor]] = {layer: [] for layer in names}
        with at_rest(self.model):
            for rows, ids, _ in batches(self.model, self.tokens, self.settings.batch_size):
                real = mask[rows.start : rows.stop].to(ids.device)
                with attached(self.model, list(map(reader, names.values()))):
                    self.model(ids, stop_at_layer=max(names) + 1)
                clean = dict(seen)
                for layer, s in scales:
                    before = _wide(clean.pop(names[layer]))
                    with attached(self.model, [*self.hooks(site, ((layer, s),)), reader(names[layer])]):
                        self.model(ids, stop_at_layer=layer + 1)
                    after = _wide(seen.pop(names[layer]))
                    size = before.norm(dim=-1)
                    ratios[layer].append(((after - before).norm(dim=-1) / size)[real & (size > 0)].double().cpu())
        whole = {layer: torch.cat(parts) for layer, parts in ratios.items()}
        return {layer: float(found.mean()) if len(found) else 0.0 for layer, found in whole.items()}

    def _condition(self, site: str, scales: Scales) -> Condition:
        return Condition(key=self._key(site, scales), hooks=lambda _: self.hooks(site, scales))

    def _key(self, site: str, scales: Scales) -> str:
        if not scales:
            return "base"
        return f"{site} {self._grouping(site)} " + " ".join(f"{layer}:{s!r}" for layer, s in scales)

    def _grouping(self, site: str) -> Grouping:
        return self.grouping if SITES[site].has_heads else "each"


def _wide(vectors: Tensor) -> Tensor:
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))
