"""One set of weights in either class: a HookedTransformer, or Hugging Face's own model behind a TransformerBridge.

Weights are drawn once, by name, for the Hugging Face model; a HookedTransformer is made from it. So both start equal,
models that differ in their norm share every other weight, and what is saved is always a Hugging Face directory.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from einops import rearrange
from torch import Tensor

from lens_geometry import cache, loaders
from lens_geometry.errors import TrainingError
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


def hugging_face_config(shape: Shape, tokenizer: Any = None) -> Any:
    """LlamaConfig for RMSNorm, StableLmConfig for LayerNorm; the special tokens are the tokenizer's."""
    import transformers

    special = {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    common = dict(
        vocab_size=shape.d_vocab,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_mlp,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_key_value_heads,
        max_position_embeddings=shape.n_ctx,
        hidden_act=shape.activation,
        tie_word_embeddings=shape.tied,
        initializer_range=shape.initial_std,
        attention_dropout=0.0,
        **special,
    )
    rope = {"rope_type": "default", "rope_theta": shape.rotary_base}
    if shape.norm == "RMS":
        config = transformers.LlamaConfig(rms_norm_eps=shape.eps, rope_parameters=rope, **common)
    else:
        config = transformers.StableLmConfig(
            layer_norm_eps=shape.eps,
            rope_parameters={**rope, "partial_rotary_factor": 1.0},
            partial_rotary_factor=1.0,
            use_qkv_bias=False,
            hidden_dropout=0.0,
            **common,
        )
    config.architectures = ["LlamaForCausalLM" if shape.norm == "RMS" else "StableLmForCausalLM"]
    return config


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


def hugging_face_model(shape: Shape, tokenizer: Any = None) -> Any:
    """The Hugging Face model of a shape, with whatever weights its class draws."""
    import transformers

    config = hugging_face_config(shape, tokenizer)
    with torch.random.fork_rng(devices=[]):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


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


def is_added_bias(name: str) -> bool:
    """Whether a parameter is a bias that the recipe has not, and TransformerLens adds: zero, and to stay so.

    HookedTransformer has them everywhere, the bridge of 3.9 has one at the unembedding. A LayerNorm's own is none.
    """
    return name.rsplit(".", 1)[-1].lstrip("_").startswith("b_") or name.endswith("lm_head._original_component.bias")


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


def hugging_face_weights(model: Any) -> dict[str, Tensor]:
    """The weights of a trained model under Hugging Face's names: rearranged, the same to the last bit."""
    if hasattr(model, "original_model"):
        return {
            name.replace("._original_component", ""): weight.detach()
            for name, weight in model.original_model.named_parameters()
            if not is_added_bias(name)
        }
    weights = {"model.embed_tokens.weight": model.embed.W_E, "model.norm.weight": model.ln_final.w}
    if "W_U" in model.unembed._parameters:
        weights["lm_head.weight"] = model.unembed.W_U.T
    if hasattr(model.ln_final, "b"):
        weights["model.norm.bias"] = model.ln_final.b
    for number, block in enumerate(model.blocks):
        attn, mlp, place = block.attn, block.mlp, f"model.layers.{number}"
        shared = "_" if hasattr(attn, "_W_K") else ""  # grouped queries: W_K itself is repeated for every head
        for letter, weight in (
            ("q", attn.W_Q),
            ("k", getattr(attn, f"{shared}W_K")),
            ("v", getattr(attn, f"{shared}W_V")),
        ):
            weights[f"{place}.self_attn.{letter}_proj.weight"] = rearrange(weight, "head model d -> (head d) model")
        weights[f"{place}.self_attn.o_proj.weight"] = rearrange(attn.W_O, "head d model -> model (head d)")
        for name, weight in (("gate", mlp.W_gate), ("up", mlp.W_in), ("down", mlp.W_out)):
            weights[f"{place}.mlp.{name}_proj.weight"] = weight.T
        for name, norm in (("input_layernorm", block.ln1), ("post_attention_layernorm", block.ln2)):
            weights[f"{place}.{name}.weight"] = norm.w
            if hasattr(norm, "b"):
                weights[f"{place}.{name}.bias"] = norm.b
    return {name: weight.detach().contiguous() for name, weight in weights.items()}


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
