"""The loop. One reads it from top to bottom: config, tokens, model, edit, optimiser, steps, result.

    lens-geometry tokens austen moby-dick --out tokens
    lens-geometry train --tokens tokens --out run --site value

or in Python

    from lens_geometry.training import TrainingConfig, arm, train
    result = train(TrainingConfig("tokens", "run", suppression=arm("value")))

A killed run goes on from its last checkpoint when the same command is given again, and its curve is the one that it
would have had. Started by `accelerate launch`, several processes share the work: see `processes`.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from lens_geometry.edits import applied
from lens_geometry.errors import DivergedError, TrainingError
from lens_geometry.models import describe
from lens_geometry.results import Result, alone, jsonable, replace_file, versions
from lens_geometry.runner import bar
from lens_geometry.suppressed import read_suppression
from lens_geometry.training import checkpoint as saved
from lens_geometry.training.config import TrainingConfig
from lens_geometry.training.data import TokenFiles, Windows, batch_numbers, open_tokens
from lens_geometry.training.model import build_model, is_matrix, open_model
from lens_geometry.training.processes import (
    Processes,
    average_gradients,
    check_parts,
    clip_gradients,
    exchanging,
    first_in_turn,
    join,
    own_rows,
    share,
    summed,
    whole_weights,
)
from lens_geometry.training.recomputation import recompute_blocks
from lens_geometry.training.suppression import Suppressor

EVALUATION_IDS = 2**40
"""Where the ids of held-out sequences begin: a control's noise is not that of any training step."""


def train(config: TrainingConfig) -> Result:
    """Train one model, or go on with it, and return its curve.

    The table has a row for every step and every evaluation: `step`, `tokens` seen before it (padding included),
    `seconds` and `cpu_seconds` of training until then, and `loss`, `lr`, `gradient_norm` and `batch` (a hash of the
    ids), or `held_out_loss`. Losses are means over scored tokens, in nats. The row of step 0 with `bare_held_out_loss`
    is the model without its edit, the same for every arm that starts from these weights.

    Raises:
        TrainingError: settings that do not fit, another run in the same directory, a checkpoint that cannot be written.
        DivergedError: a loss that is not finite, with the step, the batch's hash and the last good checkpoint.
        DataError: tokens that cannot be used.
        HookError: an edit that did nothing.
        ResultError: another process trains there, or the directory cannot be written.
    """
    team = join(config.sharding, config.device)
    with alone(Path(config.out), "training") if team.first else nullcontext():
        return _train(config, team)


def _train(config: TrainingConfig, team: Processes) -> Result:
    tokens = open_tokens(config.tokens)
    sides = (tokens.train, tokens.held_out)
    training, held_out = (side.windows(config.shape.n_ctx, packing=config.packing) for side in sides)
    check_fit(config, tokens, training)
    check_parts(config.batch_size, config.accumulation, team)
    run, device = Path(config.out), team.device or torch.device(default_device())
    with first_in_turn(team):
        last, sha = begin(run, config, tokens), tokens.meta["tokens_sha256"]
    state: dict[str, Any] = {"step": 0, "seconds": 0.0, "cpu_seconds": 0.0}
    if last is None:
        model = build_model(config.shape, config.seed_weights, backend=config.backend, device=device)
    else:
        state = {key: saved.read_state(last)[key] for key in state}
        model = open_model(last, config.backend, device=device)
    suppressor = Suppressor(model, config.suppression, seed=config.seed_batches)
    if config.gradient_checkpointing:
        recompute_blocks(model)
    shared = share(model, team)
    optimizer = make_optimizer(model, suppressor, config)
    if last is not None:
        edit = read_suppression(last)
        suppressor.load(edit.state() if edit else {})
        saved.load_optimizer(optimizer, last)
    with first_in_turn(team):
        curve = saved.Curve(run / saved.CURVE, state["step"], write=team.first)
    if not curve.lines:
        curve.add({"step": 0, "tokens": 0, "bare_held_out_loss": evaluate(model, suppressor, held_out, config)[0]})

    model.train()
    start = state["step"]
    runs = start < config.steps or not curve.evaluated(start)
    edited = applied(model, suppressor.hooks) if suppressor.hooks and runs else nullcontext()
    versions_now = versions()
    with edited, bar(config.steps, f"training {run.name}", config.progress and team.first) as progress:
        progress.update(start)
        for step in range(start, config.steps + 1):
            suppressor.at_step(step)
            state["step"] = step
            so_far = {**state, "tokens": step * config.batch_size * config.shape.n_ctx}
            if (step % config.evaluate_every == 0 or step == config.steps) and not curve.evaluated(step):
                loss, per_sequence = evaluate(model, suppressor, held_out, config)
                if not math.isfinite(loss):
                    raise not_finite(step, f"held-out loss is {loss}", "held-out documents", run)
                curve.add({**so_far, "held_out_loss": loss, "per_sequence": per_sequence})
                progress.set_postfix(held_out=f"{loss:.4f}")
            whole = {**state, "config": config.as_dict(), "tokens_sha256": sha, "versions": versions_now}
            if step == config.steps:
                if step > start:
                    keep_checkpoint(run, whole, model, suppressor, optimizer, curve, config, tokens, team)
                break

            began, cpu_began = time.perf_counter(), time.process_time()
            ids, scored = training.batch(batch_numbers(len(training), config.seed_batches, step, config.batch_size))
            lr = learning_rate(step, config)
            loss = backward(shared, suppressor, ids, scored, config, step, team)
            norm = clip_gradients([each for group in optimizer.param_groups for each in group["params"]], config.clip)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise not_finite(step, f"loss is {loss} and the gradient's norm {norm}", f"batch {hash_of(ids)}", run)
            state["seconds"] += time.perf_counter() - began
            state["cpu_seconds"] += time.process_time() - cpu_began
            if step > start and step % config.checkpoint_every == 0:  # the loss above says that these weights are good
                keep_checkpoint(run, whole, model, suppressor, optimizer, curve, config, tokens, team)
            began, cpu_began = time.perf_counter(), time.process_time()
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            state["seconds"] += time.perf_counter() - began
            state["cpu_seconds"] += time.process_time() - cpu_began
            curve.add({**so_far, "loss": loss, "lr": lr, "gradient_norm": norm, "batch": hash_of(ids)})
            progress.update()
    with first_in_turn(team):
        return finish(run, curve, config, tokens, None if team.fsdp else model, team)


def keep_checkpoint(
    run: Path,
    state: dict[str, Any],
    model: Any,
    suppressor: Suppressor,
    optimizer: torch.optim.AdamW,
    curve: saved.Curve,
    config: TrainingConfig,
    tokens: TokenFiles,
    team: Processes,
) -> None:
    """Write a checkpoint, after the curve that leads to it, and remove old ones. Every process has to take part."""
    moments = saved.optimizer_tensors(optimizer, kept=team.first)
    with whole_weights(model, team):
        if team.first:
            curve.sync()
            saved.save_checkpoint(run, state, model, config.shape, suppressor, moments, tokens.tokenizer)
            saved.remove_old(run, config.keep)


def backward(
    model: Any,
    suppressor: Suppressor,
    ids: Int[Tensor, "batch pos+1"],
    scored: Bool[Tensor, "batch pos"],
    config: TrainingConfig,
    step: int,
    team: Processes,
) -> float:
    """Gradients of the batch's mean loss, part by part, and that loss in nats per scored token.

    Each process takes its rows of every part; gradients are averaged over processes, hence `* team.count`.
    """
    device, count, total = next(model.parameters()).device, int(scored.sum()), 0.0
    size = config.batch_size // config.accumulation
    for first in range(0, config.batch_size, size):
        rows = own_rows(first, size, team)
        suppressor.batch.ids = range(step * config.batch_size + rows.start, step * config.batch_size + rows.stop)
        with exchanging(model, team, last=first + size == config.batch_size):
            with autocast(config, device):
                logits = model(ids[rows, :-1].to(device), return_type="logits")
            loss = token_losses(logits, ids[rows, 1:].to(device), scored[rows].to(device)).sum() / count
            (loss * team.count).backward()
        total += loss.item()
    average_gradients(suppressor.parameters.values(), team)
    return summed(total, team)


@torch.no_grad()
def evaluate(
    model: Any, suppressor: Suppressor, windows: Windows, config: TrainingConfig
) -> tuple[float, list[list[float]]]:
    """The mean loss on held-out sequences, in nats per scored token, and each sequence's [sum, count]."""
    device = next(model.parameters()).device
    chosen = evaluation_numbers(len(windows), config.evaluation_sequences)
    sums: list[list[float]] = []
    for first in range(0, len(chosen), config.evaluation_batch):
        numbers = chosen[first : first + config.evaluation_batch]
        ids, scored = windows.batch(numbers)
        suppressor.batch.ids = [EVALUATION_IDS + number for number in numbers]
        with autocast(config, device):
            logits = model(ids[:, :-1].to(device), return_type="logits")
        losses = token_losses(logits, ids[:, 1:].to(device), scored.to(device)).double().sum(1)
        sums += [[total, int(count)] for total, count in zip(losses.tolist(), scored.sum(1), strict=True)]
    return sum(total for total, _ in sums) / sum(count for _, count in sums), sums


def token_losses(
    logits: Float[Tensor, "batch pos vocab"], targets: Int[Tensor, "batch pos"], scored: Bool[Tensor, "batch pos"]
) -> Float[Tensor, "batch pos"]:
    """Cross entropy in float32 at least, nats; zero where a target is not scored."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(logits.mT, targets.masked_fill(~scored, -100), ignore_index=-100, reduction="none")


def evaluation_numbers(available: int, wanted: int | None) -> list[int]:
    """Held-out sequences, spread evenly; all of them where fewer are there than wanted."""
    count = available if wanted is None else min(wanted, available)
    return [number * available // count for number in range(count)]


def make_optimizer(model: Any, suppressor: Suppressor, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW; decay on matrices only, none on norms, biases and gates."""
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed = {name: parameter for name, parameter in own.items() if is_matrix(name, parameter)}
    others = {name: parameter for name, parameter in own.items() if name not in decayed}
    groups = [
        {"params": list(part.values()), "names": list(part), "weight_decay": decay}
        for part, decay in ((decayed, config.weight_decay), (others, 0.0), (suppressor.parameters, 0.0))
        if part
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Up in a straight line over `warm_up` steps, then down a half cosine to `final_lr` at the end."""
    if step < config.warm_up:
        return config.lr * (step + 1) / config.warm_up
    done = (step - config.warm_up) / max(1, config.steps - config.warm_up)
    return config.lr_at_end + (config.lr - config.lr_at_end) * 0.5 * (1 + math.cos(math.pi * done))


def autocast(config: TrainingConfig, device: torch.device) -> Any:
    """bfloat16 where it is asked for, or left to the GPU and the GPU has it."""
    able = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    wanted = config.autocast == "on" or (config.autocast == "auto" and able)
    return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()


def default_device() -> str:
    """CUDA, else Apple's MPS, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def check_fit(config: TrainingConfig, tokens: TokenFiles, training: Windows) -> None:
    """Raise TrainingError when the tokens and the model do not fit each other."""
    vocabulary = tokens.meta["tokenizer"]["vocabulary"]
    if vocabulary > config.shape.d_vocab:
        raise TrainingError(
            f"the tokens have a vocabulary of {vocabulary}, the model one of {config.shape.d_vocab}",
            where=str(config.tokens),
            cure=f"--d-vocab {vocabulary}, or prepare the tokens with a smaller one",
        )
    if len(training) < config.batch_size:
        raise TrainingError(
            f"a batch of {config.batch_size} is more than the {len(training)} sequences there are",
            where=str(config.tokens),
            cure="a smaller batch, or more text",
        )
    _ = tokens.tokenizer  # it goes into every checkpoint: better missing now than at the first one


def begin(run: Path, config: TrainingConfig, tokens: TokenFiles) -> Path | None:
    """Write the run's settings, or see that it is this run; the checkpoint that it goes on from."""
    try:
        path, settings = run / saved.CONFIG, {**config.as_dict(), "tokens_sha256": tokens.meta["tokens_sha256"]}
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if saved.newest_checkpoint(run) or "tokens_sha256" not in before:  # else nothing is there to go on from
                saved.same_run(jsonable(settings), before, path)
        text = json.dumps(jsonable(settings), indent=2) + "\n"
        replace_file(path, lambda file: file.write_text(text, encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"the run's directory cannot be used ({error})", where=str(run), cure="choose another --out"
        ) from error
    return saved.newest_checkpoint(run)


def not_finite(step: int, what: str, where: str, run: Path) -> DivergedError:
    """What to say when training has broken down."""
    last = saved.newest_checkpoint(run)
    kept = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
    return DivergedError(
        f"the {what}; {kept}",
        step=step,
        where=f"step {step}, {where}",
        cure="a smaller lr, a longer warm_up, or no autocast; then begin anew in another --out",
    )


def hash_of(ids: Int[Tensor, "batch pos"]) -> str:
    """The first 16 digits of the sha256 over a batch's ids, as little-endian int64."""
    return sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()[:16]


def finish(
    run: Path, curve: saved.Curve, config: TrainingConfig, tokens: TokenFiles, model: Any | None, team: Processes
) -> Result:
    """The run's result, also saved in its directory. Without a model the last checkpoint's is described."""
    last = saved.newest_checkpoint(run)
    assert last is not None  # the loop ends with one
    model = open_model(last, config.backend) if model is None else model
    table = pd.DataFrame([{k: v for k, v in line.items() if k != "per_sequence"} for line in curve.lines])
    final = next(line for line in reversed(curve.lines) if "held_out_loss" in line)
    meta = {
        "config": config.as_dict(),
        "model": {**describe(model), "name": config.shape.words()},
        "data": about_tokens(tokens),
        "versions": versions(),
        "processes": team.words(),
        "held_out_loss": final["held_out_loss"],
        "seconds": final["seconds"],
        "checkpoint": str(last),
    }
    result = Result("train", table, jsonable(meta))
    if team.first:
        result.save(run)
    return result


def about_tokens(tokens: TokenFiles) -> dict[str, Any]:
    """What the tokens are of: for a result's provenance."""
    names = [str(text["name"]) for text in tokens.meta["settings"]["texts"]]
    return {"text": " and ".join(names), **tokens.meta}
