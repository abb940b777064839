"""What a training run costs, by arithmetic: parameters, FLOPs, memory, hours, bytes on disk. Nothing here is measured.

Per token, N the weights that tokens are multiplied with (all but norms; a tied embedding counts once, as the
unembedding), forward and backward:

    FLOPs = 6 N + 12 n_layers n_ctx d_model

Two for a multiply-add, three passes' worth (forward, and backward for activations and for weights); the second term is
attention's scores and sums over the *whole* n_ctx x n_ctx map, which is what attention that shows its pattern computes.
Gradient checkpointing runs the blocks' forward once more: a third of their part on top.

Memory of one device, P all parameters:

    weights 4 P, gradients 4 P, AdamW's two averages 8 P bytes (float32; data parallel: on every device; FSDP: an equal
    share each), and under FSDP the weights that are gathered while they are used: embeddings and two blocks
    activations that autograd keeps, per token in bfloat16: n_layers (34 d_model + 8 d_mlp + 7 n_heads n_ctx) for the
    blocks, 10 d_vocab for logits and loss, and bfloat16 copies of the weights, 2 N bytes; with checkpointing
    4 n_layers d_model for the blocks' inputs, and one block's activations and copies

The activations' numbers are an estimate for attention that shows its pattern; libraries' own needs (a gigabyte or two)
and fragmentation come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from lens_geometry.errors import TrainingError
from lens_geometry.results import Result
from lens_geometry.training.config import Shape
from lens_geometry.training.presets import PRESETS, Preset, find_preset

Sharding = Literal["data_parallel", "fsdp"]
GIB = 2**30
PEAK_FLOPS = {"a100": 312e12, "h100": 989e12}
"""Dense bfloat16 FLOPs per second that the makers state for the SXM modules."""


@dataclass(frozen=True)
class CostSettings:
    """What the cost table is computed for.

    Attributes:
        preset: which presets; all when none is named.
        devices: GPUs.
        utilisation: share of the peak FLOPs that is reached, recomputation included. 0.3 is a guess for plain PyTorch
            with attention that shows its pattern.
        sequences: sequences in one forward pass on one device.
    """

    preset: tuple[str, ...] = ()
    devices: int = 8
    utilisation: float = 0.3
    sequences: int = 1

    def __post_init__(self) -> None:
        for name in self.preset:
            find_preset(name)
        if not 0 < self.utilisation <= 1:
            raise TrainingError(f"utilisation is {self.utilisation!r}", cure="give a share of the peak in (0, 1]")
        for name in ("devices", "sequences"):
            if getattr(self, name) < 1:
                raise TrainingError(f"{name} is {getattr(self, name)!r}", cure="give a whole number of 1 or more")


@dataclass(frozen=True)
class Parameters:
    """How many parameters a shape has: the embedding (both, if they are not tied), the blocks' matrices, the norms."""

    embedding: int
    block_matrices: int
    norms: int
    multiplied: int

    @property
    def total(self) -> int:
        return self.embedding + self.block_matrices + self.norms

    @property
    def other(self) -> int:
        """All but the embedding."""
        return self.block_matrices + self.norms


def count_parameters(shape: Shape) -> Parameters:
    """The parameters of a shape; `multiplied` are those that every token is multiplied with, N of the formula.

    >>> count_parameters(PRESETS["1.4B"].shape).total
    1156941824
    """
    embedding = shape.d_vocab * shape.d_model
    keys = shape.n_key_value_heads * shape.d_head
    block = 2 * shape.d_model * (shape.d_model + keys) + 3 * shape.d_model * shape.d_mlp
    norm = shape.d_model * (1 if shape.norm == "RMS" else 2)
    return Parameters(
        embedding=embedding * (1 if shape.tied else 2),
        block_matrices=shape.n_layers * block,
        norms=(2 * shape.n_layers + 1) * norm,
        multiplied=shape.n_layers * block + embedding,
    )


def flops_per_token(shape: Shape, *, checkpointing: bool = False) -> int:
    """Floating-point operations per trained token in a sequence of n_ctx, forward and backward."""
    blocks = 2 * count_parameters(shape).block_matrices + 4 * shape.n_layers * shape.n_ctx * shape.d_model
    unembedding = 2 * shape.d_vocab * shape.d_model
    return (4 if checkpointing else 3) * blocks + 3 * unembedding


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    weights: int
    gradients: int
    optimiser: int
    gathered: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimiser + self.gathered + self.activations


def memory(shape: Shape, sharding: Sharding, *, devices: int, sequences: int, checkpointing: bool) -> Memory:
    """Memory of one of `devices` in float32 with bfloat16 autocast, `sequences` of n_ctx tokens at a time."""
    parameters = count_parameters(shape)
    share = devices if sharding == "fsdp" else 1
    own = -(-parameters.total // share)
    block = parameters.block_matrices // shape.n_layers
    return Memory(
        weights=4 * own,
        gradients=4 * own,
        optimiser=8 * own,
        gathered=4 * (parameters.embedding + 2 * block) if share > 1 else 0,
        activations=kept_activations(shape, sequences * shape.n_ctx, checkpointing=checkpointing),
    )


def kept_activations(shape: Shape, tokens: int, *, checkpointing: bool) -> int:
    """Bytes that autograd keeps for one forward pass over so many tokens (an estimate, bfloat16 autocast)."""
    parameters, layers = count_parameters(shape), shape.n_layers
    copies = 2 * parameters.block_matrices // layers
    block = tokens * (34 * shape.d_model + 8 * shape.d_mlp + 7 * shape.n_heads * shape.n_ctx) + copies
    unembedding = 10 * tokens * shape.d_vocab + 2 * shape.d_vocab * shape.d_model
    return unembedding + (block + 4 * tokens * layers * shape.d_model if checkpointing else layers * block)


def cost_table(settings: CostSettings) -> pd.DataFrame:
    """A row for each preset, way of sharing work, and with or without gradient checkpointing."""
    chosen = [find_preset(name) for name in settings.preset or tuple(PRESETS)]
    shardings: Sequence[Sharding] = ("data_parallel", "fsdp") if settings.devices > 1 else ("data_parallel",)
    return pd.DataFrame(
        [
            _row(preset, sharding, checkpointing, settings)
            for preset in chosen
            for sharding in shardings
            for checkpointing in (False, True)
        ]
    )


def _row(preset: Preset, sharding: Sharding, checkpointing: bool, settings: CostSettings) -> dict[str, object]:
    shape, recipe, devices = preset.shape, preset.recipe, settings.devices
    parameters = count_parameters(shape)
    needed = memory(shape, sharding, devices=devices, sequences=settings.sequences, checkpointing=checkpointing)
    flops = recipe.tokens * flops_per_token(shape, checkpointing=checkpointing)
    return {
        "preset": preset.name,
        "shape_published": preset.published,
        "parameters": parameters.total,
        "embedding": parameters.embedding,
        "other": parameters.other,
        "flops_per_token": flops_per_token(shape),
        "tokens": recipe.tokens,
        "total_flops": float(recipe.tokens * flops_per_token(shape)),
        "token_file_gb": recipe.tokens * token_bytes(shape) / 1e9,
        "sharding": sharding,
        "checkpointing": checkpointing,
        **{f"{what}_gib": getattr(needed, what) / GIB for what in (*Memory.__dataclass_fields__, "total")},
        **{
            f"hours_{device}": flops / (peak * devices * settings.utilisation) / 3600
            for device, peak in PEAK_FLOPS.items()
        },
    }


def token_bytes(shape: Shape) -> int:
    """Bytes of one token on disk: two while every id fits into them."""
    return 2 if shape.d_vocab <= 2**16 else 4


def cost(settings: CostSettings) -> Result:
    """The cost table as a Result; its meta says that it is computed, and from what."""
    about = dict(devices=settings.devices, utilisation=settings.utilisation, sequences=settings.sequences)
    return Result("cost", cost_table(settings), {"computed": True, "peak_flops": PEAK_FLOPS, "settings": about})


def cost_summary(result: Result) -> str:
    """Two short tables: what a preset is and takes, and what it needs on each device."""
    table, given = result.table, result.meta["settings"]
    once = table[(table["sharding"] == "data_parallel") & ~table["checkpointing"]]
    sizes = pd.DataFrame(
        {
            "preset": once["preset"],
            "parameters": once["parameters"].map("{:,}".format),
            "embedding": once["embedding"].map("{:,}".format),
            "other": once["other"].map("{:,}".format),
            "GFLOPs/token": (once["flops_per_token"] / 1e9).map("{:.2f}".format),
            "tokens": (once["tokens"] / 1e9).map("{:.1f}e9".format),
            "FLOPs": once["total_flops"].map("{:.2e}".format),
            "hours A100": once["hours_a100"].map("{:,.0f}".format),
            "hours H100": once["hours_h100"].map("{:,.0f}".format),
            "token file": once["token_file_gb"].map("{:.0f} GB".format),
        }
    )
    columns = [name for name in table if name.endswith("_gib")]
    needs = table[["preset", "sharding", "checkpointing", *columns]].rename(columns=lambda name: name.split("_gib")[0])
    return "\n".join(
        [
            f"computed, not measured: {given['devices']} GPUs at {given['utilisation']:.0%} of their bfloat16 peak",
            sizes.to_string(index=False),
            "",
            f"GiB on each GPU, {given['sequences']} sequence(s) at a time, float32 with bfloat16 autocast "
            "(activations: an estimate)",
            needs.replace({True: "yes", False: "no"}).to_string(index=False, float_format="{:.1f}".format),
        ]
    )
