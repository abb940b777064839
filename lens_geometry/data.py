"""Token ids: text cut into sequences of one length, with a mask and the provenance that a result records.

text = load_text("austen")                              # or a .txt path, hf:..., shuffled:austen (see text.py)
tokens = tokenize(model, text, sequence_length=256, max_sequences=32)
tokens.ids, tokens.mask, tokens.meta["tokens_sha256"]   # [sequence, pos], [sequence, pos], provenance
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm import tqdm

from lens_geometry.arrangements import (
    ARRANGEMENTS,
    NATURAL,
    REPEATED,
    REPEATED_SEQUENCES,
    SHUFFLED,
    drawable_ids,
    repeated_random,
    shuffled,
)
from lens_geometry.errors import DataError
from lens_geometry.text import BUNDLED, Text, is_text_name, load_text
from lens_geometry.token_checks import check_ids, check_mask, check_noise_ids, check_scored

__all__ = ["BUNDLED", "Text", "Tokens", "load_text", "tokenize"]

EVERY_TOKEN = "every token is scored"  # that is real and has one before it


@dataclass(frozen=True)
class Tokens:
    """Token ids of equally long sequences.

    `mask` is True for a real token (a prepended BOS is one) and False for right padding. Right padding needs
    no attention mask: in a causal model no real token attends to a later place. Everything is on the CPU.
    `meta["tokens_sha256"]` is over the ids as little-endian int64 in row order, padding included.
    `scored` is True for the tokens whose losses count and whose activations are profiled, among the real ones; None
    for all of them. `meta["scored"]` says which they are in words, and `meta["scored_sha256"]` is over their bytes.
    `noise_ids` says which sequence's noise each row gets, where rows share one (both sentences of a minimal pair); None
    gives every row its own.
    """

    ids: Int[Tensor, "sequence pos"]
    mask: Bool[Tensor, "sequence pos"]
    meta: dict[str, Any]
    scored: Bool[Tensor, "sequence pos"] | None = None
    noise_ids: tuple[int, ...] | None = None

    @property
    def counted(self) -> Bool[Tensor, "sequence pos"]:
        """The real tokens that are scored."""
        return self.mask if self.scored is None else self.mask & self.scored

    def take(self, rows: slice) -> Tokens:
        """Some of the sequences. The provenance stays that of all."""
        scored = None if self.scored is None else self.scored[rows]
        noise_ids = None if self.noise_ids is None else self.noise_ids[rows]
        return replace(self, ids=self.ids[rows], mask=self.mask[rows], scored=scored, noise_ids=noise_ids)


def tokenize(
    model: Any,
    data: Text | str | list[str] | Int[Tensor, "sequence pos"] | Tokens,
    *,
    sequence_length: int = 256,
    max_sequences: int | None = None,
    prepend_bos: bool = False,
    drop_short: bool = True,
    seed: int = 0,
) -> Tokens:
    """Cut text into sequences of `sequence_length` tokens for `model`.

    Each document is tokenised alone, without special tokens, and cut into consecutive pieces. A document
    shorter than one sequence is kept, padded on the right, from 2 tokens on.

    A "shuffled" text is cut the same way; then the tokens of each piece are put in random order, the BOS and padding
    staying where they are. "repeated-random" is half a sequence of random tokens, and the same again; only the second
    half is scored. Of it the first token cannot be known from what came before, as every later one can. An odd
    last place is left out.

    Args:
        model: any TransformerLens model; only its `tokenizer` and `cfg` are used.
        data: a Text, one string or a list of them (each a document), or token ids of shape [sequence, pos],
            which are taken as they are and hold no padding. Tokens come back unchanged once they are found to
            fit the model.
        sequence_length: tokens per sequence, the BOS included; ignored for token ids.
        max_sequences: take this many, evenly spaced over all, so that a small sample covers the text. Of
            "repeated-random", how many are drawn; None draws 64.
        prepend_bos: give every sequence the tokenizer's BOS in its first place.
        drop_short: leave out what remains of a document after its last whole sequence, instead of padding it.
        seed: of what is shuffled or drawn; each sequence has its own generator.

    Returns:
        Tokens; `meta` counts what was used and what was dropped.

    Raises:
        DataError: no tokenizer, fewer than 2 tokens, a sequence longer than the model's context, ids outside
            its vocabulary, masks that do not belong to the ids, or data that is none of the above.
    """
    if max_sequences is not None and max_sequences < 1:
        raise DataError(f"max_sequences is {max_sequences}", cure="pass 1 or more, or None for all")
    if isinstance(data, Tokens):
        check_ids(model, data.ids)
        check_mask(data.ids, data.mask)
        check_scored(data.ids, data.mask, data.scored)
        check_noise_ids(data.ids, data.noise_ids)
        return replace(data, meta=_meta_of_given(data))
    if isinstance(data, Tensor):
        if prepend_bos:
            raise DataError("token ids are taken as they are, without a BOS", cure="put the BOS into the ids yourself")
        return _from_ids(model, data, max_sequences)
    text = _as_text(data)
    if seed < 0:
        raise DataError(f"seed is {seed}", where=text.name, cure="pass 0 or more")
    context, least = getattr(model.cfg, "n_ctx", None), (4 if text.arrangement == REPEATED else 2) + prepend_bos
    if sequence_length < least:
        raise DataError(f"sequence_length is {sequence_length}", where=text.name, cure=f"pass at least {least}")
    if context and sequence_length > context:
        problem = f"sequence_length {sequence_length} is longer than the model's context of {context}"
        raise DataError(problem, where=text.name, cure=f"pass sequence_length={context} or less")
    bos, pad = special_ids(model, prepend_bos)
    if text.arrangement == REPEATED:
        return _repeated(model, text, sequence_length - prepend_bos, max_sequences, bos if prepend_bos else None, seed)

    documents = _token_lists(model, text)
    room = sequence_length - prepend_bos
    pieces = [
        (number, start, ids[start : start + room])
        for number, ids in enumerate(documents)
        for start in range(0, len(ids), room)
        if _is_kept(len(ids), start, room, drop_short)
    ]
    if not pieces:
        raise DataError("the text has fewer than two tokens", where=text.name, cure="pass more text")
    kept = [pieces[i] for i in evenly_spaced(len(pieces), max_sequences)]
    if text.arrangement == SHUFFLED:
        kept = [(at, start, shuffled(piece, seed=seed, document=at, start=start)) for at, start, piece in kept]

    width = max(len(piece) for *_, piece in kept) + prepend_bos
    ids = torch.full((len(kept), width), pad, dtype=torch.int64)
    mask = torch.zeros(len(kept), width, dtype=torch.bool)
    for row, (*_, piece) in enumerate(kept):
        whole = [bos, *piece] if prepend_bos else piece
        ids[row, : len(whole)] = torch.tensor(whole, dtype=torch.int64)
        mask[row, : len(whole)] = True
    check_ids(model, ids)
    about = {
        "text": text.name,
        "source": text.source,
        "licence": text.licence,
        "text_sha256": text.sha256,
        "max_characters": text.max_characters,
        "arrangement": ARRANGEMENTS[text.arrangement],
        "arrangement_seed": None if text.arrangement == NATURAL else seed,
        "documents": len(documents),
        "documents_used": len({number for number, *_ in kept}),
        "tokens_dropped": sum(map(len, documents)) - sum(len(piece) for *_, piece in pieces),
        "pad_token_id": pad,
    }
    return Tokens(ids, mask, tokens_meta(ids, mask, about, available=len(pieces), bos=bos if prepend_bos else None))


def _as_text(data: Any) -> Text:
    """A string or a list of strings as Text; a Text as it is."""
    if isinstance(data, Text):
        return data
    if isinstance(data, str):
        if is_text_name(data):
            raise DataError(f"{data!r} is the name of a text, not text", cure=f"pass load_text({data!r})")
        return Text("one string", (data,))
    if isinstance(data, Sequence) and all(isinstance(item, str) for item in data):
        return Text(f"{len(data)} strings", tuple(data))
    problem = f"data is a {type(data).__name__}"
    raise DataError(
        problem, cure="pass load_text(...), a string, a list of strings, or an integer tensor [sequence, pos]"
    )


def _token_lists(model: Any, text: Text) -> list[list[int]]:
    """Every document's ids, alone, whole, without special tokens."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        cure = "pass token ids, an integer tensor [sequence, pos], or load the model with its tokenizer"
        raise DataError("the model has no tokenizer", where=text.name, cure=cure)
    batches = [text.documents[i : i + 16] for i in range(0, len(text.documents), 16)]
    ids: list[list[int]] = []
    for batch in tqdm(batches, f"tokenising {text.name}", delay=2, disable=None, leave=False):
        # verbose=False: a document longer than the model's context is no mistake here, it gets cut
        ids += tokenizer(list(batch), add_special_tokens=False, truncation=False, padding=False, verbose=False)[
            "input_ids"
        ]
    return ids


def _is_kept(length: int, start: int, room: int, drop_short: bool) -> bool:
    """Whether the piece that begins at `start` of a document of `length` tokens becomes a sequence."""
    size = min(room, length - start)
    return size == room or (size >= 2 and (start == 0 or not drop_short))


def evenly_spaced(available: int, wanted: int | None) -> list[int]:
    """The middles of `wanted` equal stretches of `available` places; all of them when fewer are there."""
    if wanted is None or wanted >= available:
        return list(range(available))
    return [(2 * i + 1) * available // (2 * wanted) for i in range(wanted)]


def special_ids(model: Any, prepend_bos: bool) -> tuple[int, int]:
    """BOS (-1 when it is not asked for) and the id to pad with: the tokenizer's pad, its EOS, or 0."""
    tokenizer, d_vocab = getattr(model, "tokenizer", None), model.cfg.d_vocab
    bos = getattr(tokenizer, "bos_token_id", None)
    if prepend_bos and tokenizer is not None and bos is None:
        raise DataError("the tokenizer has no BOS token", cure="pass prepend_bos=False")
    candidates = [getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")]
    pad = next((token for token in candidates if token is not None and 0 <= token < d_vocab), 0)
    return (bos if prepend_bos and bos is not None else -1), pad


def _repeated(model: Any, text: Text, room: int, max_sequences: int | None, bos: int | None, seed: int) -> Tokens:
    """Random tokens and the same again, in `room` places (one less when that is odd) after the BOS, if there is one."""
    if bos == -1:
        raise DataError("without a tokenizer there is no BOS", where=text.name, cure="pass prepend_bos=False")
    drawable, half = drawable_ids(model), room // 2
    sequences = REPEATED_SEQUENCES if max_sequences is None else max_sequences
    ids = torch.from_numpy(repeated_random(drawable, sequences=sequences, half=half, seed=seed))
    if bos is not None:
        ids = torch.cat([torch.full((sequences, 1), bos), ids], 1)
    check_ids(model, ids)
    mask, scored = torch.ones_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    scored[:, -half:] = True
    about = {
        "text": text.name,
        "source": text.source,
        "licence": text.licence,
        "text_sha256": None,
        "max_characters": None,
        "arrangement": ARRANGEMENTS[text.arrangement],
        "arrangement_seed": seed,
        "ids_drawn_from": len(drawable),
        "repeat_length": half,
        "odd_place_left_out": bool(room % 2),
        "scored": "only the repeat is scored",
    }
    meta = tokens_meta(ids, mask, about, available=sequences, bos=bos, scored=scored)
    return Tokens(ids, mask, {**meta, "sequences_available": None, "sampling": "drawn at random"}, scored)


def _from_ids(model: Any, ids: Tensor, max_sequences: int | None) -> Tokens:
    """Token ids given by the caller, every one of them real."""
    check_ids(model, ids)
    chosen = ids.detach().to("cpu", torch.int64)[evenly_spaced(len(ids), max_sequences)]
    mask = torch.ones_like(chosen, dtype=torch.bool)
    about = {"text": "token ids", "source": "given by the caller", "licence": "unknown", "text_sha256": None}
    return Tokens(chosen, mask, tokens_meta(chosen, mask, about, available=len(ids), bos=None))


def _meta_of_given(tokens: Tokens) -> dict[str, Any]:
    """The provenance of tokens that come back, brought up to date with what their ids and masks are now."""
    meta = {**tokens.meta, **_counted(tokens.ids, tokens.mask, tokens.scored)}
    if meta["scored_sha256"] != tokens.meta.get("scored_sha256") or "scored" not in meta:
        whole = tokens.scored is None
        meta["scored"] = EVERY_TOKEN if whole else "only the tokens of a mask given by the caller are scored"
    return meta


def _counted(ids: Tensor, mask: Tensor, scored: Tensor | None) -> dict[str, Any]:
    """The part of the provenance that follows from ids and masks alone."""
    return {
        "tokens_sha256": hashlib.sha256(ids.cpu().numpy().astype(np.dtype("<i8")).tobytes()).hexdigest(),
        "n_sequences": len(ids),
        "n_tokens": int(mask.sum()),
        "sequence_length": ids.shape[1],
        "scored_sha256": None if scored is None else hashlib.sha256(scored.cpu().numpy().tobytes()).hexdigest(),
    }


def tokens_meta(
    ids: Tensor, mask: Tensor, about: dict[str, Any], *, available: int, bos: int | None, scored: Tensor | None = None
) -> dict[str, Any]:
    """The provenance of tokens: `about` their source, and what follows from ids and masks."""
    return {
        "scored": EVERY_TOKEN,
        **about,
        **_counted(ids, mask, scored),
        "sequences_available": available,
        "sampling": "all" if len(ids) == available else "evenly spaced",
        "prepend_bos": bos is not None,
        "bos_token_id": bos,
    }
