"""Two models that can be compared layer by layer, on the same tokens: or one clear error that says why not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lens_geometry import models
from lens_geometry.anatomy import Anatomy, inspect
from lens_geometry.compress.calibrating import calibration_overlap
from lens_geometry.data import Tokens
from lens_geometry.errors import DataError, ModelError
from lens_geometry.runner import RunSettings, prepare
from lens_geometry.sites import HOOKS, SITES

_BLOCK = re.compile(r"(?:^|\.)(?:blocks|layers|h)\.(\d+)\.")
MOST_SHARED = 0.01  # of an evaluation text's windows: phrases and licences come back, pages do not
_CHANGES_EDITS = ("fold_value_biases", "center_writing_weights", "refactor_factored_attn_matrices")


def loaded(model: Any) -> Any:
    """A model as it is, or what `load_model` makes of a name or path. Raises ModelError for neither."""
    if isinstance(model, str | Path):
        return models.load_model(str(model))
    models.require_model(model)
    return model


def require_finite(model: Any, whose: str) -> None:
    """Raise ModelError for weights that are not finite, and for activations of a few tokens that are not."""
    for name, weight in model.named_parameters():
        if not weight.detach().sum(dtype=torch.float32).isfinite():  # one pass over memory, where isfinite takes three
            raise ModelError(
                f"a weight of the {whose} is not finite", where=name, cure="make, copy or download that model again"
            )
    for layer, facts in enumerate(inspect(model).layers):
        if any(math.isnan(error) for error in facts.errors.values()):
            raise ModelError(
                f"activations of the {whose} are not finite",
                where=f"layer {layer}",
                cure="check the dtype (float16 overflows where bfloat16 and float32 do not)",
            )


def require_counterparts(base: Any, compressed: Any, sites: Sequence[str]) -> None:
    """Check that two models are of one architecture, shape, dtype and processing at the sites that are compared.

    What a site does not show may differ, such as the width of the MLP.
    Raises ModelError that names what differs, on which side, and the cure.
    """
    ours, theirs = inspect(base), inspect(compressed)
    about, other = models.describe(base), models.describe(compressed)
    if ours.n_layers != theirs.n_layers:
        raise ModelError(
            f"the base has {ours.n_layers} layers and the compressed model {theirs.n_layers}, so that its layers have "
            "no counterparts",
            where=f"{about['name']} and {other['name']}",
            cure="compare models of equal depth; a blanked layer (compress.blank_layers) keeps its place where a "
            "dropped one does not",
        )
    pairs = {
        "architecture": (about["architecture"], other["architecture"]),
        "d_model": (ours.d_model, theirs.d_model),
        "vocabulary": (about["d_vocab"], other["d_vocab"]),
        "attention and MLP in parallel": (ours.parallel, theirs.parallel),
        "normalization_type": tuple(str(a["normalization_type"]).removesuffix("Pre") for a in (about, other)),
    }
    pairs |= {
        f"weight processing {name}": (about["processing"][name], other["processing"][name]) for name in _CHANGES_EDITS
    }
    for what, (one, another) in pairs.items():
        if one != another and "unknown" not in (one, another) and None not in (one, another):
            raise ModelError(
                f"the models are not of one kind: {what} is {one} in the base and {another} in the compressed model",
                where=f"{about['name']} and {other['name']}",
                cure="compare a model with a compressed form of the same model, loaded in the same way",
            )
    words = [
        "none" if edit is None else f"{edit['status']}: {edit['settings']}"
        for edit in (about["suppression"], other["suppression"])
    ]
    if words[0] != words[1]:
        raise ModelError(
            f"the edits that the models were trained under differ (base {words[0]}; compressed {words[1]}): their "
            "effect would be taken for an error of compression",
            where=f"{about['name']} and {other['name']}",
            cure="load both with it or both without (without_suppression=True); save_compressed keeps it",
        )
    if about["dtype"] != other["dtype"]:
        raise ModelError(
            f"the base is in {about['dtype']} and the compressed model in {other['dtype']}: rounding would be taken "
            "for an error of compression",
            where=f"{about['name']} and {other['name']}",
            cure="load both in one dtype: load_model(..., dtype='float32'), or from_pretrained(..., dtype=...) of a "
            "plain model before it is wrapped",
        )
    for layer in range(ours.n_layers):
        for hook, (one, another) in _shapes(ours, theirs, layer, sites).items():
            if one[2:] != another[2:]:
                raise ModelError(
                    f"{hook} is {one[2:]} per token in the base and {another[2:]} in the compressed model",
                    where=f"layer {layer}",
                    cure="leave out the sites that read it (sites=...), or compare models of equal shape there",
                )


def _shapes(ours: Anatomy, theirs: Anatomy, layer: int, sites: Sequence[str]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The hooks that the sites read in a layer, with their shapes in both models."""
    targets = {ours.target(SITES[name], layer) for name in sites}
    return {
        HOOKS[name].format(layer): (ours.layers[layer].shapes[name], theirs.layers[layer].shapes[name])
        for name in sorted(targets)
        if name in theirs.layers[layer].shapes
    }


def common_tokens(base: Any, compressed: Any, data: Any, settings: RunSettings) -> Tokens:
    """The tokens of the experiment, which both models' tokenizers must make alike.

    A model without a tokenizer takes those of the other. Raises DataError where the tokenizers differ on this text,
    and as `prepare` does.
    """
    with_tokenizer = [model for model in (base, compressed) if getattr(model, "tokenizer", None) is not None]
    if isinstance(data, Tensor | Tokens) or not with_tokenizer:
        prepare(compressed, data, settings)
        return prepare(base, data, settings)
    first = prepare(with_tokenizer[0], data, settings)
    if len(with_tokenizer) == 1 or _same_tokenizer(base.tokenizer, compressed.tokenizer):
        return first
    last = prepare(compressed, data, settings)
    if first.ids.shape != last.ids.shape or not torch.equal(first.mask, last.mask):
        different = f"{first.meta['n_tokens']} tokens by the base, {last.meta['n_tokens']} by the compressed model"
    elif not torch.equal(first.ids, last.ids):
        row, place = (first.ids != last.ids).nonzero()[0].tolist()
        different = f"in sequence {row}, token {place} is {int(first.ids[row, place])} and {int(last.ids[row, place])}"
    else:
        return first
    raise DataError(
        f"the two models' tokenizers differ on this text ({different})",
        where=str(first.meta["text"]),
        cure="give the compressed model the base's tokenizer, or pass token ids",
    )


def _same_tokenizer(one: Any, other: Any) -> bool:
    """Whether two tokenizers are the same by their definition; False where that cannot be seen."""
    definitions = [
        getattr(getattr(tokenizer, "backend_tokenizer", None), "to_str", str)() for tokenizer in (one, other)
    ]
    return one is other or ("" not in definitions and definitions[0] == definitions[1])


def calibration_of(compressed: Any, tokens: Tokens) -> dict[str, Any]:
    """What `calibration_overlap` finds, for the result. Raises DataError where the text is the calibration text."""
    found = calibration_overlap(compressed, tokens)
    record = models.describe(compressed)["compression"] or {}
    steps = [record, *record.get("steps", ())]
    texts = {(step.get("calibration") or {}).get("text_sha256") for step in steps} - {None}
    if tokens.meta.get("text_sha256") in texts:
        raise DataError(
            "the compressed model was calibrated on this text",
            where=str(tokens.meta["text"]),
            cure="compare on other text, or calibrate on other text; its other passages are by the same hand",
        )
    if found["shared"] > MOST_SHARED * found["windows"]:
        raise DataError(
            f"the compressed model was calibrated on this text: {found['shared']} of its {found['windows']} windows of "
            "tokens are known to it",
            where=str(tokens.meta["text"]),
            cure="compare on other text, or calibrate on other text",
        )
    return found


def weight_errors(base: Any, compressed: Any) -> dict[int, tuple[float, float]] | None:
    """|W' - W|^2 and |W|^2 of each layer's matrices; None where the two models' parameters cannot be paired."""
    ours, theirs = dict(_matrices(base)), dict(_matrices(compressed))
    if not ours or {name: w.shape for name, w in ours.items()} != {name: w.shape for name, w in theirs.items()}:
        return None
    sums: dict[int, tuple[float, float]] = {}
    for name, weight in ours.items():
        found = _BLOCK.search(name)
        assert found is not None
        layer, dense = int(found[1]), weight.detach().cpu().float()
        change = theirs[name].detach().cpu().float() - dense
        error, size = sums.get(layer, (0.0, 0.0))
        sums[layer] = (
            error + float(change.square().sum(dtype=torch.float64)),
            size + float(dense.square().sum(dtype=torch.float64)),
        )
    return sums


def _matrices(model: Any) -> Iterator[tuple[str, Tensor]]:
    named = dict(model.named_parameters())
    for name, weight in named.items():
        if ".qkv." in name and name.replace(".qkv.", ".q.") in named:
            continue  # a bridge computes with its own copies of q, k and v
        bias = name.rsplit(".", 1)[-1].lstrip("_").startswith("b")  # HookedTransformer's have heads
        if weight.ndim > 1 and not bias and _BLOCK.search(name):
            yield name, weight
