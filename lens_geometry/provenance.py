"""Which weights a TransformerLens model holds: description, fingerprint, and what was done to them.

Works on any `TransformerBridge` or `HookedTransformer`, also one that the user made. Weight processing
(folding, centring) is detected from the weights themselves, since a model may be processed after it was
loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

SOURCE = "lens_geometry_source"  # attribute that load_model leaves on a model: name, revision, source, ...
SUPPRESSION = "lens_geometry_suppression"  # and what it was trained under: how to describe it as it is now
COMPRESSION = "lens_geometry_compression"  # and how its weights were compressed: a compressed.Compression
Flag = bool | str  # True, False or "unknown"

_SAMPLES = 1024  # values per parameter in the fingerprint
_WARNINGS = {
    "fold_value_biases": "the value biases of this model are folded into the output bias "
    "(fold_value_biases): values lack their bias, so removing a component at the value sites changes the "
    "loss by nats more or less than in the raw model",
    "center_writing_weights": "the weights that write to the residual stream are centred "
    "(center_writing_weights): updates and stream lack their mean over d_model, so components at the sites "
    "attn, mlp, block and resid differ from the raw model's",
    "refactor_factored_attn_matrices": "the attention matrices of this model are refactored "
    "(refactor_factored_attn_matrices): its value space is another basis, so every number at the value sites "
    "differs from the raw model's",
}


def describe(model: Any) -> dict[str, Any]:
    """JSON-able provenance of a TransformerLens model: what, where from, shape, policy and processing.

    `name`, `revision`, `source`, `source_sha256`, `licence` and `path` are known for models of `load_model`;
    otherwise the name is the model's own, or says what it is, and the rest is None. `default_prepend_bos` is
    the model's own policy for text; experiments pass `prepend_bos` explicitly. `processing` maps each step to
    True, False or "unknown". `suppression` is None, or says whether the edit that the model was trained under is
    "attached", "left out" or "removed", and its settings. `compression` is None, or the method that changed the
    weights, its settings, layers, sizes and calibration (`lens_geometry.compress`).
    """
    cfg, original = model.cfg, getattr(model, "original_model", None)
    source: dict[str, Any] = model.__dict__.get(SOURCE) or {}
    tokenizer = getattr(model, "tokenizer", None)
    first = next(iter(model.parameters()), torch.empty(0))
    architecture = getattr(cfg, "architecture", None) or getattr(cfg, "original_architecture", None)
    attention = getattr(getattr(original, "config", None), "_attn_implementation", None)
    return {
        "name": source.get("name") or _own_name(model, architecture),
        "revision": source.get("revision"),
        "source": source.get("source"),
        "source_sha256": source.get("source_sha256"),
        "licence": source.get("licence"),
        "path": source.get("path"),
        "class": type(model).__name__,
        "transformer_lens": version("transformer-lens"),
        "architecture": architecture,
        "n_layers": cfg.n_layers,
        "d_model": cfg.d_model,
        "n_heads": cfg.n_heads,
        "n_key_value_heads": getattr(cfg, "n_key_value_heads", None) or cfg.n_heads,
        "d_vocab": cfg.d_vocab,
        "n_ctx": cfg.n_ctx,
        "normalization_type": cfg.normalization_type,
        "positional_embedding_type": getattr(cfg, "positional_embedding_type", None),
        "parallel_attn_mlp": bool(getattr(cfg, "parallel_attn_mlp", False)),
        "dtype": str(first.dtype).removeprefix("torch."),
        "device": str(first.device),
        "attn_implementation": attention or "transformer_lens",
        "tokenizer": None if tokenizer is None else str(tokenizer.name_or_path),
        "default_prepend_bos": getattr(cfg, "default_prepend_bos", None),
        "processing": processing(model),
        "suppression": suppression_of(model),
        "compression": compression_of(model),
        "fingerprint": fingerprint(model),
    }


def suppression_of(model: Any) -> dict[str, Any] | None:
    """What a model of `load_model` was trained under, and whether that is "attached", "left out" or "removed".

    None for a model that brought no such edit.
    """
    look: Callable[[Any], dict[str, Any]] | None = model.__dict__.get(SUPPRESSION)
    return None if look is None else look(model)


def compression_of(model: Any) -> dict[str, Any] | None:
    """How the weights of a model were compressed, JSON-able; None for one that was not, as far as is known."""
    found = model.__dict__.get(COMPRESSION)
    return None if found is None else dict(found.record)


def _own_name(model: Any, architecture: str | None) -> str:
    """The name that a model brings; TransformerLens' stand-ins for none give way to what the model is."""
    name = getattr(model.cfg, "model_name", None)
    if name and name not in ("external", "custom", "native"):
        return str(name)
    return f"own {architecture or type(model).__name__} ({model.cfg.n_layers} layers, d_model {model.cfg.d_model})"


def fingerprint(model: torch.nn.Module) -> str:
    """sha256 over the names, shapes, dtypes, sums and a strided sample of the parameters.

    The sum is over the bits as integers, hence exact: any single changed weight changes the fingerprint. It
    is the same for the same weights in the same class and dtype, on any device, and under TransformerLens 3
    and 4 (parameters that are all zero, such as biases which one of them adds, do not count). 135M
    parameters: 0.3 s.
    """
    digest = hashlib.sha256()
    named = ((name.replace("._original_component", ""), value) for name, value in model.named_parameters())
    for name, parameter in sorted(named, key=lambda pair: pair[0]):
        values = parameter.detach()
        entry = f"{name} {tuple(values.shape)} {values.dtype}".encode()
        if values.device.type != "meta" and values.numel():
            integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
            bits = values.view(integers)
            every = torch.arange(0, bits.numel(), max(1, bits.numel() // _SAMPLES), device=bits.device)
            sample = bits[torch.unravel_index(every, bits.shape)]
            total = _wrapping_sum(bits)
            if total == 0 and not bool(values.any()):
                continue
            entry += f" {total} ".encode() + sample.cpu().numpy().tobytes()
        digest.update(entry)
    return digest.hexdigest()


def _wrapping_sum(bits: torch.Tensor) -> int:
    """Sum modulo 2^32 (2^64 for 64-bit integers): exact and the same in any order."""
    wide = torch.int64 if bits.dtype == torch.int64 else torch.int32
    if bits.device.type != "cpu":
        return int(bits.sum(dtype=wide))
    # numpy, on one thread: in hundreds of small sums torch's threads wait for each other on a busy machine
    return int(np.add.reduce(bits.numpy(), axis=None, dtype=str(wide).removeprefix("torch.")))


def processing(model: Any) -> dict[str, Flag]:
    """What was done to the weights, each True, False or "unknown" (the weights needed are not shown)."""
    return {
        "fold_ln": _ask(_norms_are_folded, model),
        "center_writing_weights": _ask(_writing_is_centred, model),
        "center_unembed": _ask(lambda m: _is_centred(m.W_U), model),
        "fold_value_biases": _ask(_value_biases_are_folded, model),
        "refactor_factored_attn_matrices": _ask(_outputs_are_rotations, model),
        "compatibility_mode": bool(getattr(model, "compatibility_mode", False)),
    }


def processing_warnings(model: Any) -> list[str]:
    """One sentence for each processing step that changes what an edit means; none for raw weights.

    Folding the norms alone and centring the unembedding are harmless and not mentioned.
    """
    steps = processing(model)
    cure = "Load raw weights (lens_geometry.load_model, or no weight processing) to compare with others."
    return [f"{text}. {cure}" for step, text in _WARNINGS.items() if steps[step] is True]


@torch.no_grad()
def _ask(question: Callable[[Any], Flag], model: Any) -> Flag:
    try:
        return question(model)
    except (AttributeError, TypeError, LookupError, ValueError, RuntimeError):
        return "unknown"  # no such weights (MoE, hybrid layers), or not readable (quantised, meta)


def _norms_are_folded(model: Any) -> Flag:
    if str(model.cfg.normalization_type).endswith("Pre"):
        return True
    if not hasattr(model, "compatibility_mode"):
        return False  # HookedTransformer writes it into normalization_type
    if not getattr(model, "_weights_processed", True):
        return False  # gains of one: a fresh model has them too
    return all(bool((block.ln1.w == 1).all()) for block in _ends(model))


def _writing_is_centred(model: Any) -> Flag:
    return all(_is_centred(block.attn.W_O) for block in _ends(model))


def _is_centred(weight: torch.Tensor) -> bool:
    """Whether the mean over the last axis vanishes: below a twentieth of what chance would leave."""
    rows = weight.detach().flatten(0, -2)
    rows = rows[:: max(1, len(rows) // 64)].float()
    chance = rows.std(dim=-1).square().mean().sqrt() / rows.shape[-1] ** 0.5
    return bool(rows.mean(dim=-1).square().mean().sqrt() < 0.05 * chance)


def _value_biases_are_folded(model: Any) -> Flag:
    ends = _ends(model)
    if any(block.attn.b_V is None or bool((block.attn.b_V != 0).any()) for block in ends):
        return False
    if getattr(model.cfg, "original_architecture", None) == "GPTNeoForCausalLM":
        return False  # it has an output bias and no value biases
    return any(block.attn.b_O is not None and bool((block.attn.b_O != 0).any()) for block in ends)


def _outputs_are_rotations(model: Any) -> Flag:
    output = _ends(model)[0].attn.W_O.detach().float()  # (heads, d_head, d_model)
    gram = output @ output.mT
    return bool((gram - torch.eye(gram.shape[-1], device=gram.device)).abs().max() < 1e-2)


def _ends(model: Any) -> list[Any]:
    return [model.blocks[0], model.blocks[-1]]
