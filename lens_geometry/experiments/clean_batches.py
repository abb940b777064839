"""The clean activations of whichever batch is being run, for repairs under many conditions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

from lens_geometry.edits import keep_activations


class CleanBatches(Mapping[str, Tensor]):
    """A mapping of hook names to the clean activations of the batch that `take` was last called with.

    A batch costs one unedited pass of its own, in the batch's own shape, so that its numbers are those of the unedited
    run to the last bit. As many batches as `most_bytes` hold are kept and used again when they come again.
    """

    def __init__(self, model: Any, names: Sequence[str], *, most_bytes: float = 2e9) -> None:
        self.model, self.names, self.room = model, tuple(names), most_bytes
        self.kept: dict[tuple[tuple[int, ...], bytes], dict[str, Tensor]] = {}
        self.current: dict[str, Tensor] = {}

    def take(self, ids: Int[Tensor, "batch pos"]) -> None:
        """Make this batch the current one."""
        key = tuple(ids.shape), ids.cpu().numpy().tobytes()
        self.current = self.kept.get(key, {})
        if not self.current:
            self.current = keep_activations(self.model, ids, self.names)
            size = sum(act.numel() * act.element_size() for act in self.current.values())
            if size <= self.room:
                self.kept[key] = self.current
                self.room -= size

    def __getitem__(self, name: str) -> Tensor:
        return self.current[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.current)

    def __len__(self) -> int:
        return len(self.current)
