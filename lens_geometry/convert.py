"""A .gguf as a Hugging Face directory of float32 safetensors, dequantised once."""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path
from typing import Any

from lens_geometry import cache
from lens_geometry.errors import ModelError


def gguf_directory(gguf: Path, *, progress: bool = True) -> Path:
    """The cached Hugging Face directory of a .gguf, converted the first time (keyed by path, size and time).

    Raises:
        ModelError: the file is damaged, or transformers cannot read its architecture, or the disk is full.
    """
    gguf = gguf.expanduser().resolve()
    stat = gguf.stat()
    key = hashlib.sha256(f"{gguf}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    target = cache.models_directory() / f"{gguf.stem}-{key}"
    if cache.read_marker(target) is None:
        with cache.building(target) as unfinished:
            if unfinished is not None:
                provenance = {"source": str(gguf), "sha256": cache.sha256_of(gguf)}
                fill_from_gguf(gguf, unfinished, provenance, progress=progress)
    return target


def fill_from_gguf(gguf: Path, directory: Path, provenance: dict[str, Any], *, progress: bool = True) -> None:
    """Dequantise `gguf` into `directory`: config, float32 safetensors, tokenizer, marker.

    The weights are those that transformers dequantises; tied weights stay tied. The tokenizer of a SmolLM
    file is built here (`smollm_tokenizer`), any other is the one that transformers reads. The marker's
    default_prepend_bos is the file's own policy (tokenizer.ggml.add_bos_token), None where it has none.
    """
    import torch
    import transformers

    if progress:
        cache.say(f"converting {gguf.name} to safetensors, once (about a minute for 135M parameters)")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError("reading a .gguf needs the package gguf", where=str(gguf), cure="pip install gguf") from error
    try:
        field = GGUFReader(gguf).get_field
        with torch.random.fork_rng(devices=[]), contextlib.ExitStack() as stack:
            if not progress:
                stack.enter_context(cache.quiet_transformers())
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
            )
        kind = field("tokenizer.ggml.pre")
        if kind is not None and kind.contents() == "smollm":
            tokenizer = smollm_tokenizer(field)
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        add_bos = field("tokenizer.ggml.add_bos_token")
    except Exception as error:  # gguf and transformers raise whatever their parsers stumble upon
        raise ModelError(
            f"this .gguf cannot be converted ({type(error).__name__}: {error})",
            where=str(gguf),
            cure="check that the file is whole and of an architecture that transformers "
            f"{transformers.__version__} reads from GGUF, or give a Hugging Face directory",
        ) from error
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with cache.quiet_transformers():
        try:
            model.save_pretrained(directory)
        except Exception as error:  # safetensors wraps the system's error in its own
            raise (cache.disk_error(error, directory.parent) if cache.is_full(error) else error) from error
        tokenizer.save_pretrained(directory)
    cache.write_marker(
        directory,
        {
            **provenance,
            "gguf": gguf.name,
            "dtype": "float32",
            "default_prepend_bos": None if add_bos is None else bool(add_bos.contents()),
            "transformers": transformers.__version__,
            "converted": time.strftime("%Y-%m-%d"),
        },
    )


def smollm_tokenizer(field: Any) -> Any:
    """SmolLM's own tokenizer from the vocabulary and merges in a GGUF: single digits, then byte-level BPE.

    What transformers builds lacks the digits step ("1234" must be four tokens), and 5.17 also takes the BOS
    for the EOS and decodes the character U+2581 as a space. The special tokens are the file's: BOS
    <|im_start|> (a chat token), EOS and padding <|im_end|>, unknown <|endoftext|> (which separated documents
    in pre-training).

    Args:
        field: `GGUFReader.get_field` of the file.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = field("tokenizer.ggml.tokens").contents()
    kinds = field("tokenizer.ggml.token_type").contents()
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges").contents()]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: tokens[field(f"tokenizer.ggml.{key}_token_id").contents()] for name, key in names.items()}
    template = field("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=None if template is None else template.contents(),
        **special,
    )
