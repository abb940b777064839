"""Sequences that are not text as it was written: shuffled tokens, and random tokens that are said twice.

Every sequence has its own generator, made from the seed and from where the sequence was cut. So what it holds depends
neither on the other sequences, nor on how many are taken, nor on how they are batched.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from lens_geometry.errors import DataError

Arrangement = Literal["natural", "shuffled", "repeated-random"]
NATURAL: Final = "natural"
SHUFFLED: Final = "shuffled"
REPEATED: Final = "repeated-random"
ARRANGEMENTS = {
    NATURAL: "as written",
    SHUFFLED: "shuffled within sequences",
    REPEATED: "random tokens, repeated once",
}  # in the words of the provenance
REPEATED_SEQUENCES = 64  # that are drawn where none says how many: random tokens never run out


def shuffled(ids: list[int], *, seed: int, document: int, start: int) -> list[int]:
    """The tokens of one sequence in random order: those of `document` from its token `start` on."""
    order = np.random.default_rng((seed, 2, document, start)).permutation(len(ids))
    return [ids[place] for place in order]


def repeated_random(
    drawable: NDArray[np.int64], *, sequences: int, half: int, seed: int
) -> NDArray[np.int64]:  # [sequence, 2 * half]
    """Sequences [r, r]: r is `half` tokens, each drawn from `drawable` with equal chances."""
    drawn = [np.random.default_rng((seed, 3, number)).integers(len(drawable), size=half) for number in range(sequences)]
    return np.tile(drawable[np.stack(drawn)], 2)


def drawable_ids(model: Any) -> NDArray[np.int64]:
    """The token ids that random tokens are drawn from, in ascending order.

    With a tokenizer: the ids that it has and the model takes, without special tokens. Those are more than
    `all_special_ids`, which leaves out markers that have no role of their own, such as the file separators of code
    models. Without a tokenizer every id of the model's vocabulary.

    Raises DataError when fewer than two are left.
    """
    tokenizer, d_vocab = getattr(model, "tokenizer", None), model.cfg.d_vocab
    if tokenizer is None:
        return np.arange(d_vocab)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
    ids = sorted(number for number in {*tokenizer.get_vocab().values()} - special if 0 <= number < d_vocab)
    if len(ids) < 2:
        problem = f"of the vocabulary of {d_vocab} the tokenizer leaves {len(ids)} ids that are not special"
        raise DataError(problem, where=REPEATED, cure="use the tokenizer that belongs to this model")
    return np.array(ids, dtype=np.int64)
