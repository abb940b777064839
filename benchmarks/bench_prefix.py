"""What reusing the prefix and the first-order mode save on SmolLM2-135M, as ratios measured side by side.

    python benchmarks/bench_prefix.py [--rounds 3] [--sequences 4] [--length 128]

"prefix" is the time of one edit per layer with the clean stream reused, over the time of the same edits run from the
start; "first order" is the time of all heads of all layers by one backward pass, over the time of as many exact edits
with the prefix reused (extrapolated from one edit per layer).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import lens_geometry as lg
from lens_geometry.data import tokenize
from lens_geometry.runner import Condition, RunSettings, run_conditions


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rounds", 3), ("sequences", 4), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    model = lg.load_model("smollm2-135m")
    tokens = tokenize(model, lg.load_text("austen"), sequence_length=given.length, max_sequences=given.sequences)
    settings, n_layers = RunSettings(progress=False), model.cfg.n_layers

    def edits(reuse: bool) -> list[Condition]:
        def one(layer: int) -> Condition:
            return Condition(
                f"layer {layer}",
                lambda batch: lg.scale(model, "value_excl_self", parallel=0.0, layers=layer, heads=0),
                first_layer=layer if reuse else 0,
            )

        return [one(layer) for layer in range(n_layers)]

    def first_order() -> object:
        return lg.head_sweep(model, tokens, method="first_order", progress=False)

    prefix, gradient = [], []
    run_conditions(model, tokens, edits(True)[:2], settings)  # everything is loaded and inspected once
    for _ in range(given.rounds):
        whole = seconds(lambda: run_conditions(model, tokens, edits(False), settings))
        reused = seconds(lambda: run_conditions(model, tokens, edits(True), settings))
        prefix.append(reused / whole)
        gradient.append(seconds(first_order) / (reused * model.cfg.n_heads))
    for name, ratios in (("prefix", prefix), ("first order", gradient)):
        print(f"{name}: {median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
