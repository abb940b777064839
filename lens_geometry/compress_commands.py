"""The command `compress`: one model, one method, a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lens_geometry.compress import calibration_tokens, compress, parse_variant, save_compressed
from lens_geometry.data import load_text
from lens_geometry.errors import CompressionError, ResultError
from lens_geometry.loading_options import Loading
from lens_geometry.provenance import compression_of

LOADING = Loading()


def compress_command(
    variant: str = "rtn:bits=4,group_size=64",
    loading: Loading = LOADING,
    calibration: str | None = None,
    calibration_sequences: int = 64,
    calibration_length: int = 256,
    out: Path = Path("results/compressed"),
) -> int:
    """Compress a model by one method, and save it as an ordinary Hugging Face directory.

    gptq, awq and sparsegpt need the extra: pip install "lens-geometry[compression]".
    Example: lens-geometry compress --variant rtn:bits=4,group_size=64 --out results/rtn4

    Args:
        variant: METHOD:NAME=VALUE,...; methods are rtn, magnitude, wanda, low-rank, blank, drop, gptq, awq, sparsegpt.
            magnitude:pattern=2:4, rtn:bits=0=8+1=4 (bits by layer), drop:layers=3+5.
        loading: which model.
        calibration: the text of the methods that are calibrated: "austen", "moby-dick", "python", a .txt file, a
            directory of them, or hf:... for a Hugging Face data set. Never the text of an evaluation.
        calibration_sequences: how many sequences of it.
        calibration_length: tokens of each.
        out: directory of the compressed model; load it with --model.
    """
    chosen = parse_variant(variant)  # better refused now than after the model is loaded
    if chosen.calibrated and calibration is None:
        raise CompressionError(
            f"{chosen.method} needs a calibration text", cure="name one, such as --calibration moby-dick"
        )
    if chosen.calibrated is False and calibration is not None:
        raise CompressionError(f"{chosen.method} does without a calibration text", cure="leave --calibration out")
    if out.is_file():
        raise ResultError("this is a file", where=str(out), cure="choose a directory")
    model, text = loading.load(), None if calibration is None else load_text(calibration)
    tokens = None
    if text is not None:
        tokens = calibration_tokens(model, text, sequences=calibration_sequences, sequence_length=calibration_length)
    small = compress(model, chosen, tokens)
    print(compress_summary(small))
    print(f"saved: {save_compressed(small, out)} (lens-geometry profile --model takes it)")
    return 0


def compress_summary(model: Any) -> str:
    """What a compression changed, in a few lines."""
    about = compression_of(model) or {}
    calibration, error = about["calibration"], about["weight_error"]
    lines = [
        f"{about['method']}, layers {', '.join(map(str, about['layers']))}, {about['seconds']:.1f} s",
        f"bits per weight of the blocks: {about['bits_per_weight']:.2f} (16 dense)",
        f"size: {about['size_bytes'] / 1e6:,.1f} MB (dense {about['dense_bytes'] / 1e6:,.1f} MB, 16 bits a weight)",
    ]
    if error is not None:
        lines.insert(1, f"error of the blocks' weights: {error:.4f} of their norm")
    if calibration is not None:
        lines.append(f"calibrated on {calibration['tokens']:,} tokens of {calibration['text']}")
    return "\n".join(lines)
