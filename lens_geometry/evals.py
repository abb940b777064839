"""Downstream tasks: lm-evaluation-harness on any of our models, under a list of edits.

    lm = lg.edited_lm(model, lg.scale(model, "mlp", parallel=0.5), batch_size=8)
    lm_eval.simple_evaluate(model=lm, tasks=["arc_easy"], limit=100)

lm_eval is imported only when something here is called: the package works without the extra `[evals]`.
`experiments/evaluate.py` compares many edits with the unedited model.
"""

from __future__ import annotations

import difflib
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lens_geometry import models
from lens_geometry.edits import Batch, Hooks
from lens_geometry.errors import DataError, LensGeometryError, ModelError

INSTALL = 'pip install "lens-geometry[evals]"'


def edited_lm(
    model: Any,
    hooks: Hooks | Callable[[Batch], Hooks] = (),  # type: ignore[assignment]
    *,
    batch_size: int = 1,
    max_length: int | None = None,
    prepend_bos: bool = False,
    progress: bool = False,
) -> Any:
    """A model under edits, as an lm_eval model: `lm_eval.simple_evaluate(model=edited_lm(model, hooks), ...)`.

    Args:
        model: any TransformerLens model with a tokenizer.
        hooks: what every forward pass is run under; none for the unedited model. A callable is given the `Batch`
            whose ids are the documents' numbers, so that all choices of a document meet the same noise.
        batch_size: sequences per forward pass. Only sequences of one length share a pass and nothing is padded,
            so it changes speed and not results.
        max_length: tokens of context, by default the model's. What is longer is cut on its left.
        prepend_bos: put the tokenizer's BOS before each context. lm_eval's own class asks the tokenizer instead,
            which for Llama and Gemma means True. A text without any context follows BOS (or EOS) in any case.
        progress: show progress bars.

    Each kind of request is answered inside one `applied(model, hooks)`: HookError when a hook never fires or the edit
    changes no activation. Generation is greedy, without a KV cache (a pass over the whole sequence for each
    token); DataError for a task that samples. Log-likelihoods are in float32 at least.
    Raises ModelError without lm_eval or a tokenizer, DataError for a setting out of range, HookError for a hook that
    the model does not have.
    """
    require_lm_eval()
    models.require_model(model)
    if getattr(model, "tokenizer", None) is None:
        raise ModelError("the model has no tokenizer, and tasks are text", cure="load the model with its tokenizer")
    if prepend_bos and model.tokenizer.bos_token_id is None:
        raise DataError("the tokenizer has no BOS token", cure="pass prepend_bos=False")
    context = int(model.cfg.n_ctx)
    for name, value, most in (("batch_size", batch_size, None), ("max_length", max_length, context)):
        if value is not None and (not isinstance(value, int) or value < 1 or (most is not None and value > most)):
            cure = f"give a whole number from 1 to {most}" if most else "give a whole number of 1 or more"
            raise DataError(f"{name} is {value!r}", cure=cure)
    harness = importlib.import_module("lens_geometry.harness")
    return harness.EditedLM(
        model, hooks, batch_size=batch_size, max_length=max_length, prepend_bos=prepend_bos, progress=progress
    )


def require_lm_eval() -> Any:
    """The lm_eval package. Raises ModelError when the extra is not installed."""
    try:
        return importlib.import_module("lm_eval")
    except ImportError as error:
        raise ModelError(f"lm-evaluation-harness is not installed ({error})", cure=INSTALL) from error


def load_tasks(tasks: Sequence[Any], *, include_path: Path | str | None = None, task_manager: Any = None) -> Any:
    """lm_eval's `{"tasks": ..., "groups": ..., "group_map": ...}` for names, files, configs or task objects.

    Names are looked for in `include_path` first: the 14,000 configs that come with lm_eval take many seconds to list.
    Raises DataError for a name that is not there, and for a task whose data cannot be loaded.
    """
    require_lm_eval()
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    if not names:
        raise DataError("no task is named", cure='give names of lm_eval tasks, such as "arc_easy"')
    if include_path is not None and not Path(include_path).is_dir():
        raise DataError("there is no such directory of tasks", where=str(include_path), cure="check include_path")
    manager = task_manager or _manager(names, include_path)
    for name in names:
        if isinstance(name, str) and name not in manager.all_tasks and not Path(name).is_file():
            near = difflib.get_close_matches(name, manager.all_tasks, n=1)
            did_you_mean = f"did you mean {near[0]}? " if near else ""
            cure = f"{did_you_mean}`lm-eval ls tasks` lists what there is; your own are found with include_path"
            raise DataError("lm_eval has no such task", where=name, cure=cure)
    try:
        return manager.load(names)
    except LensGeometryError:
        raise
    except Exception as error:
        raise DataError(
            f"the task could not be loaded ({type(error).__name__}: {_one_line(error)})",
            where=", ".join(map(str, names)),
            cure="check its YAML and its data set; without a network the data set must be local or in the cache",
        ) from error


def _manager(names: Sequence[Any], include_path: Path | str | None) -> Any:
    """A TaskManager that knows all names, with lm_eval's own tasks only where one of them is needed."""
    manager = importlib.import_module("lm_eval.tasks").TaskManager
    if include_path is not None:
        own = manager(include_path=str(include_path), include_defaults=False)
        if all(not isinstance(name, str) or name in own.all_tasks for name in names):
            return own
    elif all(not isinstance(name, str) or Path(name).is_file() for name in names):
        return manager(include_defaults=False)
    return manager(include_path=None if include_path is None else str(include_path))


def run_tasks(lm: Any, loaded: Any, *, limit: int | None, fewshot_seed: int) -> Any:
    """lm_eval's results of one model on tasks of `load_tasks`, with every document's own metrics.

    The same requests come out of each call: few-shot examples and whatever a task draws are seeded anew.
    Raises DataError for tasks that run generated code or need images, HookError for an edit that did nothing.
    """
    lm_eval = require_lm_eval()
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise DataError(
                "this task runs code that the model writes, or needs more than text",
                where=f"task {name}",
                cure="choose another task, or call lm_eval.simple_evaluate with edited_lm yourself",
            )
        task.set_fewshot_seed(seed=fewshot_seed)
    with own_random_state(fewshot_seed):
        return lm_eval.evaluate(lm, loaded, limit=limit, bootstrap_iters=0, log_samples=True)


def mean() -> Callable[..., Any]:
    """The harness's own mean, with which it combines most metrics, and those that do not say how."""
    return importlib.import_module("lm_eval.api.metrics").mean  # type: ignore[no-any-return]


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Seeds Python's, numpy's and torch's generators, which tasks draw from, and puts them back afterwards."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one is what tasks use
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
