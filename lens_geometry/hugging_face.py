"""One set of weights under Hugging Face's names: Llama for RMSNorm, StableLM for LayerNorm, from either class."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor


def hugging_face_config(shape: Any, tokenizer: Any = None) -> Any:
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


def hugging_face_model(shape: Any, tokenizer: Any = None) -> Any:
    """The Hugging Face model of a shape, with whatever weights its class draws."""
    import transformers

    config = hugging_face_config(shape, tokenizer)
    with torch.random.fork_rng(devices=[]):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def is_added_bias(name: str) -> bool:
    """Whether a parameter is a bias that the recipe has not, and TransformerLens adds: zero, and to stay so.

    HookedTransformer has them everywhere, the bridge of 3.9 has one at the unembedding. A LayerNorm's own is none.
    """
    return name.rsplit(".", 1)[-1].lstrip("_").startswith("b_") or name.endswith("lm_head._original_component.bias")


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
