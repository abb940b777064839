"""Through which pathway does a perturbation do its damage? The loss that comes back when one of them is repaired.

The perturbed model is run with one pathway's intermediate product replaced by the clean run's, on the same noise and
signs. Two of its conditions are checks: repairing everything must give the clean losses, repairing nothing the
perturbed ones.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lens_geometry.anatomy import carried_hooks
from lens_geometry.edits import Batch, Displacements, Hooks, Kind, repair
from lens_geometry.errors import HookError, ModelError
from lens_geometry.experiments.clean_batches import CleanBatches
from lens_geometry.experiments.pathway_plan import EVERYTHING, NOTHING, PathwaySettings, Plan, planned
from lens_geometry.experiments.recovery import Repaired, recovery_row
from lens_geometry.experiments.variants import variant_hooks
from lens_geometry.metrics import SequenceLosses
from lens_geometry.results import Result
from lens_geometry.runner import Condition, identity_of_run, prepare, provenance, run_conditions

NOISE_WORDS = (
    "each seed draws noise and signs from (seed, layer, sequence): they are the same in the perturbed and in every "
    "repaired run. What a layer's noise is applied to is the stream as it is there, so where several layers are "
    "perturbed a repair between them changes the stream that the later ones turn or rescale"
)

IN_KEYS = ("kinds", "displacements", "seeds", "seed", "pathways", "single_heads", "head_layers")  # of the journal


def pathway_repair(
    model: Any,
    data: Any,
    settings: PathwaySettings | None = None,
    *,
    out: Path | str | None = None,
    **changes: Any,
) -> Result:
    """How much of the damage of angular and of magnitude perturbations comes back, pathway by pathway.

    Args:
        model: any TransformerLens model without hooks of its own.
        data: a Text, a string, a list of strings, or token ids [sequence, pos].
        settings: see `PathwaySettings`; `changes` override single fields.
        out: a directory for the journal: each finished condition is written there, and the same call started
            again goes on where it was.

    Returns:
        A Result with a row per kind, displacement, seed and pathway, and one over all seeds (no `seed`), single heads
        over all seeds only. Losses are nats per token; `damage` and `recovery` have 95 % intervals over sequences
        (over all seeds: over seeds too). A joint repair's row also has the sum of its parts' recoveries and its gap
        from it. For `status` see `experiments.recovery.recovery_row`.

    Raises:
        ModelError, DataError, SiteError for what cannot be used, such as a repair before anything is perturbed;
        HookError when repairing everything does not give the clean losses or repairing nothing the perturbed ones;
        ResultError when the journal is of something else.
    """
    settings, started = replace(settings or PathwaySettings(), **changes), time.monotonic()
    own = carried_hooks(model, permanent=False)
    if own:
        raise ModelError(
            f"the model carries hooks of its own: {', '.join(own[:3])}",
            cure="take them off with model.reset_hooks(): a clean run has none",
        )
    tokens = prepare(model, data, settings)
    plan = planned(model, settings)
    clean = CleanBatches(model, plan.needed(model))
    conditions = [
        condition
        for kind in settings.kinds
        for displacement in settings.displacements
        for seed in settings.seed_numbers
        for condition in _conditions(model, settings, plan, clean, kind, displacement, seed)
    ]
    journal = None if out is None else Path(out) / "journal.jsonl"
    resumed = journal is not None and journal.exists()
    about = identity_of_run(model, tokens, settings, free=IN_KEYS)
    about |= {"settings.batch_size": settings.batch_size}  # bits depend on it
    measured: dict[str, dict[str, Any]] = {}
    losses = run_conditions(model, tokens, conditions, settings, journal=journal, about=about, measured=measured)
    notes = [*plan.notes, *_checked(model, losses, measured, settings, plan, exact=not resumed)]
    table = pd.DataFrame(list(_rows(losses, measured, settings, plan)))
    table["seed"], table["layer"], table["head"] = (table[name].astype("Int64") for name in ("seed", "layer", "head"))
    weak = table[(table["status"] == "no_damage") & table["seed"].isna() & table["head"].isna()]
    for kind, displacement in dict.fromkeys(zip(weak["kind"], weak["displacement"], strict=True)):
        notes.append(
            f"the damage of {kind} {displacement:g} cannot be told from 0, so nothing is divided by it: use more "
            "sequences, more seeds (fewer than 5 widen intervals much) or a larger displacement"
        )
    idle = table[table["status"] == "no_effect"]
    if len(idle):
        notes.append(f"{len(idle)} repairs changed no loss by a bit: {', '.join(dict.fromkeys(idle['pathway']))}")
    for note in notes:
        warnings.warn(note, stacklevel=2)
    meta = provenance(
        model,
        tokens,
        settings,
        started=started,
        token_mask="next-token losses of real tokens; position 0 is perturbed by with_position_0 and paper alone",
        counts={"rows": len(table), **{str(k): int(v) for k, v in table["status"].value_counts().items()}},
        perturbed_layers=list(plan.layers),
        repaired_layers=list(plan.repaired),
        everything=list(plan.everything),
        noise=NOISE_WORDS,
    )
    meta["warnings"] += notes
    return Result("pathway_repair", table, meta)


def _conditions(
    model: Any, settings: PathwaySettings, plan: Plan, clean: CleanBatches, kind: Kind, displacement: float, seed: int
) -> Iterable[Condition]:
    """The perturbation alone, and with each repair."""

    def perturbed(batch: Batch, record: Displacements | None = None) -> Hooks:
        hooks = variant_hooks(
            model, settings.variant, kind, displacement, layers=plan.layers, unit=settings.unit, seed=seed,
            record=record,
        )  # fmt: skip
        return hooks(batch)

    def repaired(
        name: str, pathway: str | Sequence[str] = (), layers: Any = plan.repaired, heads: Any = None
    ) -> Condition:
        def hooks(batch: Batch) -> Hooks:
            repairs = repair(model, pathway, clean, layers=layers, heads=heads) if pathway else []
            return perturbed(batch) + repairs

        return Condition(plan.key(kind, displacement, seed, name), hooks, plan.layers[0], before=clean.take)

    seen = Displacements()
    yield Condition(
        plan.key(kind, displacement, seed, "perturbed"),
        lambda batch: perturbed(batch, seen),
        plan.layers[0],
        seen.summary,
    )
    yield repaired(NOTHING)
    for joint in plan.pathways:
        yield repaired(joint, joint.split("+"))
    if plan.everything:
        yield repaired(EVERYTHING, plan.everything)
    for layer, head in plan.heads:
        yield repaired(f"head {layer}.{head}", "head_output", layer, [head])


def _checked(
    model: Any,
    losses: dict[str, SequenceLosses],
    measured: dict[str, dict[str, Any]],
    settings: PathwaySettings,
    plan: Plan,
    *,
    exact: bool,
) -> list[str]:
    """Raise HookError unless repairing everything gives the clean losses and repairing nothing the perturbed ones.

    To the last bit on a CPU; nearly so on other devices, and where an earlier run's numbers were gone on with, of which
    a note is given.
    """
    exact = exact and next(model.parameters()).device.type == "cpu"
    notes = []
    for kind in settings.kinds:
        for displacement in settings.displacements:
            for seed in settings.seed_numbers:
                keys = {name: plan.key(kind, displacement, seed, name) for name in ("perturbed", NOTHING, EVERYTHING)}
                pairs = [(NOTHING, losses[keys["perturbed"]], "perturbed")]
                pairs += [(EVERYTHING, losses["base"], "clean")] if plan.everything else []
                for name, expected, words in pairs:
                    found = losses[keys[name]]
                    if "impossible" in measured.get(keys[name], {}) or all(map(np.array_equal, found, expected)):
                        continue
                    gap = float(np.abs(found.sums - expected.sums).max())
                    message = f"repairing {name} does not give the {words} losses (off by {gap:.2g} nats in a sequence)"
                    if exact or not np.allclose(found.sums, expected.sums, rtol=1e-4):
                        raise HookError(
                            message,
                            where=f"{kind}, displacement {displacement:g}, seed {seed}",
                            cure="report this: no number of this table can be trusted",
                        )
                    notes.append(f"{message}: this machine does not repeat a forward pass to the last bit")
    return list(dict.fromkeys(notes))


def _rows(
    losses: dict[str, SequenceLosses], measured: dict[str, dict[str, Any]], settings: PathwaySettings, plan: Plan
) -> Iterable[dict[str, Any]]:
    """Rows over all seeds, then for each seed; single heads over all seeds."""
    heads = {f"head {layer}.{head}": (layer, head) for layer, head in plan.heads}
    for kind in settings.kinds:
        for displacement in settings.displacements:

            def runs(name: str, kind: str = kind, displacement: float = displacement) -> list[SequenceLosses]:
                return [losses[plan.key(kind, displacement, seed, name)] for seed in settings.seed_numbers]

            seen = [measured.get(plan.key(kind, displacement, seed, "perturbed"), {}) for seed in settings.seed_numbers]
            found = Repaired(
                losses["base"],
                runs("perturbed"),
                {name: runs(name) for name in (*plan.names, *heads)},
                impossible=["impossible" in one for one in seen],
            )
            for place in (None, *range(settings.seeds)):
                chosen = found if place is None else found.seed(place)
                moved = _moved(seen if place is None else seen[place : place + 1])
                for name in (*plan.names, *(heads if place is None else ())):
                    parts = name.split("+")
                    row = recovery_row(chosen, name, parts if len(parts) > 1 else (), seed=settings.seed)
                    if name == NOTHING and row["status"] == "no_effect":
                        row["status"] = "ok"  # as it should be
                    layer, head = heads.get(name, (None, None))
                    yield {
                        "kind": kind,
                        "displacement": displacement,
                        "unit": settings.unit,
                        "variant": settings.variant,
                        "perturbed_layers": _span(plan.layers),
                        "repaired_layers": _span(plan.repaired if layer is None else (layer,)),
                        "seed": None if place is None else settings.seed + place,
                        "pathway": name if layer is None else "head_output",
                        "layer": layer,
                        "head": head,
                        **row,
                        **moved,
                    }


def _moved(seen: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the perturbation really did, over seeds."""
    real = [one for one in seen if "impossible" not in one]
    return {
        "displacement_mean": float(np.mean([one["displacement_mean"] for one in real])) if real else np.nan,
        "displacement_max_error": max((one["displacement_max_error"] for one in real), default=np.nan),
        "n_clipped": sum(one["n_clipped"] for one in real),
        "n_flipped": sum(one["n_flipped"] for one in real),
    }


def _span(layers: Sequence[int]) -> str:
    """Layers as text: "8-15" where they follow each other, else "8,10"."""
    whole = list(layers) == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]}-{layers[-1]}" if whole and len(layers) > 1 else ",".join(map(str, layers))
