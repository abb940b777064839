"""What a training step costs under each arm, as ratios to plain training of the same model on the same batch.

    python benchmarks/bench_training_arms.py [--rounds 7] [--backend auto] [--arms attn value gate] [--sequences 8]

A step is forward, backward, clipping and AdamW, in the trainer's default shape at 8 x 256 tokens. Hooks stay on during
a step as they do in training; putting them on is not timed. Steps are taken in turn (baseline, A, baseline, B, ...),
each divided by the baselines around it, so that a machine whose speed drifts favours none; the median ratio and its
range are printed. On a CPU the process's own seconds are counted, not those that others had of it.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from lens_geometry.anatomy import attached
from lens_geometry.training.config import Shape
from lens_geometry.training.model import build_model
from lens_geometry.training.suppression import ARMS, Suppressor, arm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--backend", choices=("auto", "hooked", "bridge"), default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    parser.add_argument("--arms", nargs="+", default=[name for name in ARMS if name != "baseline"])
    arguments = parser.parse_args()
    shape = Shape()
    model = build_model(shape, 0, backend=arguments.backend, device=arguments.device).train()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.d_vocab, (arguments.sequences, shape.n_ctx + 1), generator=generator)
    ids = ids.to(arguments.device)
    suppressors = {name: Suppressor(model, arm(name)) for name in arguments.arms}
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizers = {
        name: torch.optim.AdamW([*weights, *suppressor.parameters.values()], lr=1e-9)
        for name, suppressor in suppressors.items()
    }
    plain, nothing = torch.optim.AdamW(weights, lr=1e-9), Suppressor(model, arm("baseline"))

    clock = time.process_time if arguments.device == "cpu" else time.perf_counter

    def seconds(suppressor: Suppressor, optimizer: Any) -> float:
        with attached(model, suppressor.hooks):
            wait(arguments.device)
            began = clock()
            step(model, ids, optimizer, arguments.autocast)
            wait(arguments.device)
            return clock() - began

    for name in suppressors:  # warm-up: inspection, allocator, the optimisers' state
        seconds(suppressors[name], optimizers[name])
    seconds(nothing, plain)
    ratios: dict[str, list[float]] = {name: [] for name in suppressors}
    base = [seconds(nothing, plain)]
    for _ in range(arguments.rounds):
        for name, suppressor in suppressors.items():
            taken = seconds(suppressor, optimizers[name])
            base.append(seconds(nothing, plain))
            ratios[name].append(2 * taken / (base[-2] + base[-1]))
    print(f"baseline step of {type(model).__name__}: {1000 * median(base):.0f} ms for {tuple(ids.shape)}")
    for name, found in ratios.items():
        print(
            f"{name:20} x {median(found):5.3f} of a baseline step  ({min(found):.3f} to {max(found):.3f})", flush=True
        )


def step(model: Any, ids: torch.Tensor, optimizer: Any, low_precision: bool) -> None:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=low_precision):
        logits = model(ids[:, :-1], return_type="logits")
    functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
