"""A compressed model on disk: a Hugging Face directory like any other, with what is known of its compression."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lens_geometry import cache
from lens_geometry.compress.plain import NATIVE, fresh_copy, is_bridge, is_hooked, plain_of_hooked
from lens_geometry.compressed import COMPRESSION_FILE, compression_state, write_compression
from lens_geometry.errors import CompressionError, ModelError, ResultError
from lens_geometry.provenance import SOURCE
from lens_geometry.suppressed import save_carried


def save_compressed(model: Any, directory: str | Path) -> Path:
    """Write config.json, the weights, the tokenizer, `compression.json` and the hashes of the calibration text.

    `load_model(directory)` brings all of it back, plain transformers the weights. The edit that the model was trained
    under goes along. A directory that holds a compressed model is replaced in one step.

    Args:
        model: what a method of this package returned.
        directory: a new one, or one that holds a compressed model.

    Raises:
        CompressionError: a model that no method here has compressed.
        ModelError: a model that has no Hugging Face form.
        ResultError: a directory that holds something else, or cannot be written.
    """
    state, directory = compression_state(model), Path(directory).absolute()
    if state is None:
        raise CompressionError("this model was not compressed here", cure="pass what a method of compress returned")
    taken = directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
    if taken and not (directory / COMPRESSION_FILE).is_file():
        raise ResultError("this holds something else", where=str(directory), cure="choose a new directory")
    plain: Any = plain_of_hooked(model) if is_hooked(model) else fresh_copy(model)
    if type(plain).__name__ == NATIVE:
        raise ModelError(
            "TransformerLens' native model has no Hugging Face form to be saved in",
            cure="keep it in memory, or compress a Hugging Face model",
        )
    source = dict(model.__dict__.get(SOURCE) or {})
    policy = getattr(model.cfg, "default_prepend_bos", None) if is_bridge(model) or is_hooked(model) else None
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        with cache.quiet_transformers():
            plain.save_pretrained(unfinished)
        tokenizer = getattr(model, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        write_compression(unfinished, state)
        save_carried(model, unfinished)
        marker = {
            "source": f"lens_geometry.compress of {source.get('source') or 'a model in memory'}",
            "sha256": source.get("source_sha256"),
            "licence": source.get("licence"),
            "default_prepend_bos": policy,
        }
        cache.write_marker(unfinished, marker)
        shutil.rmtree(directory, ignore_errors=True)
        unfinished.replace(directory)
    except Exception as error:  # safetensors wraps the system's errors in its own
        shutil.rmtree(unfinished, ignore_errors=True)
        if not isinstance(error, OSError) and not cache.is_full(error):
            raise
        raise ResultError(
            f"the compressed model could not be written ({error})",
            where=str(directory),
            cure="choose another directory",
        ) from error
    return directory
