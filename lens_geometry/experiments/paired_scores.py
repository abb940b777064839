"""Scores of one task under an edit beside the unedited model's, paired by document."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lens_geometry import evals
from lens_geometry.stats import bootstrap_interval, paired_interval

Documents = dict[int, Any]


class Run:
    """One model's results: what it said to each document, and the documents' own metrics."""

    def __init__(self, name: str, lm: Any, results: Any) -> None:
        self.name, self.lm, self.results = name, lm, results
        self.said: dict[str, dict[int, list[tuple[Any, float]]]] = {}
        self.truncated: dict[str, int] = {}
        for answer in lm.answers:
            document = self.said.setdefault(answer.task, {}).setdefault(answer.document, [])
            document.append((answer.said, answer.log_likelihood))
            self.truncated[answer.task] = self.truncated.get(answer.task, 0) + answer.truncated

    def nonfinite(self, task: str) -> set[int]:
        said = self.said[task].items()
        return {document for document, answers in said if not all(math.isfinite(value) for _, value in answers)}

    def metrics(self, task: str) -> dict[tuple[str, str], Documents]:
        """(metric, filter) -> document -> its own value, in the documents' order."""
        found: dict[tuple[str, str], Documents] = {}
        for sample in self.results["samples"][task]:
            for metric in sample["metrics"]:
                found.setdefault((metric, sample["filter"]), {})[sample["doc_id"]] = sample[metric]
        return found

    def identity(self, task: str) -> list[str]:
        """Hashes of what was asked: documents, prompts and targets."""
        names = ("doc_hash", "prompt_hash", "target_hash")
        return ["/".join(str(sample[name]) for name in names) for sample in self.results["samples"][task]]


def paired_rows(task_name: str, task: Any, run: Run, base: Run, seed: int) -> list[dict[str, Any]]:
    """One row per metric and filter of a task; documents without a finite answer are left out on both sides."""
    asked = {instance.task_name for instance in task.instances}.pop()  # what the task calls itself
    lost = run.nonfinite(asked)
    acted = run is base or any(run.said[asked][document] != said for document, said in base.said[asked].items())
    rows = []
    for (metric, kind), values in run.metrics(task_name).items():
        before = base.metrics(task_name).get((metric, kind), {})
        kept = [document for document in values if document in before and document not in lost]
        combine = task.aggregation().get(metric) or evals.mean()
        whole = _number(combine, list(before.values()))
        now, then = ([documents[document] for document in kept] for documents in (values, before))
        value, paired = _number(combine, now), _number(combine, then)
        low, high = (math.nan, math.nan) if lost else _interval(now, then, combine, seed)
        finite = math.isfinite(value) and not lost
        rows.append(
            {
                "task": task_name,
                "metric": metric,
                "filter": kind,
                "edit": run.name,
                "value": value,
                "base_value": whole,
                "change": value - paired,
                "change_low": low,
                "change_high": high,
                "higher_is_better": _flag(task.higher_is_better().get(metric)),
                "n_documents": len(kept),
                "n_changed": sum(repr(values[document]) != repr(before[document]) for document in kept),
                "n_truncated": run.truncated[asked],
                "n_nonfinite": len(lost),
                "status": "nonfinite" if not finite else "ok" if acted else "no_effect",
            }
        )
    return rows


def _interval(now: list[Any], then: list[Any], combine: Callable[..., Any], seed: int) -> tuple[float, float]:
    if combine is not evals.mean():
        return paired_interval(now, then, combine, seed=seed)
    samples = [np.array(now, np.float64), np.array(then, np.float64)]
    return bootstrap_interval(samples, lambda a, b, axis: a.mean(axis) - b.mean(axis), seed=seed)


def _number(combine: Callable[..., Any], values: Sequence[Any]) -> float:
    """The harness's score of some documents; NaN for none, and where it is no number."""
    found = combine(values) if values else math.nan
    return float(found) if isinstance(found, numbers.Real) else math.nan


def _flag(higher_is_better: Any) -> bool | None:
    return None if higher_is_better is None else bool(higher_is_better)


def remarks(table: pd.DataFrame) -> list[str]:
    """What a reader must know, for the result's warnings."""
    notes = []
    cut = table[table["n_truncated"] > 0].groupby("task", sort=False)["n_truncated"].max()
    notes += [
        f"{task}: {count} requests were longer than the context and were cut on the left" for task, count in cut.items()
    ]
    for status, words in (
        ("no_effect", "changed no answer by a bit"),
        ("nonfinite", "has answers that are not finite; their documents are left out"),
    ):
        for (task, edit), _ in table[table["status"] == status].groupby(["task", "edit"], sort=False):
            notes.append(f"{task}: the edit {edit!r} {words}")
    return notes
