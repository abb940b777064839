"""A byte-level BPE: trained on documents, or one that exists already.

A trained one splits text as GPT-2 does, at words with the space before them, and merges inside them only. It has one
special token, `<|endoftext|>` with id 0, which is BOS, EOS and padding; then the 256 bytes; then the merges. So any
text comes back exactly as it was.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lens_geometry.errors import DataError

END = "<|endoftext|>"
LEAST = 257  # the end token and 256 bytes


def train_tokenizer(documents: Iterable[str], d_vocab: int) -> Any:
    """A Hugging Face tokenizer of at most `d_vocab` tokens, the same for the same documents in the same order.

    Fewer than `d_vocab` come of documents that have no more words to merge. Raises DataError for `d_vocab` below 257.
    """
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    check_d_vocab(d_vocab)
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=d_vocab,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=int(1e30),
    )


def check_d_vocab(d_vocab: Any) -> None:
    """Raise DataError unless `d_vocab` is a whole number with room for the end token and every byte."""
    if not isinstance(d_vocab, int) or isinstance(d_vocab, bool) or d_vocab < LEAST:
        problem = f"d_vocab is {d_vocab!r}; the end token and 256 bytes need {LEAST}"
        raise DataError(problem, where="d_vocab", cure="give a whole number of 257 or more, such as 2048")


def load_tokenizer(given: Any) -> Any:
    """An existing tokenizer: a directory that `save_pretrained` wrote, a name on the Hugging Face hub, or the object.

    Raises DataError when it cannot be read.
    """
    if not isinstance(given, str | os.PathLike):
        if not callable(getattr(given, "save_pretrained", None)):
            problem = f"the tokenizer is a {type(given).__name__}"
            raise DataError(problem, where="tokenizer", cure="give a directory, a name on the hub, or a tokenizer")
        return given
    from transformers import AutoTokenizer

    name = os.fspath(given)
    here = Path(name).expanduser()
    try:
        return AutoTokenizer.from_pretrained(str(here) if here.exists() else name, local_files_only=here.exists())
    except Exception as error:  # its parsers raise whatever they stumble upon
        problem = f"the tokenizer cannot be read ({type(error).__name__}: {str(error).split(chr(10))[0]})"
        cure = "give a directory with tokenizer.json in it, a name on the hub, or leave it out to train one"
        raise DataError(problem, where=name, cure=cure) from error


def vocabulary_of(tokenizer: Any) -> int:
    """One more than the largest id that the tokenizer gives."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))


def end_token(tokenizer: Any) -> int:
    """The id that ends a document: the tokenizer's EOS, or its BOS. Raises DataError when it has neither."""
    for name in ("eos_token_id", "bos_token_id"):
        if (token := getattr(tokenizer, name, None)) is not None:
            return int(token)
    cure = "set its eos_token, or leave the tokenizer out to train one"
    raise DataError("the tokenizer has no token that ends a document", where=str(tokenizer.name_or_path), cure=cure)


class Encoder:
    """Documents to ids: each alone, whole, without special tokens, and an `<|endoftext|>` in its text is only text."""

    def __init__(self, tokenizer: Any) -> None:
        self.end, self.vocabulary = end_token(tokenizer), vocabulary_of(tokenizer)
        self.dtype = np.dtype("<u2") if self.vocabulary <= 2**16 else np.dtype("<u4")
        self._tokenizer = tokenizer
        self._backend = None
        if getattr(tokenizer, "is_fast", False):
            self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = True

    def __call__(self, documents: Sequence[str]) -> list[np.ndarray]:
        """The ids of each document, with the end token behind them."""
        if self._backend is not None:
            found = [one.ids for one in self._backend.encode_batch_fast(list(documents), add_special_tokens=False)]
        else:
            found = self._tokenizer(
                list(documents), add_special_tokens=False, split_special_tokens=True, verbose=False
            )["input_ids"]
        return [np.array([*ids, self.end], self.dtype) for ids in found]


def tokenizer_sha256(directory: Path) -> str:
    """A hash over names and bytes of the files of a tokenizer's directory."""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


def about_given(given: Any, tokenizer: Any) -> dict[str, Any]:
    """What a preparation records of an existing tokenizer, so that another is not taken for it later."""
    name = os.fspath(given) if isinstance(given, str | os.PathLike) else str(tokenizer.name_or_path)
    rules = tokenizer.backend_tokenizer.to_str() if getattr(tokenizer, "is_fast", False) else ""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    digest = hashlib.sha256(f"{type(tokenizer).__name__} {vocabulary} {rules}".encode())
    return {"given": name, "vocabulary": vocabulary_of(tokenizer), "sha256": digest.hexdigest()}
