"""Small random models that need no download, for trying commands, for teaching and for tests.

tiny-random-llama has grouped-query attention (4 query, 2 KV heads) and RMSNorm, tiny-random-gpt2 LayerNorm
with biases and learned positions, tiny-random-neox attention and MLP in parallel. Four layers of width 64,
four heads, untied embeddings, a byte-level tokenizer. They know nothing: their loss is near that of guessing,
ln 259 = 5.6 nats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from lens_geometry import cache

_RECIPE = 3  # raise it when the weights or the tokenizer change
_SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 259,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
}

BUNDLED: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "tiny-random-llama": (
            "LlamaConfig",
            MappingProxyType(
                {**_SHAPE, "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 512}
            ),
        ),
        "tiny-random-gpt2": ("GPT2Config", MappingProxyType({**_SHAPE, "n_inner": 256, "n_positions": 512})),
        "tiny-random-neox": (
            "GPTNeoXConfig",
            MappingProxyType(
                {
                    **_SHAPE,
                    "intermediate_size": 256,
                    "max_position_embeddings": 512,
                    "use_parallel_residual": True,
                }
            ),
        ),
    }
)


TWINS: Mapping[str, str] = MappingProxyType(
    {
        "twin-layernorm": "small English model of Austen and Melville; LayerNorm",
        "twin-rmsnorm": "the same with RMSNorm: same shape, text, batches and initial weights",
    }
)
"""Models trained here (scripts/build_twins.py), alike in everything but their norm, and what is said of them."""


def bundled_directory(name: str) -> Path:
    """The Hugging Face directory of a bundled model: a twin's own, or one built in code the first time.

    The weights of the latter come from a generator with seed 0; the global random state is not touched.

    Raises:
        KeyError: `name` is neither in BUNDLED nor in TWINS.
        ModelError: the cache cannot be written.
    """
    if name in TWINS:
        return Path(str(resources.files("lens_geometry") / "assets" / name))
    kind, settings = BUNDLED[name]
    recipe = hashlib.sha256(f"{_RECIPE} {kind} {dict(settings)}".encode()).hexdigest()[:8]
    target = cache.models_directory() / f"{name}-{recipe}"
    if cache.read_marker(target) is None:
        with cache.building(target) as unfinished:
            if unfinished is not None:
                import transformers

                config = getattr(transformers, kind)(**settings)
                with torch.random.fork_rng(devices=[]):
                    model = transformers.AutoModelForCausalLM.from_config(config)
                _fill(model)
                with cache.quiet_transformers():
                    model.save_pretrained(unfinished)
                    byte_tokenizer().save_pretrained(unfinished)
                cache.write_marker(unfinished, {"source": f"lens_geometry: {name}, recipe {_RECIPE}, seed 0"})
    return target


@torch.no_grad()
def _fill(model: torch.nn.Module) -> None:
    """Norm gains 1 +- 0.2, biases +- 0.2, embeddings +- 1, other matrices of standard deviation
    1/sqrt(inputs).

    So attention is far from uniform, and every update is of the size of the stream that it is added to.
    """
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.copy_(0.2 * noise + (1.0 if name.endswith("weight") else 0.0))
        elif "wte" in name or "embed_" in name:
            parameter.copy_(noise)
        elif "wpe" in name:
            parameter.copy_(0.3 * noise)
        else:
            transposed = ".h." in name  # Conv1D: (in, out)
            parameter.copy_(noise * parameter.shape[0 if transposed else 1] ** -0.5)


def byte_tokenizer() -> Any:
    """A tokenizer whose ids are the UTF-8 bytes (0 to 255), then <|bos|>, <|eos|> and <|pad|>."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    # ByteLevel's alphabet: a printable byte is its own symbol, the others get the next free code points.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    symbols = [chr(byte if byte in printable else next(hidden)) for byte in range(256)]
    tokenizer = Tokenizer(BPE(vocab={symbol: byte for byte, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    tokenizer.add_special_tokens(list(special.values()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
