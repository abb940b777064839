"""Trains the twins, two small English models that differ in their norm alone, and writes them into the package.

    python scripts/build_twins.py --work results/twins          # hours on two cores; stopped, it goes on

Everything is fixed: bundled prose, its byte-level BPE, shape, seeds of weights and batches, steps. Weights are kept in
float16; what that costs is measured and recorded. Beside the weights lie `training.json` (settings, versions, hashes,
losses) and `curve.csv` (every evaluation, and the loss of every tenth step). The documents that neither has seen are
written to WORK/held-out as .txt files, to measure on.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import load_file, save_file

from lens_geometry import cache
from lens_geometry.training import Shape, TrainingConfig, open_tokens, prepare_tokens, train
from lens_geometry.training.checkpoint import newest_checkpoint
from lens_geometry.training.model import open_model
from lens_geometry.training.suppression import Suppression, Suppressor
from lens_geometry.training.trainer import evaluate

TWINS = {"twin-layernorm": "LN", "twin-rmsnorm": "RMS"}
TEXTS = ["austen", "moby-dick"]
ASSETS = Path(__file__).parents[1] / "lens_geometry" / "assets"
CONFIG = TrainingConfig(
    tokens="tokens",
    out="",
    shape=Shape(),
    steps=2200,
    batch_size=8,
    lr=3e-3,
    warm_up=100,
    evaluate_every=200,
    evaluation_sequences=64,
    checkpoint_every=200,
    backend="bridge",
)
ABOUT = {"LN": "LayerNorm (StableLM in Hugging Face's naming)", "RMS": "RMSNorm (Llama in Hugging Face's naming)"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("results/twins"), help="tokens and runs")
    parser.add_argument("--only", choices=list(TWINS), help="one of them, so that two processes share the work")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokens = arguments.work / "tokens"
    prepare_tokens(TEXTS, tokens, d_vocab=CONFIG.shape.d_vocab)
    write_held_out(tokens, arguments.work / "held-out")
    for name, norm in TWINS.items():
        if arguments.only in (None, name):
            run = arguments.work / f"twin-{norm}"
            shape = replace(CONFIG.shape, norm=norm)
            config = replace(CONFIG, tokens=str(tokens), out=str(run), shape=shape)
            result = train(config)
            export(name, config, result.table, result.meta)


def write_held_out(tokens: Path, out: Path) -> None:
    """Each held-out document as a .txt file."""
    files = open_tokens(tokens)
    bounds = files.held_out.bounds.tolist()
    out.mkdir(parents=True, exist_ok=True)
    for number, (start, stop) in enumerate(pairwise(bounds)):
        text = files.tokenizer.decode(files.held_out.between(start, stop), skip_special_tokens=True)
        (out / f"{number:02d}.txt").write_text(text, encoding="utf-8")


def export(name: str, config: TrainingConfig, table: pd.DataFrame, meta: dict[str, Any]) -> None:
    """Write one twin into the package's assets."""
    checkpoint = newest_checkpoint(Path(config.out))
    assert checkpoint is not None
    target = ASSETS / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint / file, target / file)
    weights = load_file(checkpoint / "model.safetensors")
    save_file({key: value.half() for key, value in weights.items()}, target / "model.safetensors", {"format": "pt"})
    settings = json.loads((target / "config.json").read_text())
    settings["dtype"] = "float16"
    (target / "config.json").write_text(json.dumps(settings, indent=2) + "\n")

    losses = {"float32": final(checkpoint, config), "float16": final(target, config)}
    rows = table[table["held_out_loss"].notna() | (table["loss"].notna() & (table["step"] % 10 == 0))]
    rows[["step", "tokens", "loss", "held_out_loss"]].to_csv(target / "curve.csv", index=False, float_format="%.5g")
    training = {
        "about": f"{name}: {ABOUT[config.shape.norm]}, trained by scripts/build_twins.py on {' and '.join(TEXTS)}",
        "config": {**config.as_dict(), "tokens": "tokens", "out": Path(config.out).name},
        "tokens_sha256": meta["data"]["tokens_sha256"],
        "text_sha256": meta["data"]["text_sha256"],
        "held_out_loss": losses,
        "cpu_seconds": float(table["cpu_seconds"].dropna().iloc[-1]),
        "versions": meta["versions"],
    }
    (target / "training.json").write_text(json.dumps(training, indent=2) + "\n")
    cache.write_marker(
        target,
        {
            "source": f"lens_geometry/assets/{name}, trained by scripts/build_twins.py",
            "sha256": cache.sha256_of(target / "model.safetensors"),
            "licence": "MIT (the texts it was trained on are in the public domain)",
            "default_prepend_bos": False,
        },
    )
    size = sum(file.stat().st_size for file in target.iterdir()) / 1e6
    print(f"{name}: {size:.1f} MB, held-out loss {losses['float32']:.4f} (float16: {losses['float16']:.4f})")


def final(directory: Path, config: TrainingConfig) -> float:
    """The loss on every held-out sequence."""
    model = open_model(directory, "bridge")
    windows = open_tokens(config.tokens).held_out.windows(config.shape.n_ctx)
    return evaluate(model, Suppressor(model, Suppression()), windows, replace(config, evaluation_sequences=None))[0]


if __name__ == "__main__":
    main()
