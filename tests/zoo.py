"""A zoo of tiny random models, one per architecture family, for the tests.

Every model has 4 layers, d_model 48, a vocabulary of 258 tokens and a context of 64, is built from a
configuration without any network, and has weights large enough that attention is far from uniform, components
have comparable norms, and norm weights and all biases matter. Building never touches the global random state.

    model = zoo.build("llama_gqa")  # TransformerBridge, float32, shared between tests
    model = zoo.build("llama_gqa", "hooked")  # HookedTransformer, the same weights (TransformerLens 3 only)
    model = zoo.build("gpt2", dtype=torch.float64, fresh=True)  # a copy of one's own, safe to change
    model = zoo.build("gpt2", d_mlp=100)  # an MLP that is no multiple of d_model wide
    @pytest.mark.parametrize(("name", "backend"), zoo.cases())  # collecting builds nothing
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import torch
import transformers
from torch import Tensor, nn

MAJOR = int(version("transformer-lens").split(".")[0])
LAYERS, D_MODEL, D_MLP, VOCAB, CONTEXT = 4, 48, 96, 258, 64
BACKENDS = ("bridge", "hooked", "native")

# fmt: off
_LLAMA = dict(hidden_size=D_MODEL, intermediate_size=D_MLP, num_hidden_layers=LAYERS, rms_norm_eps=1e-5,
              num_attention_heads=6, num_key_value_heads=2)
_NEOX = dict(hidden_size=D_MODEL, intermediate_size=D_MLP, num_hidden_layers=LAYERS, num_attention_heads=4,
             hidden_act="gelu",
             rope_parameters=dict(rope_type="default", rope_theta=10_000, partial_rotary_factor=0.5))
_OPT = dict(hidden_size=D_MODEL, word_embed_proj_dim=D_MODEL, ffn_dim=D_MLP, num_hidden_layers=LAYERS,
            num_attention_heads=4, activation_function="relu", pad_token_id=1)
_GEMMA = dict(_LLAMA, head_dim=12, query_pre_attn_scalar=12, sliding_window=8,
              layer_types=["sliding_attention", "full_attention"] * 2)
_MOE = dict(_LLAMA, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager")

# name -> (configuration class, model class, configuration)
_SPECIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel",
             dict(n_embd=D_MODEL, n_layer=LAYERS, n_head=4, n_inner=D_MLP, n_positions=CONTEXT)),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", dict(_NEOX, use_parallel_residual=True)),
    "neox_sequential": ("GPTNeoXConfig", "GPTNeoXForCausalLM", dict(_NEOX, use_parallel_residual=False)),
    "llama_gqa": ("LlamaConfig", "LlamaForCausalLM", _LLAMA),
    "llama_bias": ("LlamaConfig", "LlamaForCausalLM", dict(_LLAMA, head_dim=12, attention_bias=True)),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(_LLAMA, head_dim=16)),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _GEMMA),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA),
    "opt": ("OPTConfig", "OPTForCausalLM", dict(_OPT, do_layer_norm_before=True)),
    "opt_post_norm": ("OPTConfig", "OPTForCausalLM", dict(_OPT, do_layer_norm_before=False)),
    "granite": ("GraniteConfig", "GraniteForCausalLM",
                dict(_LLAMA, residual_multiplier=0.5, attention_multiplier=0.3)),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _LLAMA),
    "moe": ("MixtralConfig", "MixtralForCausalLM", _MOE),
}
NAMES = tuple(_SPECIES)
PARALLEL = ("neox",)  # attention and MLP read the same stream
WIDTHS = ("intermediate_size", "n_inner", "ffn_dim")  # what configurations call d_mlp
NOT_ADDITIVE = ("opt_post_norm",)  # the stream itself is normalised: no branch's output is what is added

# name -> (TransformerLens' converter, what its HookedTransformer needs beyond the common settings)
_ROTARY = dict(positional_embedding_type="rotary", rotary_adjacent_pairs=False)
_NEOX_HOOKED = dict(n_heads=4, act_fn="gelu", rotary_dim=6, **_ROTARY)
_RMS = dict(normalization_type="RMS", final_rms=True, gated_mlp=True, act_fn="silu",
            n_heads=6, n_key_value_heads=2, **_ROTARY)
_GEMMA_HOOKED = dict(_RMS, d_head=12, act_fn="gelu_pytorch_tanh", use_normalization_before_and_after=True,
                     use_local_attn=True, window_size=8, attn_types=["local", "global"] * 2)
_HOOKED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("convert_gpt2_weights", dict(n_heads=4, act_fn="gelu_new")),
    "neox": ("convert_neox_weights", dict(_NEOX_HOOKED, parallel_attn_mlp=True)),
    "neox_sequential": ("convert_neox_weights", _NEOX_HOOKED),
    "llama_gqa": ("convert_llama_weights", _RMS),
    "llama_bias": ("convert_llama_weights", dict(_RMS, d_head=12)),
    "qwen3": ("convert_qwen3_weights", dict(_RMS, d_head=16, use_qk_norm=True)),
    "gemma2": ("convert_gemma_weights",
               dict(_GEMMA_HOOKED, attn_scores_soft_cap=50.0, output_logits_soft_cap=30.0)),
    "gemma3": ("convert_gemma_weights",
               dict(_GEMMA_HOOKED, use_qk_norm=True, rotary_base=1_000_000, rotary_base_local=10_000)),
    "opt": ("convert_opt_weights", dict(n_heads=4, act_fn="relu")),
    "moe": ("convert_mixtral_weights",
            dict(_RMS, num_experts=4, experts_per_token=2, norm_topk_prob=True, rotary_base=1_000_000)),
}
_NATIVE: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_heads=4, d_head=12, act_fn="gelu_new", normalization_type="LN"),
    "llama_gqa": dict(n_heads=6, d_head=8, n_key_value_heads=2, act_fn="silu", gated_mlp=True, final_rms=True,
                      normalization_type="RMS", positional_embedding_type="rotary"),
}
# fmt: on


def cases(*backends: str, exclude: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """The (name, backend) pairs that the installed TransformerLens has, without building anything.

    >>> ("gpt2", "bridge") in cases() and ("opt_post_norm", "hooked") not in cases()
    True
    """
    pairs = [(name, "bridge") for name in NAMES]
    if MAJOR < 4:
        pairs += [(name, "hooked") for name in _HOOKED]
    pairs += [(name, "native") for name in _NATIVE]
    return [(name, backend) for name, backend in pairs if name not in exclude and (not backends or backend in backends)]


def lacks(name: str, backend: str) -> set[str]:
    """The sites that this animal does not have."""
    if name == "moe":
        return {"mlp_carrier", "mlp_carrier_stream", "mlp_contribution"}
    if name == "opt_post_norm":
        return {"attn", "mlp", "mlp_carrier_stream"}
    return {"mlp_contribution"} if name.startswith("gemma") and backend == "hooked" else set()


def build(
    name: str,
    backend: str = "bridge",
    dtype: torch.dtype = torch.float32,
    *,
    tokenizer: bool = False,
    seed: int = 0,
    d_mlp: int = D_MLP,
    fresh: bool = False,
) -> Any:
    """One animal of the zoo, in evaluation mode; the same object for the same arguments unless `fresh`."""
    if (name, backend) not in cases():
        raise KeyError(f"the zoo has no {name!r} as {backend!r} under TransformerLens {MAJOR}")
    return (_build if fresh else _cached)(name, backend, dtype, tokenizer, seed, d_mlp)


def hugging_face(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, d_mlp: int = D_MLP) -> Any:
    """The Hugging Face model whose weights the backends "bridge" and "hooked" have, in evaluation mode."""
    config_class, model_class, settings = _SPECIES[name]
    settings = {key: d_mlp if key in WIDTHS else value for key, value in settings.items()}
    common = dict(
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
        attn_implementation="eager",
        architectures=[model_class],
    )
    config = getattr(transformers, config_class)(**{**common, **settings})
    with quiet():
        model = getattr(transformers, model_class)(config)
    if name == "opt_post_norm":  # opt-350m has no final norm, and no bridge can run it without one
        model.model.decoder.final_layer_norm = nn.LayerNorm(D_MODEL)
    fill(model, seed)
    return model.to(dtype).eval()


def tokens(batch: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    """Random token ids, (batch, length), none of which is the BOS/EOS id 0 or the padding id 1."""
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """A byte-level tokenizer without merges: <bos> 0, <pad> 1, then one id for each of the 256 bytes.

    It is loaded from a directory, since TransformerLens reads a tokenizer's path to load it once more.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    symbols = ["<bos>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<bos>",
        eos_token="<bos>",
        pad_token="<pad>",
        model_max_length=CONTEXT,
    )
    directory = _temporary_directory().name
    made.save_pretrained(directory)
    return transformers.AutoTokenizer.from_pretrained(directory)


@lru_cache(maxsize=1)
def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="zoo-tokenizer-")  # removed when the process ends


@torch.no_grad()
def fill(module: nn.Module, seed: int = 0) -> None:
    """Random weights at a scale where everything matters: matrices keep norms, norms and biases spread."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:  # norm weights stay around their neutral value (1, or 0 in Gemma), biases around 0
            parameter.copy_(parameter.float().mean() + 0.3 * noise if "weight" in name else 0.3 * noise)
        elif "emb" in name or "wte" in name or "wpe" in name:
            parameter.copy_(noise * _embedding_scale(module))
        else:
            fan_in = parameter.shape[0] if "c_" in name else parameter.shape[-1]  # GPT-2's Conv1D is transposed
            parameter.copy_(1.3 * noise / fan_in**0.5)


def _embedding_scale(module: nn.Module) -> float:
    return D_MODEL**-0.5 if type(module).__name__.startswith("Gemma") else 0.7  # Gemma multiplies by sqrt(d_model)


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings inside, and torch's global random state as it was afterwards."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _build(name: str, backend: str, dtype: torch.dtype, with_tokenizer: bool, seed: int, d_mlp: int) -> Any:
    attached = copy.deepcopy(tokenizer()) if with_tokenizer else None
    maker: dict[str, Callable[..., Any]] = {"bridge": _bridge, "hooked": _hooked, "native": _native}
    with quiet():
        return maker[backend](name, dtype, attached, seed, d_mlp).eval()


_cached = lru_cache(maxsize=None)(_build)


def _bridge(name: str, dtype: torch.dtype, attached: Any, seed: int, d_mlp: int) -> Any:
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    model = hugging_face(name, dtype, seed, d_mlp)
    return build_bridge_from_module(model, _SPECIES[name][1], hf_config=model.config, tokenizer=attached)


def _hooked(name: str, dtype: torch.dtype, attached: Any, seed: int, d_mlp: int) -> Any:
    import transformer_lens
    from transformer_lens.pretrained import weight_conversions

    converter, settings = _HOOKED[name]
    common = dict(
        n_layers=LAYERS,
        d_model=D_MODEL,
        d_head=D_MODEL // settings["n_heads"],
        d_mlp=d_mlp,
        d_vocab=VOCAB,
        n_ctx=CONTEXT,
        eps=1e-5,
        dtype=dtype,
        device="cpu",
        init_weights=False,
        default_prepend_bos=False,
    )
    config = transformer_lens.HookedTransformerConfig(**{**common, **settings})
    model = transformer_lens.HookedTransformer(config, tokenizer=attached, move_to_device=False)
    source = hugging_face(name, dtype, seed, d_mlp)
    weights = getattr(weight_conversions, converter)(source, config)
    if name == "llama_bias":  # the converter drops attention biases
        for layer, block in enumerate(source.model.layers):
            attention = block.self_attn
            weights[f"blocks.{layer}.attn.b_Q"] = attention.q_proj.bias.view(6, -1)
            weights[f"blocks.{layer}.attn._b_K"] = attention.k_proj.bias.view(2, -1)
            weights[f"blocks.{layer}.attn._b_V"] = attention.v_proj.bias.view(2, -1)
            weights[f"blocks.{layer}.attn.b_O"] = attention.o_proj.bias
    weights = {key: value.detach().clone().to(dtype) for key, value in weights.items()}
    model.load_and_process_state_dict(
        weights, fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    return nn.Module.to(model, dtype)  # HookedTransformer's own `to` prints, and its experts ignore the dtype


def _native(name: str, dtype: torch.dtype, attached: Any, seed: int, d_mlp: int) -> Any:
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    common = dict(d_model=D_MODEL, n_layers=LAYERS, n_ctx=CONTEXT, d_mlp=d_mlp, d_vocab=VOCAB, seed=seed)
    config = TransformerBridgeConfig(**{**common, **_NATIVE[name]})
    model = TransformerBridge.boot_native(config, tokenizer=attached, device="cpu", dtype=dtype)
    fill(model.original_model, seed)
    return model
