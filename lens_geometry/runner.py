"""HOW an experiment is run: many edits over much text, in batches, with progress, resumable."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm import tqdm

from lens_geometry import models
from lens_geometry.anatomy import at_rest, attached, carried_hooks, inspect, probe_tokens
from lens_geometry.data import Tokens, tokenize
from lens_geometry.edits import Batch, Hooks, applied
from lens_geometry.errors import DataError, DisplacementError, HookError, ModelError
from lens_geometry.journal import Journal
from lens_geometry.metrics import SequenceLosses, sequence_losses
from lens_geometry.prefix import Streams, starting_at
from lens_geometry.provenance import suppression_of
from lens_geometry.results import jsonable, versions
from lens_geometry.sites import SITES


@dataclass(frozen=True)
class RunSettings:
    """What every experiment needs to know about its text and its batches.

    Attributes:
        sequence_length: tokens per sequence.
        max_sequences: how many sequences, spread evenly over the text; None takes all.
        batch_size: sequences per forward pass; changes speed and memory, not results.
        prepend_bos: put the tokenizer's BOS before every sequence.
        seed: of noise, of the bootstrap, and of tokens that are shuffled or drawn at random.
        progress: show progress bars.
    """

    sequence_length: int = 256
    max_sequences: int | None = 16
    batch_size: int = 8
    prepend_bos: bool = False
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        at_least(self, sequence_length=2, batch_size=1, seed=0)
        if self.max_sequences is not None:
            at_least(self, max_sequences=1)


def at_least(settings: Any, **least: int) -> None:
    """Raise DataError for a setting that is no whole number or too small, before anything is run."""
    for name, low in least.items():
        value = getattr(settings, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**63:
            raise DataError(f"{name} is {value!r}", cure=f"give a whole number of {low} or more (below 2^63)")


@dataclass(frozen=True)
class Condition:
    """One edit to be run over the text: a stable key, and its hooks made for the batches to come.

    `first_layer` is the first layer that the edit touches or reads: what comes before is not computed again.
    With several keys, as many edits are run side by side: each batch holds every sequence once for each of them, first
    all sequences for the first key, and the hooks tell the rows apart.
    `measured` is called when the condition has run, and says what was seen of it: plain numbers and texts.
    `before` is called with each batch's ids before its pass. The hooks are on by then; a pass of its own begins at the
    same stored stream.
    """

    key: str | tuple[str, ...]
    hooks: Callable[[Batch], Hooks]
    first_layer: int = 0
    measured: Callable[[], dict[str, Any]] | None = None
    before: Callable[[Int[Tensor, "batch pos"]], None] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,) if isinstance(self.key, str) else self.key


def prepare(model: Any, data: Any, settings: RunSettings) -> Tokens:
    """The tokens of an experiment. Raises ModelError or DataError for what cannot be used."""
    models.require_model(model)
    for warning in model_warnings(model):
        warnings.warn(warning, stacklevel=3)
    return tokenize(
        model,
        data,
        sequence_length=settings.sequence_length,
        max_sequences=settings.max_sequences,
        prepend_bos=settings.prepend_bos,
        seed=settings.seed,
    )


def model_warnings(model: Any) -> list[str]:
    """What about the model makes its numbers those of another: processed weights, hooks that somebody left on."""
    left = carried_hooks(model)
    found = models.processing_warnings(model)
    if left:
        found.append(f"the model carries hooks of its own, which were active: {', '.join(left)}")
    suppression = suppression_of(model)
    if suppression is not None and suppression["status"] != "attached":
        found.append(
            f"the suppression that this model was trained under was {suppression['status']}: its numbers are not those "
            "of the model that was trained"
        )
    return found


def batches(
    model: Any, tokens: Tokens, batch_size: int
) -> Iterator[tuple[range, Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]]:
    """`(sequence numbers, ids, mask)` of each batch, on the model's device."""
    device = next(model.parameters()).device
    for start in range(0, len(tokens.ids), batch_size):
        rows = range(start, min(start + batch_size, len(tokens.ids)))
        yield (
            rows,
            tokens.ids[rows.start : rows.stop].to(device),
            tokens.mask[rows.start : rows.stop].to(device),
        )


def bar(total: int | None, what: str, progress: bool) -> tqdm[Any]:
    """A progress bar that appears after two seconds."""
    interval = 0.2 if sys.stderr.isatty() else 20.0  # a log file gets a line now and then
    return tqdm(
        total=total,
        desc=what,
        delay=2,
        disable=not progress,
        leave=False,
        dynamic_ncols=True,
        mininterval=interval,
    )


def run_conditions(
    model: Any,
    tokens: Tokens,
    conditions: Sequence[Condition],
    settings: RunSettings,
    *,
    journal: Path | None = None,
    about: dict[str, Any] | None = None,
    measured: dict[str, dict[str, Any]] | None = None,
    what: str = "conditions",
) -> dict[str, SequenceLosses]:
    """Losses of every sequence without edits (key "base") and under each condition.

    What conditions have `measured` is put into `measured`, by key. A condition that raises a DisplacementError is
    finished too: all its losses count as not finite, and `measured` has the error's text under "impossible".

    With a `journal`, each finished condition is written to it at once, and those that are in it are not
    run again; `about` says what the numbers depend on, and a journal of something else is refused.
    Raises ModelError when the unedited model gives no finite loss, HookError when an edit does nothing,
    ResultError when the journal cannot be used.
    """
    done = Journal(journal, about or {}) if journal else Journal(None, {})
    todo = [Condition("base", lambda _: []), *conditions]
    before = done.losses.pop("base", None)  # run again: what changed since, in the model or around it, shows here
    todo = [condition for condition in todo if not {*condition.keys} <= done.losses.keys()]
    sizes = [max(1, settings.batch_size // len(condition.keys)) for condition in todo]
    steps = sum(-(-len(tokens.ids) // size) for size in sizes)
    numbers = [*range(len(tokens.ids))] if tokens.noise_ids is None else [*tokens.noise_ids]
    streams = Streams(model, tokens, [condition.first_layer for condition in todo])
    with at_rest(model), bar(steps, what, settings.progress) as progress:
        for condition, size in zip(todo, sizes, strict=True):
            progress.set_postfix_str(condition.keys[0], refresh=False)
            batch, copies, found = Batch(), len(condition.keys), []
            base = condition.key == "base"
            start = streams.nearest(condition.first_layer)
            hooks = streams.keepers() if base else condition.hooks(batch)
            impossible = ""
            try:
                with (
                    starting_at(model, start) as shortcut,
                    applied(model, hooks, require_change=False),  # no effect is a finding of the table
                ):
                    for rows, ids, mask in batches(model, tokens, size):
                        streams.rows = rows
                        batch.ids, batch.real = numbers[rows.start : rows.stop] * copies, mask.repeat(copies, 1)
                        shortcut.stream = streams.of(start, rows, copies)
                        scored = tokens.scored
                        scored = None if scored is None else scored[rows.start : rows.stop].repeat(copies, 1)
                        if condition.before is not None:
                            condition.before(ids.repeat(copies, 1))
                        found.append(sequence_losses(model, ids.repeat(copies, 1), batch.real, scored))
                        progress.update()
            except DisplacementError as error:
                impossible, found = str(error), [_lost(done.losses["base"], copies)]
            seen = {"impossible": impossible} if impossible else condition.measured() if condition.measured else {}
            for number, key in enumerate(condition.keys):
                losses = SequenceLosses(*map(np.concatenate, zip(*_copies(found, copies, number), strict=True)))
                if base and losses.nonfinite.any():
                    raise _nonfinite_base(model, tokens, losses)
                if base and before is not None:
                    done.check_same(before, losses)
                    done.losses["base"] = before
                elif key not in done.losses:
                    done.add(key, losses, seen)
    if measured is not None:
        measured.update(done.measured)
    return done.losses


def _lost(base: SequenceLosses, copies: int) -> SequenceLosses:
    """The losses of a condition that could not be run: none is finite."""
    counts = np.tile(base.counts, copies)
    return SequenceLosses(np.zeros(len(counts)), counts, counts)


def _copies(found: list[SequenceLosses], copies: int, number: int) -> list[SequenceLosses]:
    """The rows of one of several edits that were run side by side."""
    arrays: Iterator[list[Any]] = ([np.split(array, copies)[number] for array in losses] for losses in found)
    return [SequenceLosses(*parts) for parts in arrays]


def provenance(model: Any, tokens: Tokens, settings: RunSettings, *, started: float, **more: Any) -> dict[str, Any]:
    """A result's meta: what was run, on what, with which versions; its token mask names what alone is scored."""
    if tokens.scored is not None:
        more["token_mask"] = "; ".join(filter(None, (more.get("token_mask"), tokens.meta["scored"])))
    return {
        "model": models.describe(model),
        "data": tokens.meta,
        "settings": {key: jsonable(value) for key, value in asdict(settings).items() if key != "progress"},
        "seed": settings.seed,
        "versions": versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started, 2),
        "warnings": model_warnings(model),
        **more,
    }


def identity_of_run(model: Any, tokens: Tokens, settings: Any, *, free: Iterable[str] = ()) -> dict[str, Any]:
    """What a number depends on, for resuming: batch size and progress do not belong to it.

    Nor do the `free` settings, which say what is run, not how: the conditions' keys hold them.
    """
    about = models.describe(model)
    suppressed = {} if about["suppression"] is None else {"suppression": about["suppression"]}
    kept = {key: value for key, value in asdict(settings).items() if key not in ("progress", "batch_size", *free)}
    return {
        "model_fingerprint": about["fingerprint"],
        "dtype": about["dtype"],
        "class": about["class"],
        "device": about["device"],
        "attn_implementation": about["attn_implementation"],
        "tokens_sha256": tokens.meta["tokens_sha256"],
        "n_tokens": tokens.meta["n_tokens"],
        "scored_sha256": tokens.meta.get("scored_sha256"),
        **suppressed,
        "versions": {
            name: v
            for name, v in versions().items()
            if name in ("lens-geometry", "torch", "transformer-lens", "transformers")
        },
        **{f"settings.{key}": jsonable(value) for key, value in kept.items()},
    }


def _pushed(tensor: Tensor, hook: Any) -> Tensor:
    """An activation moved by its own size along a fixed direction, also where it is zero."""
    direction = torch.linspace(-1.0, 1.0, tensor.shape[-1], device=tensor.device)
    return tensor + ((1.0 + tensor.float().abs().mean()) * direction).to(tensor.dtype)


def check_effect(model: Any, hook_name: str) -> None:
    """Raise HookError unless changing a hook changes the model's logits: some hooks are only shown, not used."""
    ids = probe_tokens(model)
    with at_rest(model):
        before = model(ids, return_type="logits")
        with applied(model, [(hook_name, _pushed)]):
            after = model(ids, return_type="logits")
    if torch.equal(before, after):
        raise HookError(
            "an edit of this hook does not reach the model's output",
            where=hook_name,
            cure="use another site, or load the model as another class (backend='hooked' or 'bridge')",
        )


def check_effects(model: Any, sites: Iterable[str], layers: Iterable[int]) -> None:
    """`check_effect` of the hooks that edits of these sites change in these layers."""
    anatomy, layers = inspect(model), tuple(layers)
    for hook in sorted({anatomy.where(SITES[site], layer) for site in sites for layer in layers}):
        check_effect(model, hook)


def _nonfinite_base(model: Any, tokens: Tokens, losses: SequenceLosses) -> ModelError:
    """The error for a model that has no finite loss before anything is edited, naming the first bad layer."""
    row = int(np.flatnonzero(losses.nonfinite)[0])
    bad: list[str] = []

    def look(tensor: Tensor, hook: Any) -> None:
        if not torch.isfinite(tensor).all():
            bad.append(str(hook.name))

    names = [f"blocks.{layer}.hook_resid_post" for layer in range(inspect(model).n_layers)]
    with attached(model, [(name, look) for name in names]):
        model(tokens.ids[row : row + 1].to(next(model.parameters()).device), return_type="logits")
    return ModelError(
        f"the unedited model gives {int(losses.nonfinite.sum())} losses that are not finite (first in sequence {row})",
        where=bad[0] if bad else "the output layer",
        cure="check the weights and the dtype (float16 overflows where bfloat16 and float32 do not)",
    )
