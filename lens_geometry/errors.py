"""One exception family. Every error says what is wrong, where, and what cures it."""

from __future__ import annotations


class LensGeometryError(Exception):
    """Base of every error this package raises on purpose.

    The message is one sentence of `problem`, the place in brackets when there is one, and a `cure`:

    >>> print(SiteError("attn_out is not what is added to the stream", where="blocks.3.hook_attn_out",
    ...                 cure="choose the site 'block'"))
    attn_out is not what is added to the stream [blocks.3.hook_attn_out]. Cure: choose the site 'block'.
    """

    def __init__(self, problem: str, *, where: str = "", cure: str = "") -> None:
        self.problem, self.where, self.cure = problem.rstrip("."), where, cure.rstrip(".")
        place = f" [{where}]" if where else ""
        remedy = f" Cure: {self.cure}{'' if self.cure.endswith('?') else '.'}" if cure else ""
        super().__init__(f"{self.problem}{place}.{remedy}")


class GeometryError(LensGeometryError):
    """Tensors that cannot be decomposed: shapes, dtypes, non-finite values."""


class DisplacementError(GeometryError):
    """A hidden state that no vector of its length (or direction) is as far away from as asked."""


class SiteError(LensGeometryError):
    """A site that this model, layer or head does not have, or where it is not what its name says."""


class HookError(LensGeometryError):
    """An edit whose hook does not exist, never fired, or changed nothing."""


class ModelError(LensGeometryError):
    """A model that cannot be found, fetched, loaded or used."""


class DataError(LensGeometryError):
    """Text, tokens or pairs that cannot be used."""


class CompressionError(LensGeometryError):
    """A compression that cannot be done to this model, or that would change nothing."""


class ResultError(LensGeometryError):
    """A result or a run's journal that cannot be written, read or resumed."""


class TrainingError(LensGeometryError):
    """A training run that cannot start, go on, or be trusted: settings, checkpoints, a loss that is not finite."""


class DivergedError(TrainingError):
    """A loss or gradient that is not finite, and the `step` at which that was seen."""

    def __init__(self, problem: str, *, step: int, where: str = "", cure: str = "") -> None:
        super().__init__(problem, where=where, cure=cure)
        self.step = step
