"""A HookedTransformer as a directory: its configuration as JSON, its weights as safetensors, nothing pickled.

For models that no Hugging Face class stands for, such as a sequence model over items built from a configuration:

    model = HookedTransformer(HookedTransformerConfig(n_layers=2, d_model=32, n_ctx=20, d_head=8, d_vocab=500, ...))
    lg.save_hooked(model, "items")
    model = lg.load_model("items", backend="hooked")
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from lens_geometry import loaders
from lens_geometry.compressed import COMPRESSION_FILE, WINDOWS_FILE, compression_state, write_compression
from lens_geometry.errors import ModelError
from lens_geometry.provenance import suppression_of
from lens_geometry.results import replace_file

CONFIG_FILE, WEIGHTS_FILE, FORMAT = "hooked_config.json", "hooked.safetensors", 1
NOT_KEPT = ("device", "dtype", "n_devices", "init_weights", "n_params")  # of where it ran, or computed again
AGAIN = "save the model again, whole, with lens_geometry.save_hooked"


def is_hooked_directory(directory: Path) -> bool:
    """Whether `save_hooked` wrote this directory."""
    return (directory / CONFIG_FILE).is_file()


def save_hooked(model: Any, directory: str | Path) -> Path:
    """Write a HookedTransformer: `hooked_config.json`, `hooked.safetensors`, its tokenizer, how it was compressed.

    Any architecture that its configuration can say: learned, rotary or no positions, with or without MLPs. Weights keep
    their dtype and every bit. Returns the directory.

    Raises:
        ModelError: the model is no HookedTransformer, is under the edit that it was trained with (which these files
            do not hold), has a configuration that JSON cannot hold, or the directory cannot be written.
    """
    hooked, where = loaders.hooked_class(), Path(directory)
    if hooked is None or not isinstance(model, hooked):
        raise ModelError(
            f"{type(model).__name__} is no HookedTransformer",
            cure="a Hugging Face model is saved by its own save_pretrained, before a bridge is put around it",
        )
    if suppression_of(model) is not None:
        raise ModelError(
            "this model belongs to an edit that it was trained under, and these files would not hold it",
            cure="keep its checkpoint's directory, which holds both",
        )
    settings = {f.name: _plain(getattr(model.cfg, f.name), f.name) for f in fields(model.cfg) if f.name not in NOT_KEPT}
    named = dict(model.named_parameters(remove_duplicate=False))
    named.setdefault("unembed.W_U", model.unembed.W_U)  # a trainer's model may unembed with its embedding
    weights = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in named.items()}
    about = {
        "format": FORMAT,
        "class": "HookedTransformer",
        "transformer_lens": version("transformer-lens"),
        "config": settings,
    }
    text = json.dumps(about, indent=2, allow_nan=False) + "\n"
    try:
        where.mkdir(parents=True, exist_ok=True)
        replace_file(where / WEIGHTS_FILE, lambda path: safetensors.torch.save_file(weights, path))
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(where)
        state = compression_state(model)
        for file in (COMPRESSION_FILE, WINDOWS_FILE):
            (where / file).unlink(missing_ok=True)  # of a model that was here before
        if state is not None:
            write_compression(where, state)
        replace_file(where / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(
            f"the model could not be written ({error})",
            where=str(where),
            cure="free space, or choose another directory",
        ) from error
    return where


def _plain(value: Any, name: str) -> Any:
    """A setting in JSON's own types."""
    if hasattr(value, "item"):  # numpy's numbers
        value = value.item()
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    if value is None or isinstance(value, (str, bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ModelError(
        f"the setting {name} is {value!r}, which JSON cannot hold", where="model.cfg", cure="set it to None"
    )


def load_hooked(directory: Path, backend: str, dtype: torch.dtype, device: str) -> Any:
    """The HookedTransformer that `save_hooked` wrote, in the dtype asked for.

    Raises:
        ModelError: another backend is asked for, TransformerLens has no such class, or the files are damaged, of
            another format, or do not fit each other.
    """
    where = str(directory)
    if loaders.hooked_class() is None:
        raise ModelError(
            f"this is a HookedTransformer, which TransformerLens {version('transformer-lens')} has no more",
            where=where,
            cure="install transformer-lens 3.9 to load it",
        )
    if backend != "hooked":
        raise ModelError(
            f"this is a HookedTransformer, and the backend asked for is {backend!r}",
            where=where,
            cure='backend="hooked" (--backend hooked)',
        )
    model = _empty_model(directory, dtype, device)
    try:
        weights = safetensors.torch.load_file(directory / WEIGHTS_FILE, device=device)
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"the weights cannot be read ({error})", where=where, cure=AGAIN) from error
    _check_weights(dict(model.named_parameters()), weights, where)
    model.load_state_dict({name: value.to(dtype) for name, value in weights.items()}, strict=False)
    return model


def _empty_model(directory: Path, dtype: torch.dtype, device: str) -> Any:
    """A HookedTransformer of the directory's configuration and tokenizer, its weights not set."""
    import transformer_lens

    path = directory / CONFIG_FILE
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        number, settings = about["format"], dict(about["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"the configuration cannot be read ({type(error).__name__}: {error})"
        raise ModelError(problem, where=str(path), cure=AGAIN) from error
    if number != FORMAT:
        newer = isinstance(number, int) and number > FORMAT
        raise ModelError(
            f"the model is saved in format {number!r}, and only {FORMAT} is known",
            where=str(path),
            cure="install a newer lens-geometry" if newer else AGAIN,
        )
    known = {f.name for f in fields(transformer_lens.HookedTransformerConfig)}
    if unknown := sorted(set(settings) - known):
        raise ModelError(
            f"HookedTransformer of TransformerLens {version('transformer-lens')} has no setting {', '.join(unknown)}",
            where=str(path),
            cure=f"install transformer-lens {about.get('transformer_lens', '3.9')}, which wrote it",
        )
    tokenizer = loaders.read_tokenizer(directory, False)
    try:
        config = transformer_lens.HookedTransformerConfig(**settings, dtype=dtype, device=device, init_weights=False)
        model = loaders.hooked_from(config, tokenizer)
    except Exception as error:  # it asserts, and raises whatever it stumbles upon
        problem = f"HookedTransformer does not take this configuration ({type(error).__name__}: {error})"
        raise ModelError(problem, where=str(path), cure=AGAIN) from error
    return torch.nn.Module.to(model, dtype=dtype)  # some parts of it know float32 only


def _check_weights(parameters: dict[str, Tensor], weights: dict[str, Tensor], where: str) -> None:
    """Raise ModelError unless there is one tensor of the right shape for every parameter, and no other."""
    missing, unexpected = sorted(set(parameters) - set(weights)), sorted(set(weights) - set(parameters))
    for names, problem in ((missing, "the weights lack"), (unexpected, "the configuration has no place for")):
        if names:
            raise ModelError(f"{problem} {len(names)} tensors, such as {names[0]}", where=where, cure=AGAIN)
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            shapes = f"{tuple(weights[name].shape)}, and the configuration wants {tuple(parameter.shape)}"
            raise ModelError(f"{name} has the shape {shapes}", where=where, cure=AGAIN)
        if not weights[name].is_floating_point():
            raise ModelError(f"{name} holds {weights[name].dtype}, no weights", where=where, cure=AGAIN)
