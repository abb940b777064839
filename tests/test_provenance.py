"""What `describe` says of any model, also a processed one, and when the fingerprint changes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import zoo

from lens_geometry.provenance import describe, fingerprint, processing, processing_warnings

STEPS = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
RAW = dict.fromkeys((*STEPS, "refactor_factored_attn_matrices"), False)
CASES = [case for case in zoo.cases() if case[0] in ("gpt2", "neox", "llama_gqa", "opt") and case[1] != "native"]
everywhere = pytest.mark.parametrize(("name", "backend"), CASES, ids=["-".join(case) for case in CASES])


def processed(name: str, backend: str, **steps: bool) -> Any:
    model = zoo.build(name, backend, fresh=True)
    if backend == "bridge":
        model.enable_compatibility_mode(disable_warnings=True, **{**dict.fromkeys(STEPS, False), **steps})
    else:
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_and_process_state_dict(weights, **{**dict.fromkeys(STEPS, False), **steps})
    return model


def steps_of(model: Any) -> dict[str, Any]:
    return {step: flag for step, flag in processing(model).items() if step != "compatibility_mode"}


@pytest.mark.parametrize(("name", "backend"), zoo.cases(), ids=["-".join(case) for case in zoo.cases()])
def test_any_model_can_be_described(name: str, backend: str) -> None:
    model = zoo.build(name, backend)
    about = json.loads(json.dumps(describe(model)))
    assert about["class"] == type(model).__name__
    assert (about["n_layers"], about["d_model"], about["dtype"]) == (zoo.LAYERS, zoo.D_MODEL, "float32")
    assert not any(flag is True for flag in about["processing"].values())
    assert processing_warnings(model) == []


@everywhere
def test_raw_weights_are_recognised(name: str, backend: str) -> None:
    assert steps_of(zoo.build(name, backend)) == RAW


@everywhere
def test_full_processing_is_recognised(name: str, backend: str) -> None:
    flags = steps_of(processed(name, backend, **dict.fromkeys(STEPS, True)))
    llama = name.startswith("llama")  # RMSNorm cannot be centred, and there are no value biases
    assert flags["fold_ln"] is True
    assert flags["center_unembed"] is True
    assert flags["center_writing_weights"] is not llama
    assert flags["fold_value_biases"] is not llama


@pytest.mark.parametrize("step", ["fold_ln", "center_writing_weights", "fold_value_biases"])
@pytest.mark.parametrize(("name", "backend"), [case for case in CASES if case[0] == "gpt2"])
def test_each_step_is_recognised_alone(step: str, name: str, backend: str) -> None:
    model = processed(name, backend, **{step: True})
    assert steps_of(model) == {**RAW, step: True}
    warned = processing_warnings(model)
    assert len(warned) == (step != "fold_ln")
    assert all(step in line and line.endswith(".") for line in warned)


def test_centring_is_recognised_in_bfloat16() -> None:
    model = processed("gpt2", "bridge", center_writing_weights=True).to(torch.bfloat16)
    assert processing(model)["center_writing_weights"] is True
    raw = zoo.build("gpt2", fresh=True).to(torch.bfloat16)
    assert processing(raw)["center_writing_weights"] is False


def test_a_models_own_name_is_kept_when_the_rest_is_unknown() -> None:
    about = describe(zoo.build("gpt2"))
    assert about["name"]
    assert (about["source"], about["revision"], about["path"]) == (None, None, None)


@everywhere
def test_fingerprint_is_that_of_the_weights(name: str, backend: str) -> None:
    model = zoo.build(name, backend, fresh=True)
    before = fingerprint(model)
    assert fingerprint(zoo.build(name, backend)) == before
    assert fingerprint(copy.deepcopy(model)) == before
    weight = max(model.parameters(), key=torch.Tensor.numel)
    with torch.no_grad():
        weight.view(-1)[weight.numel() // 2 + 1].mul_(1.0000002)  # the next number in float32
    assert fingerprint(model) != before


def test_fingerprint_reads_every_dtype() -> None:
    prints = {
        fingerprint(zoo.build("llama_gqa", dtype=dtype, fresh=True))
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    }
    assert len(prints) == 4


def test_fingerprint_does_not_mind_the_layout() -> None:
    plain, strided = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)
    strided.load_state_dict(plain.state_dict())
    strided.weight = torch.nn.Parameter(plain.weight.detach().T.contiguous().T)
    assert not strided.weight.is_contiguous()
    assert fingerprint(strided) == fingerprint(plain)
