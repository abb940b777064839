"""The commands of the trainer, and of the tokens that it trains on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import tyro

from lens_geometry import summaries
from lens_geometry.errors import TrainingError
from lens_geometry.training.comparison import Clock, compare_arms
from lens_geometry.training.config import TrainingConfig
from lens_geometry.training.cost import CostSettings, cost, cost_summary
from lens_geometry.training.data import Packing, open_tokens, prepare_tokens
from lens_geometry.training.presets import with_preset
from lens_geometry.training.processes import first_in_turn, join
from lens_geometry.training.suppression import arm
from lens_geometry.training.trainer import train

PROSE = ("austen", "moby-dick")
COST = CostSettings()
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
        arms: baseline (always run), attn, value, value_excl_self, mlp, gate, gate_attn, diagonal, diagonal_shrinking,
            norm_matched, norm_matched_attn; with a scale such as value:0.5. Without any, one run as --site and its like
            say.
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
        batch = f"{config.batch_size} sequences in {config.accumulation} parts, {config.packing}"
        print(f"preset {preset}: {config.steps:,} steps of {batch}, lr {config.lr:g}, autocast {config.autocast}")
    if config.tokens and text != PROSE:
        raise TrainingError(
            "--text is what is tokenised where there are no --tokens, and both are given", cure="leave one of them out"
        )
    for name in arms:
        arm(name)  # better refused now than after the tokens are prepared
    if not arms and (seeds, first_seed) != (1, 0):
        raise TrainingError(
            "--seeds and --first-seed count runs of --arms, and none are named",
            cure="name arms (--arms baseline is one), or set --seed-weights and --seed-batches of one run",
        )
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


def tokens_command(
    texts: tyro.conf.Positional[tuple[str, ...]] = PROSE,
    out: Path = Path("results/tokens"),
    d_vocab: int | None = None,
    tokenizer: str | None = None,
    held_out: float = 0.05,
    seed: int = 0,
    max_documents: int | None = None,
    tokenizer_characters: int = 100_000_000,
    shard_tokens: int = 2**24,
    sequence_length: int = 256,
    packing: Packing = "documents",
    verify: bool = False,
    progress: bool = True,
) -> int:
    """Tokenise text into memory-mapped files to train on, with a held-out split by document.

    Stopped at any point, the same command goes on where it was, and ends with the same bytes. It uses every core
    (RAYON_NUM_THREADS sets how many).
    Example: lens-geometry tokens austen moby-dick --out tokens --d-vocab 2048

    Args:
        texts: "austen", "moby-dick", a .txt file, a directory of them; "openwebtext", "fineweb" or
            hf:PATH:CONFIG:SPLIT:COLUMN for Hugging Face data sets, read row by row.
        out: directory for the token files, the tokenizer and meta.json.
        d_vocab: size of the byte-level BPE trained on the training documents (2048 when left out); with --tokenizer,
            the most tokens that it may have.
        tokenizer: an existing tokenizer instead of a trained one: a directory or a name on the hub.
        held_out: share of the documents that are never trained on, chosen by a hash of their content.
        seed: of that split.
        max_documents: only the first so many documents of every text.
        tokenizer_characters: train the BPE on the first so many characters of the training documents.
        shard_tokens: tokens of a file, after which the next is begun.
        sequence_length: predictions per window, for the table that is printed; nothing on disk depends on it.
        packing: windows of single documents, or of the running stream; for the table too.
        verify: also check the hashes of all files.
        progress: show progress bars.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    files = prepare_tokens(
        texts,
        out,
        d_vocab=d_vocab,
        tokenizer=tokenizer,
        held_out=held_out,
        seed=seed,
        max_documents=max_documents,
        tokenizer_characters=tokenizer_characters,
        shard_tokens=shard_tokens,
        progress=progress,
    )
    if verify:
        open_tokens(out, verify=True)
    print(summaries.tokens_summary(files, sequence_length, packing))
    print(f"saved: {out}")
    return 0


def cost_command(settings: CostSettings = COST, out: Path | None = None) -> int:
    """What the training presets cost: parameters, FLOPs, memory, hours. Computed by arithmetic, not measured.

    Example: lens-geometry cost --preset 1.4B 2.7B --devices 8 --utilisation 0.3

    Args:
        settings: which presets, on how many devices.
        out: also save the table in this directory.
    """
    result = cost(settings)
    print(cost_summary(result))
    if out is not None:
        print(f"saved: {result.save(out)}")
    return 0
