"""Clean and perturbed passes of the mediators' experiment, batch by batch, each sequence journalled by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool
from torch import Tensor

from lens_geometry.anatomy import at_rest, attached
from lens_geometry.data import Tokens
from lens_geometry.edits import Batch, Hooks, applied
from lens_geometry.edits.mediating import MediatorReader, Tally
from lens_geometry.errors import DisplacementError, ModelError
from lens_geometry.experiments.mediator_rows import Measured
from lens_geometry.journal import Journal
from lens_geometry.metrics import SequenceLosses, sequence_losses
from lens_geometry.runner import RunSettings, bar, batches


def run(
    model: Any,
    tokens: Tokens,
    conditions: Mapping[str, Callable[[Batch], Hooks]],
    scored: Bool[Tensor, "sequence pos"],
    reader: MediatorReader,
    journal: Journal,
    settings: RunSettings,
) -> None:
    """Every batch clean, then under each condition's hooks; each sequence goes to the journal as soon as it is run.

    The journal's keys are "base #3" and "CONDITION #3", or "CONDITION impossible". `scored` says which tokens are
    measured. Raises ModelError where the unedited model's losses are not finite, ResultError as `Journal` does.
    """
    batch = Batch()
    numbers = [*range(len(tokens.ids))] if tokens.noise_ids is None else [*tokens.noise_ids]
    hooks = {key: make(batch) for key, make in conditions.items()}
    total = (1 + len(conditions)) * -(-len(tokens.ids) // settings.batch_size)
    with at_rest(model), bar(total, "mediators", settings.progress) as progress:
        for chosen, ids, mask in batches(model, tokens, settings.batch_size):
            measured = scored[chosen.start : chosen.stop]
            counted = None if tokens.scored is None else tokens.scored[chosen.start : chosen.stop]
            batch.ids, batch.real = numbers[chosen.start : chosen.stop], mask
            tally = reader.start(measured)
            with attached(model, reader.keep()):
                losses = sequence_losses(model, ids, mask, counted)
            if losses.nonfinite.any():
                raise ModelError(
                    f"the unedited model's losses are not finite in sequences {chosen.start} to {chosen.stop - 1}",
                    cure="check the weights and the dtype (float16 overflows where bfloat16 and float32 do not)",
                )
            for place, sequence in enumerate(chosen):
                _keep(journal, f"base #{sequence}", losses, tally, place)
            progress.update()
            for key in conditions:
                if not all(_done(journal, key, sequence) for sequence in chosen):
                    progress.set_postfix_str(key, refresh=False)
                    tally = reader.start(measured)
                    try:
                        with applied(model, [*hooks[key], *reader.compare()], require_change=False):
                            losses = sequence_losses(model, ids, mask, counted)
                        for place, sequence in enumerate(chosen):
                            _keep(journal, f"{key} #{sequence}", losses, tally, place)
                    except DisplacementError as error:
                        lost = SequenceLosses(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
                        journal.add(f"{key} impossible", lost, {"impossible": str(error)})
                progress.update()


def _done(journal: Journal, key: str, sequence: int) -> bool:
    return f"{key} impossible" in journal.losses or f"{key} #{sequence}" in journal.losses


def _keep(journal: Journal, key: str, losses: SequenceLosses, tally: Tally, place: int) -> None:
    """One sequence into the journal; what is there already must be the same again if nothing was edited."""
    here = slice(place, place + 1)
    own = SequenceLosses(losses.sums[here], losses.counts[here], losses.nonfinite[here])
    if key not in journal.losses:
        found: dict[str, Any] = {"sums": tally.sums[place].tolist(), "counts": tally.counts[place].tolist()}
        found |= {"clipped": int(tally.clipped[place]), "flipped": int(tally.flipped[place])}
        journal.add(key, own, found)
    elif key.startswith("base "):
        journal.check_same(journal.losses[key], own)


def measured_of(journal: Journal, key: str, n_sequences: int) -> Measured:
    """What the journal holds of all sequences under one condition, or "base"."""
    keys = [f"{key} #{sequence}" for sequence in range(n_sequences)]
    losses = SequenceLosses(*map(np.concatenate, zip(*(journal.losses[name] for name in keys), strict=True)))
    sums, counts = (np.array([journal.measured[name][what] for name in keys], float) for what in ("sums", "counts"))
    moved = {what: sum(journal.measured[name][what] for name in keys) for what in ("clipped", "flipped")}
    return Measured(sums, counts, losses, **moved)
