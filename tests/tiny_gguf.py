"""A Llama of two layers with SmolLM's kind of tokenizer, in a .gguf of 40 kB."""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import GGUFWriter

from lens_geometry.bundled import byte_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [
    "1 2",
    "12 34",
    "3 4",
    "Ġ 1",
    "t e",
]  # "1234" is one token where digits are not split


def write(path: Path) -> Path:
    """Write the model to `path`, the same bytes every time."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    symbols = [byte_tokenizer().convert_ids_to_tokens(byte) for byte in range(256)]
    tokens = [*SPECIAL, *symbols, *(merge.replace(" ", "") for merge in MERGES)]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    generator = torch.Generator().manual_seed(3)
    shapes = {"attn_norm": (16,), "ffn_norm": (16,), "attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16)}
    shapes |= {"attn_output": (16, 16), "ffn_gate": (32, 16), "ffn_up": (32, 16), "ffn_down": (16, 32)}
    named = {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in shapes.items()}
    for name, shape in {"token_embd": (len(tokens), 16), **named, "output_norm": (16,)}.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
