"""What `compression_report` costs on SmolLM2-135M, as ratios to bare forward passes of the same batches.

    python benchmarks/bench_compare.py [--rounds 5] [--sequences 8] [--length 256]

Local and propagated together are three forward passes (the dense model, and the compressed one twice), so 3 is what
the passes alone cost. Peak memory is that of a process of its own for each case, both models in it: side by side block
by block, beside keeping what two whole passes show at the compared sites.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from bench_overhead import peak_kib, seconds

import lens_geometry as lg

SITES = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post", "attn.hook_z", "attn.hook_v")
Run = Callable[[Any, list[torch.Tensor]], None]


def bare(models: Any, batches: list[torch.Tensor]) -> None:
    for ids in batches:
        models[0](ids, return_type="logits")


def both(models: Any, batches: list[torch.Tensor]) -> None:
    for ids in batches:
        for model in models:
            model(ids, return_type="logits")


def compared(models: Any, batches: list[torch.Tensor]) -> None:
    lg.compression_report(*models, torch.cat(batches), batch_size=len(batches[0]), max_sequences=None, progress=False)


def propagated(models: Any, batches: list[torch.Tensor]) -> None:
    ids, size = torch.cat(batches), len(batches[0])
    lg.compression_report(
        *models, ids, batch_size=size, max_sequences=None, modes=("propagated",), sites=("block",), progress=False
    )


def cached(models: Any, batches: list[torch.Tensor]) -> None:
    """Keep what both models show of a batch, all layers, then subtract."""
    for ids in batches:
        caches = [
            model.run_with_cache(ids, return_type="logits", names_filter=lambda name: name.endswith(SITES))
            for model in models
        ]
        for name in caches[0][1]:
            lg.measure(caches[1][1][name] - caches[0][1][name], caches[0][1][name])


CASES: dict[str, Run] = {"all of it": compared, "propagated, block alone": propagated, "run_with_cache twice": cached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("sequences", 8), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory-of", choices=["both", *CASES], help=argparse.SUPPRESS)
    given = parser.parse_args()
    base = lg.load_model("smollm2-135m")
    models = (base, lg.compress.round_to_nearest(base, bits=4, group_size=64))
    tokens = lg.tokenize(base, lg.load_text("austen"), sequence_length=given.length, max_sequences=given.sequences)
    batches = [tokens.ids]
    with torch.no_grad():
        if given.memory_of:
            CASES.get(given.memory_of, both)(models, batches)
            print(peak_kib())
            return
        compare_times(models, batches, given.rounds)
    peaks = {}
    for name in ("both", *CASES):
        command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name]
        peaks[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
        print(
            f"{name:24} peak {peaks[name] / 2**20:5.2f} GiB, x {peaks[name] / peaks['both']:.2f} of two forward passes"
        )


def compare_times(models: Any, batches: list[torch.Tensor], rounds: int) -> None:
    for run in (bare, *CASES.values()):
        run(models, batches)  # warm-up: inspection, allocator
    ratios: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        before = seconds(bare, models, batches)
        for name, run in CASES.items():
            taken, after = seconds(run, models, batches), seconds(bare, models, batches)
            ratios[name].append(2 * taken / (before + after))
            before = after
    for name, found in ratios.items():
        print(f"{name:24} x {median(found):5.2f} of a bare forward  ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
