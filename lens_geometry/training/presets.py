"""The published shapes and recipe by name: `PRESETS["1.4B"]`.

The published recipe: AdamW (0.9, 0.95) with weight decay 0.1, clipping at 1, 2,000 steps of warm-up, a cosine to a
tenth of the peak, bfloat16, 200,000 steps of 256 sequences of 2,048 tokens. Where this house departs from it, and
where it had to choose:

- **MLP.** Published: GELU, ungated, four times as wide as the stream. Here: a gated MLP with GELU of width 8/3 d_model
  (to the nearest multiple of 64), which has as many parameters, so that a model is a Llama (or, with LayerNorm, a
  StableLM) to every other library.
- **Small shapes.** For 296M, 436M and 528M only the sizes are published. The shapes are ours: heads of width 64, four
  query heads to a key-value head as in the large ones, and as many layers as bring the count within 1.2 % of the name.
  Their peak learning rate is ours too.
- **Vocabulary.** 50,304 for all: GPT-2's 50,257 tokens up to a multiple of 128.
- **Names.** With so few key-value heads the two named shapes have fewer parameters than their names say: 1.16 and
  2.34 billion. The names fit the same widths with full attention. The shapes are kept, not the names.
- **Heads of 2.7B.** 32 of width 80, as the table says; the published code has 20 (and 5 key-value heads) of width
  128: the same number of parameters and FLOPs, `--preset 2.7B --d-model 2560 --n-heads 20 --n-key-value-heads 5`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from lens_geometry.errors import TrainingError
from lens_geometry.training.config import Shape, TrainingConfig

D_VOCAB = 50_304
N_CTX = 2_048


@dataclass(frozen=True)
class Recipe:
    """How a preset is trained. Rates are per step; the final one is a tenth of the peak.

    Attributes:
        lr: peak of the learning rate.
        batch_tokens: tokens per optimiser step, over all processes.
        steps, warm_up: optimiser steps, and those in which the rate rises.
        weight_decay: of matrices.
        clip: largest norm of the gradient.
        betas: of AdamW.
    """

    lr: float
    batch_tokens: int = 256 * N_CTX
    steps: int = 200_000
    warm_up: int = 2_000
    weight_decay: float = 0.1
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.batch_tokens * self.steps


@dataclass(frozen=True)
class Preset:
    """A shape and its recipe; `published` says whether the shape is the authors' (all but the MLP) or ours."""

    name: str
    shape: Shape
    recipe: Recipe
    published: bool


def gated_width(d_model: int) -> int:
    """The width at which a gated MLP has as many parameters as an ungated one four times as wide as the stream."""
    return 64 * round(8 * d_model / 3 / 64)


def _preset(name: str, layers: int, heads: int, d_model: int, lr: float, *, published: bool) -> Preset:
    shape = Shape(
        n_layers=layers,
        n_heads=heads,
        n_key_value_heads=heads // 4,
        d_model=d_model,
        d_mlp=gated_width(d_model),
        n_ctx=N_CTX,
        d_vocab=D_VOCAB,
        activation="gelu",
    )
    return Preset(name, shape, Recipe(lr), published)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            _preset("296M", 22, 16, 1024, 6e-4, published=False),
            _preset("436M", 22, 20, 1280, 6e-4, published=False),
            _preset("528M", 27, 20, 1280, 6e-4, published=False),
            _preset("1.4B", 24, 16, 2048, 4e-4, published=True),
            _preset("2.7B", 32, 32, 2560, 3e-4, published=True),
        )
    }
)


def find_preset(name: str) -> Preset:
    """The preset of that name. Raises TrainingError, with the names there are."""
    if name not in PRESETS:
        raise TrainingError(f"there is no preset {name!r}", cure=f"choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def with_preset(name: str, given: TrainingConfig, default: TrainingConfig) -> TrainingConfig:
    """A preset's run with what `given` sets otherwise than `default`, in the shape too: what was asked for holds."""
    changes, shape = differing(given, default), differing(given.shape, default.shape)
    changes |= {"tokens": given.tokens, "out": given.out, "shape": replace(find_preset(name).shape, **shape)}
    return preset_config(name, **changes)


def differing(given: Any, default: Any) -> dict[str, Any]:
    """The fields of a settings dataclass that are not the default's."""
    pairs = {field.name: (getattr(given, field.name), getattr(default, field.name)) for field in fields(given)}
    return {name: own for name, (own, other) in pairs.items() if own != other}


def preset_config(name: str, *, tokens: str, out: str, **changes: Any) -> TrainingConfig:
    """A preset as a run of the trainer, in bfloat16, on the running stream (documents of the web are mostly shorter).

    `changes` are settings of `TrainingConfig` that differ.

    A step's 256 sequences are cut into 32 parts unless `accumulation` says otherwise: 8 sequences at a time on one
    device, one on each of eight.

    >>> preset_config("1.4B", tokens="fineweb", out="runs/1.4B").warm_up
    2000
    """
    preset = find_preset(name)
    recipe = preset.recipe
    settings: dict[str, Any] = dict(
        shape=preset.shape,
        steps=recipe.steps,
        batch_size=recipe.batch_tokens // preset.shape.n_ctx,
        accumulation=32,
        lr=recipe.lr,
        warm_up=recipe.warm_up,
        weight_decay=recipe.weight_decay,
        betas=recipe.betas,
        clip=recipe.clip,
        packing="stream",
        autocast="on",
        evaluate_every=1000,
        checkpoint_every=1000,
    )
    return TrainingConfig(tokens=tokens, out=out, **{**settings, **changes})
