"""Small lm_eval tasks made from local files, for tests: no network and no data set but these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

CHOICES = [" yes", " no indeed", " perhaps"]


def documents(count: int = 9) -> list[dict[str, Any]]:
    """Questions of several lengths with three choices."""
    return [
        {"question": f"Question {7 * i}: {'ab' * (i % 4)}", "choices": CHOICES, "gold": i % 3, "answer": "xyz"}
        for i in range(count)
    ]


def write(directory: Path, docs: list[dict[str, Any]] | None = None, **changes: dict[str, Any]) -> Path:
    """The tasks local_choice, local_text and local_generation in a directory, for `include_path`.

    `changes` are merged into the task of that name.
    """
    directory.mkdir(exist_ok=True)
    data = directory / "documents.jsonl"
    data.write_text("\n".join(json.dumps(doc) for doc in docs or documents()))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(directory / "cache")},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    tasks: dict[str, dict[str, Any]] = {
        "local_choice": {
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "target_delimiter": "",
            "metric_list": [metric("acc"), metric("acc_norm")],
        },
        "local_text": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{question}}{{question}}{{question}}{{question}}",
            "metric_list": [metric("word_perplexity", "weighted_perplexity", False)],
        },
        "local_generation": {
            "output_type": "generate_until",
            "doc_to_target": "answer",
            "generation_kwargs": {"until": ["e"], "max_gen_toks": 6, "do_sample": False},
            "metric_list": [metric("exact_match")],
        },
    }
    for name, task in tasks.items():
        whole = {"task": name, **common, **task, **changes.get(name, {})}
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(whole))
    return directory


def metric(name: str, aggregation: str = "mean", higher_is_better: bool = True) -> dict[str, Any]:
    return {"metric": name, "aggregation": aggregation, "higher_is_better": higher_is_better}
