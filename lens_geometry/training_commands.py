"""The commands of the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lens_geometry import summaries
from lens_geometry.training.comparison import Clock, compare_arms
from lens_geometry.training.config import TrainingConfig
from lens_geometry.training.data import prepare_tokens
from lens_geometry.training.presets import with_preset
from lens_geometry.training.processes import first_in_turn, join
from lens_geometry.training.trainer import train

PROSE = ("austen", "moby-dick")
CONFIG = TrainingConfig(tokens="", out="results/train")


def train_command(
    arms: tuple[str, ...] = (),
    seeds: int = 1,
    first_seed: int = 0,
    clock: Clock = "seconds",
    text: tuple[str, ...] = PROSE,
    preset: str | None = None,
    config: TrainingConfig = CONFIG,
) -> int:
    """Train a small model, with or without suppression; with --arms, several from the same weights and batches.

    Stopped at any point, the same command goes on where it was. Several processes:
    accelerate launch --num_processes 8 -m lens_geometry.cli train ...
    Example: lens-geometry train --arms baseline attn value gate --seeds 3 --steps 500 --out results/ablation

    Args:
        arms: baseline, attn, value, value_excl_self, mlp, gate, gate_attn, diagonal, norm_matched, norm_matched_attn;
            with a scale such as value:0.5. Without any, one run as --site and its like say.
        seeds: with --arms, how many; each of the weights and of the batches.
        first_seed: the first of them.
        clock: what counts as equal time: seconds, or cpu_seconds on a machine that does other work too.
        text: what is tokenised, into OUT/tokens, where no --tokens are given.
        preset: 296M, 436M, 528M, 1.4B or 2.7B: that shape and the published recipe (`lens-geometry cost` says what it
            takes); settings beside it that are not their defaults hold.
        config: the model and how it is trained.
    """
    if preset is not None:
        config = with_preset(preset, config, CONFIG)
    team, out = join(config.sharding, config.device), Path(config.out)
    if not config.tokens:
        prepared = out / "tokens"
        with first_in_turn(team):
            prepare_tokens(text, prepared, d_vocab=config.shape.d_vocab, progress=config.progress and team.first)
        config = replace(config, tokens=str(prepared))
    if arms:
        result = compare_arms(config, arms, seeds=seeds, first_seed=first_seed, clock=clock)
        if team.first:
            print(summaries.training_summary(result.table))
            print(f"saved: {result.save(out)}")
        return 0
    result = train(config)
    if team.first:
        final = result.meta["held_out_loss"]
        print(f"held-out loss {final:.4f} nats per token after {config.steps:,} steps")
        print(f"the model: {result.meta['checkpoint']} (lens-geometry profile --model takes it)")
    return 0
