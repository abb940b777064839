"""Arms side by side: the same initial weights and the same batches, so that the edit is all that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lens_geometry.errors import DivergedError, TrainingError
from lens_geometry.results import Result, jsonable, versions
from lens_geometry.stats import two_way_interval
from lens_geometry.training.checkpoint import read_curve
from lens_geometry.training.config import TrainingConfig
from lens_geometry.training.data import open_tokens
from lens_geometry.training.suppression import Suppression, arm
from lens_geometry.training.trainer import about_tokens, train

Clock = Literal["seconds", "cpu_seconds"]
BASELINE = "baseline"


def compare_arms(
    config: TrainingConfig, arms: Sequence[str], *, seeds: int = 1, first_seed: int = 0, clock: Clock = "seconds"
) -> Result:
    """Train every arm from every seed, and compare their losses on held-out documents, pair by pair.

    Runs are in `OUT/ARM-seedN`. Those that are finished are read, one that was stopped goes on: the same call at any
    point ends with the same table. Arms of one seed start from equal weights and see equal batches, which is checked
    from what was run: the loss of step 0 without any edit, to the bit, and the hash of every batch.

    The table has rows of these kinds:

    | kind | what | columns that count |
    | --- | --- | --- |
    | `evaluation` | one evaluation of one run | arm, seed, step, tokens, seconds, held_out_loss |
    | `first` | the same weights before the first step, with the arm's edit and without | held_out_loss, bare_loss |
    | `difference` | arm minus baseline at equal tokens | arm, step, tokens, held_out_loss, change and its interval |
    | `final` | the same at the end, `at` equal tokens and at equal time | and seconds, n_seeds, n_diverged |

    Intervals are 95 %, over seeds (where there are several) and held-out sequences, both drawn anew. At equal time,
    both curves are read where the faster one ended; the slower one's learning rate had not yet come down there. A seed
    whose arm or baseline diverged is left out of the pair and counted in n_diverged.

    Args:
        config: of every run, without a suppression; its seeds are replaced, `out` is where the runs are.
        arms: names that `arm` knows, such as "value" or "value:0.5". The baseline is always run.
        seeds: how many; each is the seed of the weights and of the batches.
        first_seed: the first of them.
        clock: what counts as time: "seconds" on the clock, or "cpu_seconds" where other work slows it.

    Raises:
        TrainingError: no seed, a suppression beside the arms, or runs that do not start from equal weights. A run
            whose loss is not finite does not stop the others: it is counted.
    """
    if seeds < 1:
        raise TrainingError(f"seeds is {seeds}", cure="1 or more")
    if config.suppression != Suppression():
        raise TrainingError(
            "arms have their own settings, and a suppression is given beside them",
            cure="leave it out, or train it as one run, without arms",
        )
    names = list(dict.fromkeys([BASELINE, *arms]))
    chosen = {name: arm(name) for name in names}
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    rows: list[dict[str, Any]] = []
    for seed in range(first_seed, first_seed + seeds):
        for name in names:
            out = Path(config.out) / f"{name.replace(':', '-')}-seed{seed}"
            own = replace(config, out=str(out), suppression=chosen[name], seed_weights=seed, seed_batches=seed)
            try:
                train(own)
                status = "done"
                runs[name, seed] = read_curve(out)
            except DivergedError as error:
                status = f"diverged at step {error.step}"
            curve = read_curve(out)
            rows += _evaluations(name, seed, curve, clock, status)
        _check_equal(names, seed, runs)
    rows += _differences(names, range(first_seed, first_seed + seeds), runs, clock, config)
    tokens = open_tokens(config.tokens)
    meta = {
        "config": config.as_dict(),
        "model": {"name": config.shape.words()},
        "data": about_tokens(tokens),
        "arms": {name: chosen[name].as_dict() for name in names},
        "seeds": list(range(first_seed, first_seed + seeds)),
        "clock": clock,
        "versions": versions(),
    }
    return Result("compare_arms", pd.DataFrame(rows), jsonable(meta))


def _evaluations(name: str, seed: int, curve: list[dict[str, Any]], clock: Clock, status: str) -> list[dict[str, Any]]:
    """Rows of one run as it was: before the first step with and without the edit, and every evaluation."""
    bare = next((line["bare_held_out_loss"] for line in curve if "bare_held_out_loss" in line), np.nan)
    rows: list[dict[str, Any]] = []
    for line in evaluations(curve):
        row = {"arm": name, "seed": seed, "step": line["step"], "tokens": line["tokens"], "seconds": line[clock]}
        row |= {"held_out_loss": line["held_out_loss"], "status": status}
        if line["step"] == 0:
            rows.append({"kind": "first", **row, "bare_loss": bare})
        rows.append({"kind": "evaluation", **row})
    return rows


def evaluations(curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a curve that are evaluations of the model as it is trained."""
    return [line for line in curve if "held_out_loss" in line]


def _check_equal(names: list[str], seed: int, runs: dict[tuple[str, int], list[dict[str, Any]]]) -> None:
    """Raise TrainingError unless the arms of one seed began with equal weights and saw equal batches."""
    found = {name: runs[name, seed] for name in names if (name, seed) in runs}
    for what in ("bare_held_out_loss", "batch"):
        seen = {name: [line[what] for line in curve if what in line] for name, curve in found.items()}
        if len({tuple(values) for values in seen.values()}) > 1:
            raise TrainingError(
                f"the arms of seed {seed} differ in {what}, so they cannot be compared",
                where=", ".join(seen),
                cure="run them all anew on one machine with one version, in another --out",
            )


def _differences(
    names: list[str],
    seeds: Sequence[int],
    runs: dict[tuple[str, int], list[dict[str, Any]]],
    clock: Clock,
    config: TrainingConfig,
) -> list[dict[str, Any]]:
    """Arm minus baseline at every evaluation and at the end, over the seeds that both finished."""
    rows: list[dict[str, Any]] = []
    for name in names:
        both = [seed for seed in seeds if (name, seed) in runs and (BASELINE, seed) in runs]
        counts = {"n_seeds": len(both), "n_diverged": len(seeds) - len(both)}
        if not both:
            status = "no baseline" if any((name, seed) in runs for seed in seeds) else "diverged"
            missing = dict.fromkeys(("change", "change_low", "change_high"), np.nan)
            rows.append({"kind": "final", "arm": name, "at": "equal tokens", **missing, **counts, "status": status})
            continue
        own, base = ([sequence_losses(runs[arm_name, seed]) for seed in both] for arm_name in (name, BASELINE))
        clocks = [
            [np.array([line[clock] for line in evaluations(runs[arm_name, seed])]) for seed in both]
            for arm_name in (name, BASELINE)
        ]
        lines = evaluations(runs[name, both[0]])
        for index, line in enumerate(lines):
            row = {"kind": "difference", "arm": name, "step": line["step"], "tokens": line["tokens"], **counts}
            row |= _compared([x[index] for x in own], [x[index] for x in base], config.seed_batches)
            rows.append(row)
            if index == len(lines) - 1:
                times = float(np.mean([x[-1] for x in clocks[0]]))
                rows.append({**row, "kind": "final", "at": "equal tokens", "seconds": times, "status": "done"})
        ends = [min(mine[-1], other[-1]) for mine, other in zip(*clocks, strict=True)]
        at_end = [
            [_read_at(losses, times, end) for losses, times, end in zip(part, when, ends, strict=True)]
            for part, when in zip((own, base), clocks, strict=True)
        ]
        final = {"kind": "final", "arm": name, "at": "equal time", "seconds": float(np.mean(ends)), **counts}
        rows.append({**final, **_compared(at_end[0], at_end[1], config.seed_batches), "status": "done"})
    return rows


def sequence_losses(curve: list[dict[str, Any]]) -> NDArray[np.float64]:
    """[evaluation, sequence]: summed losses over the mean number of scored tokens, whose mean is the loss per token."""
    pairs = np.array([line["per_sequence"] for line in evaluations(curve)])
    return np.asarray(pairs[..., 0] / pairs[..., 1].mean(axis=1, keepdims=True))


def _read_at(losses: NDArray[np.float64], times: NDArray[np.float64], when: float) -> NDArray[np.float64]:
    """[sequence] losses at a time between two evaluations, on the straight line between them."""
    return np.array([np.interp(when, times, column) for column in losses.T])


def _compared(own: list[NDArray[np.float64]], base: list[NDArray[np.float64]], seed: int) -> dict[str, float]:
    """Mean loss of an arm, its difference from the baseline, and the interval of that."""
    mine, other = np.stack(own), np.stack(base)
    low, high = two_way_interval([mine, other], lambda one, two: one - two, seed=seed)
    change = float(mine.mean() - other.mean())
    return {"held_out_loss": float(mine.mean()), "change": change, "change_low": float(low), "change_high": float(high)}
