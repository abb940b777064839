"""Which layers can be left out: orders by what their update does to the stream, by loss, and at random.

A blanked layer's error is its whole update (e = -u): against the update itself it has no perpendicular part, in any
layer, so that nothing can be ordered by it. What orders layers is the update's part perpendicular to the *stream*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lens_geometry.anatomy import at_rest, inspect
from lens_geometry.data import Tokens
from lens_geometry.edits import applied, observe, scale
from lens_geometry.errors import DataError, SiteError
from lens_geometry.experiments.bit_choice import change_columns, difference_columns
from lens_geometry.experiments.changes import change
from lens_geometry.geometry import lengths
from lens_geometry.metrics import SequenceLosses
from lens_geometry.runner import Condition, bar, batches, check_effects, identity_of_run, run_conditions
from lens_geometry.sites import Site, token_mask
from lens_geometry.stats import Floats, bootstrap_interval

SCORES = ("cosine", "perpendicular", "update")
Layers = tuple[int, ...]


class Blanked:
    """Losses of some sequences with layers blanked by an edit; those that are known are not run again."""

    def __init__(self, model: Any, tokens: Tokens, settings: Any, journal: Path | None) -> None:
        self.model, self.tokens, self.settings, self.journal = model, tokens, settings, journal
        self.about = identity_of_run(model, tokens, settings, free={*vars(settings)})
        self.losses: dict[str, SequenceLosses] = {}

    def run(self, sets: Iterable[Layers]) -> None:
        """Find the losses without each of these sets of layers."""
        new = {_key(layers): layers for layers in sets if layers}
        conditions = [
            Condition(key, hooks=lambda _, layers=layers: self._hooks(layers), first_layer=min(layers))  # type: ignore[misc]
            for key, layers in new.items()
            if key not in self.losses
        ]
        if conditions or not self.losses:
            found = run_conditions(
                self.model,
                self.tokens,
                conditions,
                self.settings,
                journal=self.journal,
                about=self.about,
                what="blanked layers",
            )
            self.losses = {**found, **self.losses}

    def cost(self, layers: Layers) -> float:
        """Mean loss per token without these layers, more than with them; inf where some losses are not finite."""
        found, base = self.losses[_key(layers)], self.losses["base"]
        if found.nonfinite.any():
            return float("inf")
        return float(found.sums.sum() / found.counts.sum() - base.sums.sum() / base.counts.sum())

    def _hooks(self, layers: Layers) -> Any:
        return scale(self.model, "block", parallel=0.0, perpendicular=0.0, layers=list(layers))


def drop_rows(
    base: Any, searched: Tokens, held_out: Tokens, settings: Any, out: Path | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of layer dropping, and what about them a reader must know. Settings: `LayerChoiceSettings`."""
    n_layers = inspect(base).n_layers
    most = max(1, n_layers // 3) if settings.max_blanked is None else settings.max_blanked
    if most > n_layers:
        raise DataError(f"max_blanked is {most}, and there are {n_layers} layers", cure=f"give {n_layers} or less")
    check_effects(base, ["block"], [0])
    halves = {
        name: Blanked(base, tokens, settings, None if out is None else out / f"blanked-{name}.jsonl")
        for name, tokens in (("search", searched), ("held_out", held_out))
    }
    scores = stream_scores(base, searched, settings)
    rows = [*_score_rows(scores)]
    search = halves["search"]
    search.run((layer,) for layer in range(n_layers))
    singles = {
        layer: change(search.losses[_key((layer,))], search.losses["base"], settings.seed) for layer in range(n_layers)
    }
    for layer, found in singles.items():
        ends = {"value": found.value, "value_low": found.low, "value_high": found.high}
        rows.append({"kind": "score", "choice": "loss", "layer": layer, "status": found.status, **ends})
    orders = {
        name: tuple(int(x) for x in np.argsort(values[:, 0], kind="stable")[:most]) for name, values in scores.items()
    }
    orders["loss"] = tuple(sorted(range(n_layers), key=lambda layer: (search.cost((layer,)), layer))[:most])
    orders["greedy_loss"] = greedy_order(search, n_layers, most)
    for number in range(1, settings.random_orders + 1):
        drawn = np.random.default_rng((settings.seed, number)).permutation(n_layers)[:most]
        orders[f"random {number}"] = tuple(int(x) for x in drawn)
    paid = halves["held_out"]
    paid.run(order[:n] for order in orders.values() for n in range(1, most + 1))
    remarks = []
    for name, order in orders.items():
        for n in range(1, most + 1):
            losses = {name: paid.losses[_key(order[:n])], "cosine": paid.losses[_key(orders["cosine"][:n])]}
            found = change(losses[name], paid.losses["base"], settings.seed)
            rows.append(
                {
                    "kind": "curve", "choice": name, "n_blanked": n, "layer": order[n - 1],
                    "n_sequences": len(held_out.ids), **change_columns(found),
                    **difference_columns(losses, name, "cosine", settings.seed),
                }
            )  # fmt: skip
    lost = sum(row.get("status") == "nonfinite" for row in rows)
    if lost:
        remarks.append(f"{lost} sets of blanked layers gave losses that are not finite; see their status")
    if all(orders["cosine"] == orders[name] for name in SCORES):
        remarks.append(
            "cosine distance, perpendicular part and whole update leave out the same layers in the same order"
        )
    return rows, remarks


def greedy_order(search: Blanked, n_layers: int, most: int) -> Layers:
    """Layers one after the other, always the one whose absence costs least beside those that are gone already."""
    gone: Layers = ()
    for _ in range(most):
        left = [layer for layer in range(n_layers) if layer not in gone]
        search.run((*gone, layer) for layer in left)
        gone = (*gone, min(left, key=lambda layer: (search.cost((*gone, layer)), layer)))
    return gone


def stream_scores(model: Any, tokens: Tokens, settings: Any) -> dict[str, Floats]:
    """What each block's update does to the stream that it is added to, a mean over tokens: [layer, (mean, low, high)].

        cosine         1 - cos(x, x + u) = |u_perp|^2 / (h (h + |x + u_par|)),  h = |x + u|
        perpendicular  |u_perp| / |x|
        update         |u| / |x|

    u_perp is perpendicular to x. Intervals by bootstrap over sequences.
    """
    measured = token_mask(tokens.counted, exclude=settings.exclude_positions)
    if not measured.any():
        raise SiteError("no token is left to measure", cure="use longer sequences or exclude fewer positions")
    n_layers = inspect(model).n_layers
    sums = np.zeros((len(SCORES), n_layers, len(tokens.ids)))
    at: dict[str, range] = {}

    def visit(_: Site, layer: int, update: torch.Tensor, reference: torch.Tensor) -> None:
        found = lengths(update, reference)
        along = found.reference.double() * (1 + found.alpha.double())
        aside, x = found.perpendicular.double(), found.reference.double()
        whole = torch.hypot(along, aside)
        values = torch.stack([aside.square() / (whole * (whole + along)), aside / x, found.update.double() / x])
        rows = at["rows"]
        real = measured[rows.start : rows.stop]
        sums[:, layer, rows.start : rows.stop] = torch.where(real, values.cpu(), 0.0).sum(-1).numpy()

    with at_rest(model), applied(model, observe(model, ["block"], visit)), bar(None, "stream", settings.progress):
        for rows, ids, _ in batches(model, tokens, settings.batch_size):
            at["rows"] = rows
            model(ids, stop_at_layer=n_layers)
    counts = measured.sum(1).numpy().astype(np.float64)
    found = {}
    for name, by_layer in zip(SCORES, sums, strict=True):
        means = by_layer.sum(1) / counts.sum()
        ends = [bootstrap_interval([one, counts], _ratio, seed=settings.seed) for one in by_layer]
        found[name] = np.column_stack([means, np.asarray(ends)])
    return found


def _ratio(sums: Any, counts: Any, axis: int) -> Any:
    return sums.sum(axis) / counts.sum(axis)


def _score_rows(scores: Mapping[str, Floats]) -> Iterator[dict[str, Any]]:
    for name, values in scores.items():
        for layer, (mean, low, high) in enumerate(values):
            ends = {"value": float(mean), "value_low": float(low), "value_high": float(high)}
            yield {"kind": "score", "choice": name, "layer": layer, "status": "ok", **ends}


def _key(layers: Layers) -> str:
    return "without " + " ".join(map(str, sorted(layers)))
