"""What a training run is made of: the model's shape, and how it is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lens_geometry.errors import TrainingError
from lens_geometry.training.suppression import Suppression
from lens_geometry.training.windows import Packing

Norm = Literal["RMS", "LN"]


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped-query attention, rotary positions, a gated MLP and no biases but a LayerNorm's own.

    With RMSNorm it is Hugging Face's Llama, with LayerNorm its StableLM; nothing else differs.

    Attributes:
        n_layers: blocks.
        n_heads: query heads, each of width d_model / n_heads.
        n_key_value_heads: key and value heads, each shared by n_heads / n_key_value_heads query heads.
        d_model: width of the residual stream.
        d_mlp: width of the MLP's hidden layer.
        n_ctx: longest sequence, in tokens.
        d_vocab: size of the vocabulary.
        norm: "RMS" or "LN".
        activation: of the MLP's gate, "silu" or "gelu".
        eps: added to the norm's variance.
        rotary_base: of the rotary frequencies.
        tied: whether the unembedding is the embedding.
        initial_std: standard deviation of the initial weights; matrices that write to the stream have
            initial_std / sqrt(2 n_layers).
    """

    n_layers: int = 6
    n_heads: int = 6
    n_key_value_heads: int = 2
    d_model: int = 192
    d_mlp: int = 512
    n_ctx: int = 256
    d_vocab: int = 2048
    norm: Norm = "RMS"
    activation: Literal["silu", "gelu"] = "silu"
    eps: float = 1e-5
    rotary_base: float = 10_000.0
    tied: bool = True
    initial_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_heads", "n_key_value_heads", "d_model", "d_mlp", "n_ctx", "d_vocab"):
            _whole(self, name, 1)
        if self.norm not in ("RMS", "LN") or self.activation not in ("silu", "gelu"):
            raise TrainingError(
                f"there is no norm {self.norm!r} with activation {self.activation!r}",
                cure="norm is RMS or LN, activation silu or gelu",
            )
        if self.d_model % (2 * self.n_heads) or self.n_heads % self.n_key_value_heads:
            raise TrainingError(
                f"{self.n_heads} heads with {self.n_key_value_heads} key-value heads do not fit d_model {self.d_model}",
                cure="d_model has to be a multiple of twice n_heads, and n_heads one of n_key_value_heads",
            )
        for name in ("eps", "rotary_base", "initial_std"):
            _number(self, name, 0.0, open_below=True)

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    def words(self) -> str:
        """A name for a model of this shape."""
        norm = {"RMS": "RMSNorm", "LN": "LayerNorm"}[self.norm]
        return f"{self.n_layers} layers, d_model {self.d_model}, {norm}"


@dataclass(frozen=True)
class TrainingConfig:
    """One run of the trainer: `train(config)`.

    Attributes:
        tokens: directory that `prepare_tokens` (`lens-geometry tokens`) wrote.
        out: directory of the run: curve, checkpoints, result.
        shape: of the model; its d_vocab has to hold the tokens' vocabulary.
        packing: "documents" (a sequence never leaves its document) or "stream" (documents one after another, for
            short ones; what begins a document is not scored).
        suppression: what is done to the updates, in training and in evaluation alike.
        steps: optimiser steps.
        batch_size: sequences per optimiser step, over all processes and accumulated parts.
        accumulation: parts that a step's batch is cut into, one after another.
        lr: peak of the learning rate.
        final_lr: where the cosine ends; None is a tenth of the peak.
        warm_up: steps in which the rate rises from 0.
        weight_decay: of matrices; norms, biases and gates have none.
        betas: of AdamW.
        clip: largest norm of the gradient; 0 leaves it as it is.
        seed_weights: of the initial weights.
        seed_batches: of the order of the sequences, and of a control's noise.
        backend: "hooked" (HookedTransformer, TransformerLens 3), "bridge" (Hugging Face's class behind a
            TransformerBridge), or "auto": hooked where there is one.
        autocast: compute in bfloat16: "auto" where the GPU has it, "on" (on a CPU too), or "off".
        device: such as cpu, cuda, mps; None chooses.
        evaluate_every: steps between evaluations on held-out documents; also before the first step and at the end.
        evaluation_sequences: held-out sequences per evaluation, evenly spread; None is all.
        evaluation_batch: sequences per forward pass there.
        checkpoint_every: steps between checkpoints; there is always one at the end.
        keep: checkpoints kept, the newest ones.
        gradient_checkpointing: compute each block again in the backward pass, for memory.
        sharding: with several processes, "data_parallel", "fsdp", or "auto" (FSDP where `accelerate launch --use_fsdp`
            asks for it).
        progress: show a progress bar.
    """

    tokens: str
    out: str
    shape: Shape = field(default_factory=Shape)
    packing: Packing = "documents"
    suppression: Suppression = field(default_factory=Suppression)
    steps: int = 1000
    batch_size: int = 16
    accumulation: int = 1
    lr: float = 2e-3
    final_lr: float | None = None
    warm_up: int = 100
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed_weights: int = 0
    seed_batches: int = 0
    backend: Literal["auto", "hooked", "bridge"] = "auto"
    autocast: Literal["auto", "on", "off"] = "auto"
    device: str | None = None
    evaluate_every: int = 100
    evaluation_sequences: int | None = 64
    evaluation_batch: int = 16
    checkpoint_every: int = 200
    keep: int = 2
    gradient_checkpointing: bool = False
    sharding: Literal["auto", "data_parallel", "fsdp"] = "auto"
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation", "evaluate_every", "evaluation_batch", "checkpoint_every"):
            _whole(self, name, 1)
        for name in ("warm_up", "seed_weights", "seed_batches"):
            _whole(self, name, 0)
        _whole(self, "keep", 1)
        if self.evaluation_sequences is not None:
            _whole(self, "evaluation_sequences", 1)
        for name in ("lr", "weight_decay", "clip"):
            _number(self, name, 0.0, open_below=name == "lr")
        if self.final_lr is not None:
            _number(self, "final_lr", 0.0)
        if self.warm_up >= self.steps:
            raise TrainingError(
                f"a warm-up of {self.warm_up} steps is not over in {self.steps}, and the rate never comes down",
                cure=f"a warm_up of {self.steps // 10}, say, or more steps",
            )
        if self.batch_size % self.accumulation:
            raise TrainingError(
                f"a batch of {self.batch_size} cannot be cut into {self.accumulation} equal parts",
                cure="choose a batch_size that is a multiple of accumulation",
            )
        for name, among in (
            ("backend", ("auto", "hooked", "bridge")),
            ("sharding", ("auto", "data_parallel", "fsdp")),
            ("autocast", ("auto", "on", "off")),
        ):
            if getattr(self, name) not in among:
                raise TrainingError(f"unknown {name} {getattr(self, name)!r}", cure=f"choose one of {', '.join(among)}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise TrainingError(f"betas are {self.betas!r}", cure="give two numbers in [0, 1)")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, for a checkpoint."""
        return {**asdict(self), "suppression": self.suppression.as_dict(), "betas": list(self.betas)}

    @property
    def lr_at_end(self) -> float:
        return self.lr / 10 if self.final_lr is None else self.final_lr


MAY_CHANGE = (
    *("tokens", "out", "progress", "keep", "checkpoint_every"),
    *("accumulation", "device", "gradient_checkpointing", "sharding"),
)
"""What may differ when a run goes on: it changes no number, or (the second line, and how many processes) rounding.

The tokens may be in another place; that they are the same is seen by their hash.
"""


def _whole(settings: Any, name: str, least: int) -> None:
    value = getattr(settings, name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise TrainingError(f"{name} is {value!r}", cure=f"give a whole number of {least} or more")


def _number(settings: Any, name: str, least: float, *, open_below: bool = False) -> None:
    value = getattr(settings, name)
    good = isinstance(value, int | float) and not isinstance(value, bool) and least <= value < float("inf")
    if not good or (open_below and value == least):
        raise TrainingError(f"{name} is {value!r}", cure=f"give a number {'above' if open_below else 'of'} {least}")
