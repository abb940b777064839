"""Windows of tokens to train on, and which of them come in which batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lens_geometry.errors import DataError

if TYPE_CHECKING:
    from lens_geometry.training.token_files import TokenSet

Packing = Literal["documents", "stream"]
PACKINGS: dict[str, str] = {
    "documents": "a window never leaves its document; the rest of a document is padded on the right",
    "stream": "windows over the running stream; the first token of a document is not scored",
}


@dataclass(frozen=True, eq=False)
class Windows:
    """All windows of one side, `length` predictions each; made by `TokenSet.windows`.

    Neighbours share one token, the last target of one being the first input of the next, so every token but the first
    of a document is predicted once.

    Attributes:
        tokens: where the ids are.
        length: predictions per window; a window has one token more.
        packing: "documents" or "stream", see PACKINGS.
        least: a shorter rest, in predictions, is dropped.
        meta: counts of windows and of predictions that are scored, padded and dropped.
    """

    tokens: TokenSet
    length: int
    packing: Packing = "documents"
    least: int = 8
    meta: dict[str, Any] = field(init=False, repr=False)
    _stretches: np.ndarray = field(init=False, repr=False)  # where stretches begin, and where the last one ends
    _first: np.ndarray = field(init=False, repr=False)  # number of the first window of each stretch, and of all

    def __post_init__(self) -> None:
        if not isinstance(self.length, int) or self.length < 1:
            raise DataError(f"length is {self.length!r}", where="windows", cure="give a whole number of 1 or more")
        if not isinstance(self.least, int) or self.least < 1:
            raise DataError(f"least is {self.least!r}", where="windows", cure="give a whole number of 1 or more")
        if self.packing not in PACKINGS:
            cure = f"choose one of {', '.join(PACKINGS)}"
            raise DataError(f"there is no packing {self.packing!r}", where="windows", cure=cure)
        bounds = self.tokens.bounds
        stretches = bounds if self.packing == "documents" else bounds[[0, -1]]
        targets = np.diff(stretches) - 1
        rest = targets % self.length
        kept_rest = rest >= min(self.least, self.length)
        counts = targets // self.length + kept_rest
        object.__setattr__(self, "_stretches", stretches)
        object.__setattr__(self, "_first", np.concatenate([[0], np.cumsum(counts)]))
        if not len(self):
            problem = f"no document has {min(self.least, self.length) + 1} tokens"
            raise DataError(problem, where=self.tokens.name, cure="prepare more text, or pass a smaller `least`")
        dropped = int(rest[~kept_rest].sum())
        predictions = int(targets.sum()) - dropped
        unscored = 0 if self.packing == "documents" else self._boundaries(predictions)
        object.__setattr__(
            self,
            "meta",
            {
                "packing": f"{self.packing}: {PACKINGS[self.packing]}",
                "length": self.length,
                "windows": len(self),
                "scored": predictions - unscored,
                "boundaries_not_scored": unscored,
                "padded": len(self) * self.length - predictions,
                "least": self.least,
                "rests_dropped": int(((rest > 0) & ~kept_rest).sum()),
                "predictions_dropped": dropped,
                "documents_left_out": int((counts == 0).sum()) if self.packing == "documents" else 0,
            },
        )

    def __len__(self) -> int:
        return int(self._first[-1])

    def batch(
        self, numbers: Int[Tensor, " batch"] | Sequence[int]
    ) -> tuple[Int[Tensor, "batch length+1"], Bool[Tensor, "batch length"]]:
        """The ids of the windows of these numbers, and which of their targets (`ids[:, 1:]`) count.

        A target counts when it is a real token, or the end, of the document that the token before it belongs to.
        """
        wanted = np.asarray(numbers, dtype=np.int64)
        if wanted.ndim != 1 or (len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self)):
            problem = f"window numbers must be a list between 0 and {len(self) - 1}"
            raise DataError(problem, where=self.tokens.name, cure="take them from batch_numbers(len(windows), ...)")
        ids = np.full((len(wanted), self.length + 1), self.tokens.end, np.int64)
        scored = np.zeros((len(wanted), self.length), bool)
        stretch = np.searchsorted(self._first, wanted, side="right") - 1
        starts = self._stretches[stretch] + (wanted - self._first[stretch]) * self.length
        stops = np.minimum(starts + self.length + 1, self._stretches[stretch + 1])
        for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            ids[row, : stop - start] = self.tokens.between(start, stop)
            scored[row, : stop - start - 1] = True
            if self.packing == "stream":
                scored[row, self._document_starts(start + 1, stop) - start - 1] = False
        return torch.from_numpy(ids), torch.from_numpy(scored)

    def _document_starts(self, start: int, stop: int) -> np.ndarray:
        """Places from `start` to before `stop` where a document begins."""
        bounds = self.tokens.bounds
        low, high = np.searchsorted(bounds, [start, stop])
        return bounds[low:high]

    def _boundaries(self, predictions: int) -> int:
        """Of the first `predictions` targets of the stream, how many begin a document."""
        return len(self._document_starts(1, predictions + 1))


def batch_numbers(n_windows: int, seed: int, step: int, batch_size: int) -> Int[Tensor, " batch"]:
    """The numbers of the windows of batch `step`, a function of these four numbers alone.

    Each epoch is one random order of all windows; the batches run through epoch after epoch without a gap, so a batch
    may end one epoch and begin the next. The order is plain integer arithmetic, and so the same everywhere.
    """
    for name, value, low in (
        ("n_windows", n_windows, 1),
        ("seed", seed, 0),
        ("step", step, 0),
        ("batch", batch_size, 1),
    ):
        if not 0 <= low <= value < 2**63:
            raise DataError(f"{name} is {value!r}", where="batch_numbers", cure=f"give a whole number of {low} or more")
    places = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs, within = np.divmod(places, n_windows)
    numbers = np.empty(batch_size, np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        numbers[chosen] = _order(n_windows, seed, int(epoch))[within[chosen]]
    return torch.from_numpy(numbers)


@lru_cache(maxsize=4)
def _order(n_windows: int, seed: int, epoch: int) -> np.ndarray:
    """All window numbers in the random order of an epoch: sorted by a hash of seed, epoch and number."""
    key = _mixed(_mixed(np.array([seed], np.uint64)) ^ np.uint64(epoch))
    order = np.argsort(_mixed(key ^ np.arange(n_windows, dtype=np.uint64)), kind="stable")
    order.setflags(write=False)
    return order


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of 64-bit numbers that looks random."""
    with np.errstate(over="ignore"):
        mixed = numbers + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
