"""A compression as one line of text: "rtn:bits=4,group_size=64", for command lines, tables and file names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from lens_geometry.compress.depth import blank_layers, drop_layers
from lens_geometry.compress.factors import low_rank
from lens_geometry.compress.library import awq, gptq, sparse_gpt
from lens_geometry.compress.pruning import magnitude, wanda
from lens_geometry.compress.rounding import round_to_nearest
from lens_geometry.errors import CompressionError


@dataclass(frozen=True)
class Method:
    """A method by its short name: what does it, its kind, and whether it needs (or may have) a calibration text."""

    run: Callable[..., Any]
    family: str
    calibrated: bool | None = False


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "rtn": Method(round_to_nearest, "quantisation"),
        "magnitude": Method(magnitude, "pruning"),
        "wanda": Method(wanda, "pruning", calibrated=True),
        "low-rank": Method(low_rank, "low rank", calibrated=None),
        "blank": Method(blank_layers, "depth"),
        "drop": Method(drop_layers, "depth"),
        "gptq": Method(gptq, "quantisation", calibrated=True),
        "awq": Method(awq, "quantisation", calibrated=True),
        "sparsegpt": Method(sparse_gpt, "pruning", calibrated=True),
    }
)


@dataclass(frozen=True)
class Variant:
    """A method and its settings.

    `label` is the text that `parse_variant` reads; `family` one of quantisation, pruning, low rank, depth.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return METHODS[self.method].family

    @property
    def label(self) -> str:
        said = ",".join(f"{name}={_written(value)}" for name, value in self.settings.items())
        return f"{self.method}:{said}" if said else self.method

    @property
    def calibrated(self) -> bool | None:
        """True: it needs a calibration text; None: it may have one; False: it has none."""
        return METHODS[self.method].calibrated


def parse_variant(text: str | Variant) -> Variant:
    """The variant that a line names.

    >>> parse_variant("rtn:bits=4,group_size=64").settings
    {'bits': 4, 'group_size': 64}
    >>> parse_variant("magnitude:pattern=2:4,layers=0-3").label
    'magnitude:pattern=2:4,layers=0-3'
    >>> parse_variant("rtn:bits=0=8+1=4").settings
    {'bits': {0: 8, 1: 4}}

    Lists are joined by "+": `layers=0+3`. Raises CompressionError for a method or a setting that does not exist.
    """
    if isinstance(text, Variant):
        return text
    method, _, said = text.strip().partition(":")
    if method not in METHODS:
        raise CompressionError(f"there is no method {method!r}", where=text, cure=f"one of {', '.join(METHODS)}")
    known = [name for name in inspect.signature(METHODS[method].run).parameters if name not in ("model", "calibration")]
    settings: dict[str, Any] = {}
    for part in filter(None, said.split(",")):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or name not in known or name in settings:
            raise CompressionError(
                f"{part!r} is no setting of {method}, or is given twice", where=text, cure=f"one of {', '.join(known)}"
            )
        settings[name] = _read(name, value.strip(), text)
    return Variant(method, settings)


def compress(model: Any, variant: str | Variant, calibration: Any = None) -> Any:
    """The model compressed as the line says: `compress(model, "rtn:bits=4,group_size=64")`.

    Args:
        model: a TransformerLens model, or a Hugging Face one; it stays as it is.
        variant: what `parse_variant` takes.
        calibration: text or tokens for the methods that need it; the others do without.

    Raises:
        CompressionError: a method that does not exist, one that needs a calibration text and has none, and as the
            method does.
    """
    chosen = parse_variant(variant)
    if chosen.calibrated and calibration is None:
        raise CompressionError(f"{chosen.method} needs a calibration text", cure="pass one that is not evaluated on")
    given = {} if chosen.calibrated is False or calibration is None else {"calibration": calibration}
    return METHODS[chosen.method].run(model, **given, **chosen.settings)


def _read(name: str, value: str, text: str) -> Any:
    """A value from its text: layers as text for `choose_layers`, numbers, switches, None, bits by layer."""
    if name == "layers":
        return value.replace("+", ",")
    if "=" in value:
        pairs = [pair.partition("=") for pair in value.split("+")]
        if all(layer.isdecimal() and bits.isdecimal() for layer, _, bits in pairs):
            return {int(layer): int(bits) for layer, _, bits in pairs}
        raise CompressionError(f"{value!r} does not say bits by layer", where=text, cure="such as bits=0=8+1=4")
    words: dict[str, Any] = {"none": None, "true": True, "false": False}
    if value.lower() in words:
        return words[value.lower()]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return "+".join(f"{key}={_written(item)}" for key, item in value.items())
    if isinstance(value, list | tuple | range):
        return "+".join(str(item) for item in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value).replace(",", "+")
