"""Calibration: the text that a method looks at, what its inputs look like there, and how to know it again.

A calibration text must never be the text that a compressed model is judged by. So the hashes of all its windows of
tokens stay with the model, and `calibration_overlap` finds those that come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lens_geometry.compress.matrices import Matrix
from lens_geometry.compress.plain import is_bridge, is_hooked
from lens_geometry.compressed import compression_state
from lens_geometry.data import Tokens, tokenize
from lens_geometry.errors import CompressionError, DataError
from lens_geometry.provenance import suppression_of

WINDOW, SHORTEST = 32, 6  # tokens; a calibration sequence between the two is one window, a shorter one is none
_BATCH = 8
_BASE = np.uint64(0x9E3779B97F4A7C15)

Hashes = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class Calibration:
    """A calibration text as a method uses it: sequences without padding, provenance, (width, hash) of its windows."""

    sequences: tuple[Tensor, ...]
    about: dict[str, Any]
    windows: Hashes

    def batches(self) -> list[Tensor]:
        """Token ids [sequence, pos], sequences of equal length together, so that there is no padding."""
        stacked = []
        for length in sorted({len(sequence) for sequence in self.sequences}):
            rows = [sequence for sequence in self.sequences if len(sequence) == length]
            stacked += [torch.stack(rows[start : start + _BATCH]) for start in range(0, len(rows), _BATCH)]
        return stacked


def calibration_tokens(
    model: Any, data: Any, *, sequences: int = 64, sequence_length: int = 256, prepend_bos: bool = False
) -> Tokens:
    """Token ids to calibrate with: `sequences` pieces, spread evenly over the text.

    Args:
        model: a TransformerLens model.
        data: a Text, strings, or token ids, as `tokenize` takes them.
        sequences: how many.
        sequence_length: tokens of each, and no more than the model's context.
        prepend_bos: put the tokenizer's BOS before every sequence.

    Raises:
        DataError: an empty text, and as `tokenize` does.
    """
    context = getattr(model.cfg, "n_ctx", None) or sequence_length
    length = min(sequence_length, int(context))
    return tokenize(model, data, sequence_length=length, max_sequences=sequences, prepend_bos=prepend_bos)


def calibration_overlap(model: Any, tokens: Tokens) -> dict[str, Any]:
    """How many windows of an evaluation text are among those that a model was calibrated with.

    Returns `known`: whether that can be said (a model of `lens_geometry.compress` knows its calibration text, or that
    it had none; a model from elsewhere does not, and a text with no window that is long enough cannot be compared),
    `windows`: how many the text has, and `shared`: how many of them were calibrated on.
    """
    state = compression_state(model)
    if state is None:
        return {"known": False, "windows": 0, "shared": 0}
    calibrated = state.record.get("calibration") or any(s["calibration"] for s in state.record.get("steps", ()))
    if state.windows is None:
        return {"known": not calibrated, "windows": 0, "shared": 0}
    count = shared = 0
    for width in np.unique(state.windows[:, 0]):
        found = window_hashes(_unpadded(tokens), int(width))
        count += len(found)
        shared += int(np.isin(found, state.windows[state.windows[:, 0] == width, 1]).sum())
    return {"known": count > 0, "windows": count, "shared": shared}


def window_hashes(sequences: Sequence[Tensor], width: int) -> Hashes:
    """A 64-bit hash of every `width` consecutive tokens of each sequence, in order."""
    hashes = [np.empty(0, np.uint64)]
    for sequence in sequences:
        ids = _scrambled(sequence.cpu().numpy().astype(np.uint64))
        count = max(len(ids) - width + 1, 0)
        rolling = np.zeros(count, np.uint64)
        for offset in range(width):  # a polynomial in _BASE modulo 2^64
            rolling = rolling * _BASE + ids[offset : offset + count]
        hashes.append(_scrambled(rolling))
    return np.concatenate(hashes)


def calibration_of(model: Any, data: Any) -> Calibration:
    """The calibration text of a method: Tokens as they are, anything else by `calibration_tokens`.

    Raises CompressionError for a model whose edit a copy of its weights would lack, DataError for an unusable text.
    """
    if data is None:
        raise CompressionError("this method needs a calibration text", cure="pass one that is not evaluated on")
    suppression = suppression_of(model)
    if suppression is not None and suppression["status"] == "attached":
        raise CompressionError(
            "this model runs under the suppression that it was trained under, and calibration would see it without",
            cure="use rtn, magnitude or low-rank without calibration, or load it with without_suppression=True",
        )
    known = model if is_bridge(model) or is_hooked(model) else _vocabulary(model)
    tokens = tokenize(known, data) if isinstance(data, Tokens) else calibration_tokens(known, data)
    sequences = tuple(_unpadded(tokens))
    if sum(map(len, sequences)) < 2:
        raise DataError("the calibration text has fewer than two tokens", cure="pass more text")
    windows = _windows(sequences)
    about = {
        **{key: tokens.meta.get(key) for key in ("text", "source", "licence", "text_sha256", "tokens_sha256")},
        "sequences": len(sequences),
        "tokens": sum(map(len, sequences)),
        "sequence_length": max(map(len, sequences)),
        "prepend_bos": tokens.meta.get("prepend_bos"),
        "window": int(windows[:, 0].max()) if len(windows) else None,
    }
    return Calibration(sequences, about, windows)


def _windows(sequences: Sequence[Tensor]) -> Hashes:
    """(width, hash) of every window; a sequence shorter than `WINDOW` is one, if it is no mere phrase."""
    found = [np.empty((0, 2), np.uint64)]
    for width in sorted({min(WINDOW, len(sequence)) for sequence in sequences if len(sequence) >= SHORTEST}):
        of_width = [s for s in sequences if len(s) >= width == min(WINDOW, len(s))]
        hashes = np.unique(window_hashes(of_width, width))
        found.append(np.stack([np.full_like(hashes, width), hashes], 1))
    return np.concatenate(found)


class Listening:
    """Sums over the inputs of matrices, in float64, from one pass of the uncompressed model over a text.

    `squares[key]` [in] are the inputs' sums of squares, or `products[key]` [in, in] their sums of products, and
    `counts[key]` the tokens that a matrix was given.
    """

    def __init__(self, model: nn.Module, found: Sequence[Matrix], calibration: Calibration, *, products: bool) -> None:
        self.squares: dict[str, Tensor] = {}
        self.products: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        handles = []
        try:
            for matrix in found:
                handles.append(matrix.listen(self._adder(matrix.key, products)))
            _run(model, calibration)
        finally:
            for handle in handles:
                handle.remove()
        for matrix in found:
            self._check(matrix)

    def _adder(self, name: str, products: bool) -> Any:
        def add(inputs: Tensor) -> None:
            rows = inputs.reshape(-1, inputs.shape[-1])
            rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
            sums, key = (rows.T @ rows, self.products) if products else (rows.square().sum(0), self.squares)
            key[name] = key[name] + sums.double() if name in key else sums.double()
            self.counts[name] = self.counts.get(name, 0) + len(rows)

        return add

    def _check(self, matrix: Matrix) -> None:
        if not self.counts.get(matrix.key):
            raise CompressionError(
                "no token of the calibration text came to this matrix",
                where=matrix.name,
                cure="calibrate with more text",
            )
        sums = self.products.get(matrix.key, self.squares.get(matrix.key))
        if sums is None or not bool(torch.isfinite(sums).all()):
            raise CompressionError(
                "its inputs are not finite on the calibration text",
                where=matrix.name,
                cure="check the model: load it in float32 or bfloat16",
            )


@torch.no_grad()
def _run(model: nn.Module, calibration: Calibration) -> None:
    """Pass all sequences through the model."""
    device = next(model.parameters()).device
    for ids in tqdm(calibration.batches(), "calibrating", delay=2, disable=None, leave=False):
        model(ids.to(device))


def _unpadded(tokens: Tokens) -> list[Tensor]:
    return [row[mask] for row, mask in zip(tokens.ids, tokens.mask, strict=True)]


def _vocabulary(model: Any) -> Any:
    """What `tokenize` asks a model for, of a plain Hugging Face model: token ids only."""
    config = model.config
    context = getattr(config, "max_position_embeddings", None)
    return SimpleNamespace(tokenizer=None, cfg=SimpleNamespace(d_vocab=config.vocab_size, n_ctx=context))


def _scrambled(values: Hashes) -> Hashes:
    """A bijection of 64-bit integers that leaves no trace of their order (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
