"""What does an edit do to downstream tasks? lm-evaluation-harness' scores, edited and unedited, paired by document."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

from lens_geometry import evals, models
from lens_geometry.anatomy import inspect
from lens_geometry.edits import Batch, Hooks, scale
from lens_geometry.errors import DataError, HookError, ModelError
from lens_geometry.experiments.paired_scores import Run, paired_rows, remarks
from lens_geometry.experiments.profile import available_sites
from lens_geometry.results import Result, jsonable, versions
from lens_geometry.runner import at_least, model_warnings
from lens_geometry.sites import choose_layers
from lens_geometry.text_requests import LENGTHS

Edit = Hooks | Callable[[Batch], Hooks]
UNEDITED = "none"


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of `evaluate`.

    Attributes:
        include_path: a directory of your own task YAMLs, looked through first.
        limit: at most so many documents of each task; None takes all.
        num_fewshot: examples before each question, in tasks that do not fix it at 0; None leaves it to the task.
        batch_size: sequences per forward pass; changes speed and memory, not results.
        max_length: tokens of context, by default the model's; what is longer is cut on its left and counted.
        prepend_bos: put the tokenizer's BOS before each context.
        max_new_tokens: at most so many tokens per generated text; None leaves it to the task.
        force_greedy: decode greedily also where a task asks for sampling, beams or penalties.
        seed: of the bootstrap.
        fewshot_seed: of the few-shot examples and of whatever else a task draws; lm_eval's own default.
        progress: show progress bars.
    """

    include_path: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 8
    max_length: int | None = None
    prepend_bos: bool = False
    max_new_tokens: int | None = None
    force_greedy: bool = False
    seed: int = 0
    fewshot_seed: int = 1234
    progress: bool = True

    def __post_init__(self) -> None:
        at_least(self, batch_size=1, seed=0, fewshot_seed=0)
        optional = {"limit": 1, "num_fewshot": 0, "max_length": 1, "max_new_tokens": 1}
        at_least(self, **{name: low for name, low in optional.items() if getattr(self, name) is not None})


def evaluate(
    model: Any,
    tasks: Sequence[Any],
    edits: Mapping[str, Edit],
    settings: EvaluationSettings | None = None,
    *,
    task_manager: Any = None,
    **changes: Any,
) -> Result:
    """Score a model on lm_eval tasks, unedited and under each edit.

    Args:
        model: any TransformerLens model with a tokenizer.
        tasks: lm_eval's names of tasks, groups or tags, paths of YAMLs, configs or task objects.
        edits: a name and its hooks; or a callable that gets the `Batch` and returns them, for edits that draw noise.
        settings: see `EvaluationSettings`; `changes` override single fields.
        task_manager: an lm_eval TaskManager of your own.

    Returns:
        A Result with one row per task, metric and edit (and the unedited model, "none"): the harness's value and its
        change against the unedited model on the same documents, with a 95 % interval by paired bootstrap over
        documents. Where answers under an edit are not finite the status is "nonfinite", and those documents are
        counted and left out of value and change; where no answer of a task, nor its likelihood, changed by a bit, it
        is "no_effect". `n_changed` documents have another score of their own. Groups are in `meta`, as the harness
        averages them.

    Raises:
        ModelError without lm_eval or a tokenizer, and when the unedited model's answers are not finite; DataError for
        tasks and settings that cannot be used; HookError when an edit never fires, or changes no activation, or no
        answer of any task.
    """
    settings, started = replace(settings or EvaluationSettings(), **changes), time.monotonic()
    if UNEDITED in edits:
        raise DataError(f'an edit is called "{UNEDITED}"', cure="that is the unedited model's name; choose another")
    make = partial(
        evals.edited_lm,
        model,
        batch_size=settings.batch_size,
        max_length=settings.max_length,
        prepend_bos=settings.prepend_bos,
        progress=settings.progress,
    )
    lms = {UNEDITED: make(), **{name: make(hooks) for name, hooks in edits.items()}}
    found_warnings = model_warnings(model)
    with evals.own_random_state(settings.fewshot_seed):
        loaded = evals.load_tasks(tasks, include_path=settings.include_path, task_manager=task_manager)
    found_warnings += _configure(loaded["tasks"], settings)
    runs: dict[str, Run] = {}
    for name, lm in lms.items():
        results = evals.run_tasks(lm, loaded, limit=settings.limit, fewshot_seed=settings.fewshot_seed)
        runs[name] = Run(name, lm, results)
        _check_answers(runs[name], runs[UNEDITED])
    rows = [
        row
        for task_name, task in loaded["tasks"].items()
        for run in runs.values()
        for row in paired_rows(task_name, task, run, runs[UNEDITED], settings.seed)
    ]
    table = pd.DataFrame(rows)
    found_warnings += remarks(table)
    for warning in found_warnings:
        warnings.warn(warning, stacklevel=2)
    return Result("evaluate", table, _meta(model, loaded, runs, table, settings, started, found_warnings))


def scaling_edits(
    model: Any,
    sites: Sequence[str],
    *,
    layers: str = "all",
    parallel: Sequence[float] = (0.0,),
    perpendicular: Sequence[float] = (),
    controls: Sequence[str] = (),
    seed: int = 0,
) -> dict[str, Callable[[Batch], Hooks]]:
    """Component scaling as edits for `evaluate`: every site with every scale, and beside each its controls.

    `layers` as in `scaling_sweep`, such as "all" or "4-11". Sites that the model does not have are left out, with a
    warning. Raises SiteError when none is left, or for a layer or control that does not exist.
    """
    found, left_out = available_sites(model, tuple(sites), editing=True)
    for warning in left_out:
        warnings.warn(warning, stacklevel=2)
    chosen = choose_layers(layers, inspect(model).n_layers)
    edits: dict[str, Callable[[Batch], Hooks]] = {}
    for site in found:
        for component, scales in (("parallel", parallel), ("perpendicular", perpendicular)):
            for number in scales:
                for control in ("none", *controls):
                    make = partial(scale, model, site, layers=chosen, control=control, seed=seed)  # type: ignore[arg-type]
                    name = f"{site} {component} {number:g}" + ("" if control == "none" else f" {control}")
                    name += "" if layers == "all" else f" layers {layers}"
                    edits[name] = partial(_with_scale, make, component, number)
    if not edits:
        raise DataError("no edit is asked for", cure="give scales for parallel or perpendicular")
    return edits


def _with_scale(make: Callable[..., Hooks], component: str, number: float, batch: Batch) -> Hooks:
    return make(batch=batch, **{component: number})


def _configure(tasks: Mapping[str, Any], settings: EvaluationSettings) -> list[str]:
    """Few-shot examples and generation as the settings want them; returns what could not be followed."""
    notes = []
    for name, task in tasks.items():
        fixed = task.get_config("num_fewshot")
        if fixed == 0 and settings.num_fewshot:
            notes.append(f"the task {name} fixes its number of few-shot examples at 0")
        elif settings.num_fewshot is not None or fixed is None:
            task.set_config(key="num_fewshot", value=settings.num_fewshot or 0)
        if task.get_config("output_type") != "generate_until":
            continue
        options = dict(task.get_config("generation_kwargs") or {})
        if settings.force_greedy:
            options = {key: options[key] for key in ("until", *LENGTHS) if key in options} | {"do_sample": False}
        if settings.max_new_tokens is not None:
            options = {key: value for key, value in options.items() if key not in LENGTHS}
            options["max_gen_toks"] = settings.max_new_tokens
        task.set_config(key="generation_kwargs", value=options)
    return notes


def _check_answers(run: Run, base: Run) -> None:
    """Raise when the unedited model fails, when an edit changed nothing, or was asked something else."""
    if run is base:
        bad = {task: len(run.nonfinite(task)) for task in run.said}
        if any(bad.values()):
            raise ModelError(
                f"the unedited model's answers to {sum(bad.values())} documents are not finite",
                where=", ".join(task for task, count in bad.items() if count),
                cure="check the weights and the dtype (float16 overflows where bfloat16 and float32 do not)",
            )
        return
    if any(run.identity(task) != base.identity(task) for task in base.results["samples"]):
        raise DataError(
            f"the tasks asked other questions under the edit {run.name!r} than of the unedited model",
            cure="use tasks whose documents and prompts are the same each time",
        )
    due = [name for name, fn in run.lm.hooks if getattr(fn, "must_change", True)]
    if due and run.lm.answers == base.lm.answers:
        raise HookError(
            f"the edit {run.name!r} changed no answer by a bit",
            where=", ".join(map(str, due[:3])) + (" ..." if len(due) > 3 else ""),
            cure="edit a hook that reaches the output (`lens-geometry validate` tells which do on this model)",
        )


def _meta(
    model: Any,
    loaded: Any,
    runs: Mapping[str, Run],
    table: pd.DataFrame,
    settings: EvaluationSettings,
    started: float,
    found_warnings: list[str],
) -> dict[str, Any]:
    base = runs[UNEDITED]
    tasks = {}
    for name, task in loaded["tasks"].items():
        config = json.dumps(jsonable(task.dump_config()), sort_keys=True)
        tasks[name] = {
            "version": str(task.VERSION),
            "output_type": task.OUTPUT_TYPE,
            "num_fewshot": task.get_config("num_fewshot"),
            "generation_kwargs": jsonable(task.get_config("generation_kwargs")),
            "documents": base.results["n-samples"][name]["effective"],
            "documents_available": base.results["n-samples"][name]["original"],
            "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
            "questions_sha256": hashlib.sha256("\n".join(base.identity(name)).encode()).hexdigest(),
        }
    return {
        "model": models.describe(model),
        "data": {"text": ", ".join(tasks), "n_documents": sum(about["documents"] for about in tasks.values())},
        "tasks": tasks,
        "groups": {name: jsonable(run.results.get("groups", {})) for name, run in runs.items()},
        "edits": {name: sorted({str(hook) for hook, _ in run.lm.hooks}) for name, run in runs.items()},
        "context": {"max_length": base.lm.max_length, "prepend_bos": settings.prepend_bos, "padding": "none"},
        "settings": {key: jsonable(value) for key, value in asdict(settings).items() if key != "progress"},
        "seed": settings.seed,
        "versions": {**versions(), "lm-eval": metadata.version("lm_eval")},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started, 2),
        "counts": {
            "rows": len(table),
            "nonfinite_rows": int((table["status"] == "nonfinite").sum()),
            "no_effect_rows": int((table["status"] == "no_effect").sum()),
            "truncated_requests": sum(base.truncated.values()),
        },
        "warnings": found_warnings,
    }
