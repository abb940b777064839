"""Many layers edited at once, each at its own scale: their losses and applied strengths on one set of sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lens_geometry.data import Tokens
from lens_geometry.edits import Hooks, scale
from lens_geometry.experiments.changes import NO_CHANGE, Change, change
from lens_geometry.experiments.paths import Scales
from lens_geometry.experiments.strength import branch_strengths
from lens_geometry.metrics import SequenceLosses
from lens_geometry.runner import Condition, RunSettings, run_conditions
from lens_geometry.sites import SITES, Grouping, token_mask


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
        edits = {site: (SITES[site], self.hooks(site, scales))}
        layers = tuple(sorted(layer for layer, _ in scales))
        mask = token_mask(self.tokens.counted)
        found = branch_strengths(self.model, self.tokens, edits, layers, mask, self.settings)[site]
        return {layer: one.mean("change_over_branch") for layer, one in found.items()}

    def _condition(self, site: str, scales: Scales) -> Condition:
        return Condition(
            key=self._key(site, scales), hooks=lambda _: self.hooks(site, scales), first_layer=min(scales)[0]
        )

    def _key(self, site: str, scales: Scales) -> str:
        if not scales:
            return "base"
        return f"{site} {self._grouping(site)} " + " ".join(f"{layer}:{s!r}" for layer, s in scales)

    def _grouping(self, site: str) -> Grouping:
        return self.grouping if SITES[site].has_heads else "each"
