"""The edit on plain Hugging Face models: equal to the TransformerLens form, and gone without a trace."""

import copy
import threading

import pytest
import torch
import transformers
import zoo
from torch import nn

import lens_geometry as lg
from lens_geometry.edits import PLAIN_SITES, applied, scale, suppress
from lens_geometry.edits.plain_layouts import LAYOUTS
from lens_geometry.errors import GeometryError, HookError, ModelError, SiteError

# fmt: off
_COMMON = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=4, num_attention_heads=6,
               num_key_value_heads=2, vocab_size=zoo.VOCAB, max_position_embeddings=64, bos_token_id=0,
               eos_token_id=0, pad_token_id=1, tie_word_embeddings=False, attn_implementation="eager")
OUTSIDE = {  # not in the zoo
    "mistral": ("Mistral", _COMMON),
    "qwen2": ("Qwen2", _COMMON),
    "qwen3_moe": ("Qwen3Moe", dict(_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                   experts_implementation="eager")),
    "stablelm": ("StableLm", dict(_COMMON, rope_parameters=dict(rope_type="default", rope_theta=10_000.0,
                                                                partial_rotary_factor=0.5), use_qkv_bias=True)),
    "stablelm_parallel": ("StableLm", dict(_COMMON, use_parallel_residual=True)),
}
# fmt: on
MAIN = ("llama_gqa", "qwen3", "neox", "gpt2", "stablelm", "gemma2")
OTHER = (
    "llama_bias", "qwen2", "mistral", "neox_sequential", "stablelm_parallel", "gemma3", "olmo2", "granite", "moe",
    "qwen3_moe",
)  # fmt: skip
RARE = [pytest.param(name, marks=pytest.mark.slow) for name in OTHER]


def plain(name, dtype=torch.float64):
    if name not in OUTSIDE:
        return zoo.hugging_face(name, dtype)
    family, settings = OUTSIDE[name]
    architecture = f"{family}ForCausalLM"
    with zoo.quiet():
        config = getattr(transformers, f"{family}Config")(**settings, architectures=[architecture])
        model = getattr(transformers, architecture)(config)
    zoo.fill(model)
    return model.to(dtype).eval()


def bridged(model):
    """A TransformerBridge of a copy."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    own = copy.deepcopy(model)
    with zoo.quiet():
        return build_bridge_from_module(own, type(model).__name__, hf_config=own.config, tokenizer=None).eval()


def gradients(bridge):
    """The gradients of a bridge's weights, by the plain model's names."""
    found = {
        name.replace("_original_component.", ""): parameter.grad
        for name, parameter in bridge.original_model.named_parameters()
        if parameter.grad is not None
    }
    found = {name.replace(".attn.o.", ".attn.c_proj.").replace(".attention.o.", ".attention.dense."): grad
             for name, grad in found.items()}  # fmt: skip
    for name in [name for name in found if ".q." in name and "attn.q" in name or "attention.q." in name]:
        q, k, v = (found.pop(name.replace(".q.", f".{letter}.")) for letter in "qkv")
        if "attention.q." in name:  # NeoX: the three of each head together, as rows
            heads = [part.unflatten(0, (4, 12)) for part in (q, k, v)]
            found[name.replace(".q.", ".query_key_value.")] = torch.stack(heads, 1).flatten(0, 2)
        else:  # GPT-2: one after the other, as columns
            columns = [part.T if part.ndim == 2 else part for part in (q, k, v)]
            found[name.replace(".q.", ".c_attn.")] = torch.cat(columns, -1)
    return found


def backward(logits):
    weight = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).reshape(logits.shape)
    (logits * weight).sum().backward()


def size(x):
    return float(x.detach().norm())


@pytest.mark.parametrize("name", [*MAIN, *RARE])
def test_logits_and_the_gradient_of_every_weight_equal_the_transformer_lens_form(name):
    model, ids = plain(name), zoo.tokens(2, 9)
    bridge = bridged(model)
    with torch.no_grad():
        base = model(ids).logits
        apart = size(bridge(ids, return_type="logits") - base) / size(base)  # NeoX's rotary tables are made in float32
    tolerance = max(1e-12, 10 * apart)
    assert tolerance < 1e-5
    for site in PLAIN_SITES:
        model.zero_grad()
        bridge.zero_grad()
        with suppress(model, site, parallel=0.2, perpendicular=0.9):
            ours = model(ids).logits
            backward(ours)
        with applied(bridge, scale(bridge, site, parallel=0.2, perpendicular=0.9)):
            theirs = bridge(ids, return_type="logits")
            backward(theirs)
        assert size(ours - theirs) <= tolerance * size(theirs), site
        assert size(ours - base) > 1e-2 * size(base), site
        expected = gradients(bridge)
        for weight, parameter in model.named_parameters():
            assert size(parameter.grad - expected[weight]) <= tolerance * (1e-3 + size(expected[weight])), (site, weight)


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "stablelm"])
def test_in_float32_they_agree_to_five_digits(name):
    model, ids = plain(name, torch.float32), zoo.tokens(2, 9)
    bridge = bridged(model)
    for site in PLAIN_SITES:
        with suppress(model, site), torch.no_grad():
            ours = model(ids).logits
        with applied(bridge, scale(bridge, site, parallel=0.0)), torch.no_grad():
            assert size(ours - bridge(ids, return_type="logits")) < 1e-5 * size(ours)
