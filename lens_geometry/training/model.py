"""One set of weights in either class: a HookedTransformer, or Hugging Face's own model behind a TransformerBridge.

Weights are drawn once, by name, for the Hugging Face model; a HookedTransformer is made from it. So both start equal,
models that differ in their norm share every other weight, and what is saved is always a Hugging Face directory.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lens_geometry import cache, loaders
from lens_geometry.errors import TrainingError
from lens_geometry.hugging_face import hugging_face_model, hugging_face_weights, is_added_bias
from lens_geometry.training.config import Shape

Backend = Literal["auto", "hooked", "bridge"]
WRITERS = ("o_proj.weight", "down_proj.weight")
"""Matrices that write to the stream, and start smaller by sqrt(2 n_layers)."""


def build_model(
    shape: Shape,
    seed: int,
    *,
    backend: Backend = "auto",
    device: str | torch.device = "cpu",
    tokenizer: Any = None,
) -> Any:
    """A TransformerLens model of this shape with fresh weights, biases frozen at zero, embeddings tied where asked.

    Args:
        shape: of the model.
        seed: of the weights. Each matrix is drawn by a generator of its own, from the seed and its name.
        backend: "hooked", "bridge", or "auto" (hooked where TransformerLens has it).
        device: where the weights are.
        tokenizer: one that came from a directory, or None.

    Raises:
        TrainingError: the backend does not exist here.
    """
    return wrapped(fresh_hugging_face_model(shape, seed), backend, device=device, tokenizer=tokenizer)


def fresh_hugging_face_model(shape: Shape, seed: int) -> Any:
    """The Hugging Face model with fresh weights; the global random state is left as it was.

    Matrices are drawn from N(0, initial_std^2), those that write to the stream smaller by sqrt(2 n_layers); gains are
    1 and biases 0.
    """
    hf_model = hugging_face_model(shape)
    with torch.no_grad():
        for name, weight in hf_model.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
            std = shape.initial_std / (2 * shape.n_layers) ** 0.5 if name.endswith(WRITERS) else shape.initial_std
            weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    return hf_model


def wrapped(hf_model: Any, backend: Backend, *, device: str | torch.device = "cpu", tokenizer: Any = None) -> Any:
    """A Hugging Face model as the TransformerLens model that is trained; the bridge holds it, the other copies it."""
    if backend == "auto":
        backend = "bridge" if loaders.hooked_class() is None else "hooked"
    if backend == "hooked" and loaders.hooked_class() is None:
        raise TrainingError("this TransformerLens has no HookedTransformer", cure="backend bridge, or install 3.9")
    build = loaders.hooked_of if backend == "hooked" else loaders.bridge_of
    model = build(hf_model.to(device), tokenizer, "training", str(device))
    if backend == "hooked" and hf_model.config.tie_word_embeddings:
        tie_embeddings(model)
    for name, parameter in model.named_parameters():
        if is_added_bias(name):
            parameter.requires_grad_(False)
    return model


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter has weight decay: matrices and embeddings have, in either class."""
    return parameter.ndim > 1 and not is_added_bias(name)


def tie_embeddings(model: Any) -> None:
    """Let a HookedTransformer unembed with its embedding, as one parameter; it has no such thing of its own."""
    unembed, embed = model.unembed, model.embed

    class TiedUnembed(type(unembed)):  # type: ignore[misc]
        @property
        def W_U(self) -> Tensor:  # noqa: N802
            return embed.W_E.T  # type: ignore[no-any-return]

    del unembed.W_U
    unembed.__class__ = TiedUnembed


def save_model(model: Any, shape: Shape, directory: Path, tokenizer: Any = None) -> None:
    """Write config.json, model.safetensors and the tokenizer's files: a Hugging Face directory like any other."""
    hf_model = hugging_face_model(shape, tokenizer)
    weights = {name: weight.cpu() for name, weight in hugging_face_weights(model).items()}
    if shape.tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    hf_model.load_state_dict(weights, assign=True)
    hf_model.tie_weights()
    with cache.quiet_transformers():
        hf_model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def open_model(directory: Path, backend: Backend, *, device: str | torch.device = "cpu") -> Any:
    """The TransformerLens model of a directory that `save_model` wrote, to be trained further."""
    hf_model, _ = loaders.read_directory(directory, torch.float32, trust_remote_code=False)
    return wrapped(hf_model, backend, device=device)
