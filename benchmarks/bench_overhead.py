"""What measuring and editing cost on SmolLM2-135M, as ratios to a bare forward pass of the same batches.

    python benchmarks/bench_overhead.py [--rounds 5] [--batches 2] [--sequences 8] [--length 256]

Times are taken in turn (bare, A, bare, B, ...), each divided by the bare passes around it, so that a machine whose
speed drifts does not favour one of them; the median ratio and its range are printed. Peak memory is that of
a process of its own for each case.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import lens_geometry as lg

SITES = ("attn", "mlp", "block", "value", "value_excl_self")


def bare(model: Any, batches: list[torch.Tensor]) -> None:
    for ids in batches:
        model(ids, return_type="logits")


def profiled(model: Any, batches: list[torch.Tensor]) -> None:
    lg.profile(model, torch.cat(batches), batch_size=len(batches[0]), max_sequences=None, progress=False)


def cached(model: Any, batches: list[torch.Tensor]) -> None:
    """The thing to beat: keep every activation, then do the arithmetic."""
    for ids in batches:
        _, cache = model.run_with_cache(ids, return_type="logits")
        for layer in range(model.cfg.n_layers):
            get = lambda name, layer=layer, cache=cache: cache[f"blocks.{layer}.{name}"]  # noqa: E731
            before, z = get("hook_resid_pre"), get("attn.hook_z")
            v = get("attn.hook_v").repeat_interleave(z.shape[2] // get("attn.hook_v").shape[2], 2)
            own = get("attn.hook_pattern").diagonal(dim1=-2, dim2=-1).transpose(1, 2).unsqueeze(-1)
            lg.measure(get("hook_attn_out"), before)
            lg.measure(get("hook_mlp_out"), get("hook_resid_mid"))
            lg.measure(get("hook_resid_post") - before, before)
            lg.measure(z, v)
            lg.measure(z - own * v, v)


def edited(site: str) -> Callable[[Any, list[torch.Tensor]], None]:
    def run(model: Any, batches: list[torch.Tensor]) -> None:
        with lg.applied(model, lg.scale(model, site, parallel=0.5)):
            for ids in batches:
                model(ids, return_type="logits")

    return run


CASES: dict[str, Callable[[Any, list[torch.Tensor]], None]] = {
    "profile, all sites and layers": profiled,
    "run_with_cache plus arithmetic": cached,
    **{f"edit of {site}, all layers": edited(site) for site in SITES},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 5), ("batches", 2), ("sequences", 8), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", default="", help="time the cases whose name begins like this, and no memory")
    parser.add_argument("--memory-of", choices=["bare", *CASES], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    model = lg.load_model("smollm2-135m")
    count = arguments.batches * arguments.sequences
    tokens = lg.tokenize(model, lg.load_text("austen"), sequence_length=arguments.length, max_sequences=count)
    batches = list(tokens.ids.split(arguments.sequences))
    with torch.no_grad():
        if arguments.memory_of:
            CASES.get(arguments.memory_of, bare)(model, batches)
            print(peak_kib())
            return
        compare_times(model, batches, arguments.rounds, arguments.only)
    if not arguments.only:
        compare_memory(sys.argv[1:])


def compare_times(model: Any, batches: list[torch.Tensor], rounds: int, only: str) -> None:
    cases = {name: run for name, run in CASES.items() if name.startswith(only)}
    for run in (bare, *cases.values()):
        run(model, batches[:1])  # warm-up: inspection, allocator
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    base: list[float] = []
    for _ in range(rounds):
        before = seconds(bare, model, batches)
        for name, run in cases.items():
            taken, after = seconds(run, model, batches), seconds(bare, model, batches)
            ratios[name].append(2 * taken / (before + after))
            base.append(before)
            before = after
    print(f"bare forward: {median(base):.2f} s for {len(batches)} batches of {tuple(batches[0].shape)}")
    for name, found in ratios.items():
        print(f"{name:32} x {median(found):5.2f} of a bare forward  ({min(found):.2f} to {max(found):.2f})")


def compare_memory(arguments: list[str]) -> None:
    peaks = {}
    for name in ("bare", "profile, all sites and layers", "run_with_cache plus arithmetic"):
        command = [sys.executable, __file__, *arguments, "--memory-of", name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks[name] = int(printed.split()[-1])
        print(f"{name:32} peak {peaks[name] / 2**20:5.2f} GiB, x {peaks[name] / peaks['bare']:.2f} of a bare forward")


def peak_kib() -> int:
    """This process's peak resident memory; getrusage would count what its parent had when it was forked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def seconds(run: Callable[[Any, list[torch.Tensor]], None], model: Any, batches: list[torch.Tensor]) -> float:
    began = time.perf_counter()
    run(model, batches)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
