"""Which compressed variants a study compares: by text, as models, or made by a function; and a good spread of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lens_geometry import models
from lens_geometry.compress import METHODS, Variant, compress, parse_variant
from lens_geometry.compress.records import Step, Work
from lens_geometry.errors import DataError

PER_CHANNEL_AND_GROUP = tuple(
    f"rtn:bits={bits}{group}" for bits in (8, 6, 5, 4, 3, 2) for group in ("", ",group_size=64")
)
PRUNED = (
    *(f"magnitude:sparsity={sparsity}" for sparsity in (0.3, 0.5)),
    "magnitude:pattern=2:4",
    *(f"wanda:sparsity={sparsity}" for sparsity in (0.3, 0.5, 0.6)),
    "wanda:pattern=4:8",
    "wanda:pattern=2:4",
    "sparsegpt:sparsity=0.5",
    "sparsegpt:pattern=2:4",
)
REST = (
    "low-rank:share=0.75",
    "low-rank:share=0.5",
    "gptq:bits=4,group_size=64",
    "gptq:bits=3,group_size=64",
    "awq:bits=4,group_size=64",
)
GAINS = (0.9, 0.8, 1.1)


@dataclass(frozen=True)
class StudyVariant:
    """One variant: its label, its kind of compression, and how it is made of the dense model and a calibration text.

    `model` is the compressed model itself, where it was there before; `told` says that the label is all there is to
    know of how it is made.
    """

    label: str
    family: str
    make: Callable[[Any, Any], Any]
    calibrated: bool | None = False
    model: Any = None
    told: bool = False

    @property
    def directory(self) -> str:
        """A name for its directory."""
        return re.sub(r"[^\w.,=+-]+", "-", self.label).strip("-.")


def study_variants(variants: Any, n_layers: int) -> tuple[StudyVariant, ...]:
    """The variants that were asked for; `default_variants` for None.

    Each is a text ("rtn:bits=4,group_size=64"), a `compress.Variant`, or a label with a model, with a name that
    `load_model` takes, or with a function that makes the model of the dense one; in a sequence (pairs for those with a
    label) or as a mapping of labels. What stands before the label's colon is its kind where the label is no text of
    `compress`.

    Raises DataError for none, for what is none of these, and for two of one label or directory; CompressionError for a
    text that names no variant.
    """
    if variants is None:
        found = list(default_variants(n_layers))
    else:
        if isinstance(variants, str | Variant) or not isinstance(variants, Mapping | Sequence) or not variants:
            raise DataError(f"variants are {variants!r}", cure='give several, such as ["rtn:bits=4", "rtn:bits=3"]')
        found = [_variant(one) for one in (variants.items() if isinstance(variants, Mapping) else variants)]
    for name in ("label", "directory"):
        values = [getattr(one, name) for one in found]
        twice = next((value for value in values if values.count(value) > 1 or not value), None)
        if twice is not None:
            raise DataError(f"the {name} {twice!r} is that of two variants, or of none", cure="give each its own label")
    return tuple(found)


def default_variants(n_layers: int) -> tuple[StudyVariant, ...]:
    """About thirty variants of every method, from harmless to ruinous, with two kinds whose error is special.

    A blanked layer is the case where the errors' mean is small and the loss large; writing matrices times a factor
    ("gain") the one where the whole error is parallel: its perpendicular part is zero, up to rounding.
    """
    places = sorted({1, n_layers // 4, n_layers // 2, 3 * n_layers // 4, n_layers - 1} & {*range(n_layers)})
    texts = [*PER_CHANNEL_AND_GROUP, *PRUNED, *REST, *(f"blank:layers={layer}" for layer in places)]
    plain = [
        _variant((f"{text},calibrated=false", _uncalibrated(text))) for text in REST if text.startswith("low-rank")
    ]
    gains = [_variant((f"gain:factor={factor}", _scaling(factor))) for factor in GAINS]
    return (*(_variant(text) for text in texts if text.partition(":")[0] in METHODS), *plain, *gains)


def scaled_writers(model: Any, factor: float) -> Any:
    """A new model whose matrices that write to the stream, W_O and W_out, and their biases are times a factor.

    The update of attention and of the MLP is then too long or too short by that factor and turned nowhere, as far as
    that layer alone is concerned (not behind a norm that follows the branch, which undoes it).
    """
    work = Work(model)
    writing = [matrix for matrix in work.matrices() if matrix.role in ("o", "out")]
    work.change(lambda _, weight, stored: (weight * factor, stored), writing)
    with torch.no_grad():
        for matrix in writing:
            if matrix.bias is not None:
                matrix.bias.mul_(factor)
    return work.done(Step("gain", {"factor": factor}))


def _scaling(factor: float) -> Callable[[Any], Any]:
    return lambda model: scaled_writers(model, factor)


def _uncalibrated(text: str) -> Callable[[Any], Any]:
    return lambda model: compress(model, text)


def _variant(given: Any) -> StudyVariant:
    if isinstance(given, str | Variant):
        return _of_text(parse_variant(given))
    if not (isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], str)):
        raise DataError(
            f"{given!r} is no variant", cure="give a text such as rtn:bits=4, or a pair of a label and a model"
        )
    label, made = given
    method = label.partition(":")[0].strip()
    family = METHODS[method].family if method in METHODS else method
    if isinstance(made, torch.nn.Module):
        return StudyVariant(label, family, lambda *_: made, model=made)
    if isinstance(made, str):
        return StudyVariant(label, family, lambda *_: models.load_model(made))
    if callable(made):
        return StudyVariant(label, family, lambda base, _: made(base))
    raise DataError(
        f"the variant {label!r} is a {type(made).__name__}",
        cure="give a model, a name that load_model takes, or a function that makes a model of the dense one",
    )


def _of_text(variant: Variant) -> StudyVariant:
    return StudyVariant(
        variant.label,
        variant.family,
        lambda base, calibration: compress(base, variant, calibration),
        variant.calibrated,
        told=True,
    )
