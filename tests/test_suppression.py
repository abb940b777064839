"""Suppression as settings, as arms, and as hooks that are on during a whole training."""

import pytest
import torch
import zoo

from lens_geometry.anatomy import attached
from lens_geometry.edits import applied, scale
from lens_geometry.training.suppression import Suppression, Suppressor, arm

CLASSES = [pair for pair in zoo.cases("bridge", "hooked") if pair[0] in ("llama_gqa", "gpt2")]


def logits(model, ids, hooks=()):
    with torch.no_grad(), attached(model, list(hooks)):
        return model(ids, return_type="logits")


@pytest.mark.parametrize("name", ["attn", "value", "value_excl_self", "mlp"])
@pytest.mark.parametrize(("animal", "backend"), CLASSES)
def test_an_arm_is_the_edit_that_inference_makes(animal, backend, name):
    model, ids = zoo.build(animal, backend), zoo.tokens()
    for parallel in (0.0, 0.5):
        suppressor = Suppressor(model, arm(f"{name}:{parallel}"))
        expected = logits(model, ids, scale(model, name, parallel=parallel))
        assert torch.equal(logits(model, ids, suppressor.hooks), expected)
        assert not torch.allclose(expected, logits(model, ids), atol=1e-3)
        assert not suppressor.parameters


def test_the_baseline_has_no_hook_and_never_looks_at_the_model():
    assert Suppressor(None, arm("baseline")).hooks == []


def test_a_schedule_moves_the_scale_of_hooks_that_stay_on():
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    suppressor = Suppressor(model, Suppression("value", parallel=0.2, schedule="linear", schedule_steps=4))
    with applied(model, suppressor.hooks), torch.no_grad():
        for step, parallel in [(0, 1.0), (1, 0.8), (3, 0.4), (4, 0.2), (9, 0.2)]:
            suppressor.at_step(step)
            assert suppressor.parallel_now == pytest.approx(parallel)
            found = model(ids, return_type="logits")
            with_number = scale(zoo.build("llama_gqa", fresh=True), "value", parallel=suppressor.parallel_now)
            expected = logits(zoo.build("llama_gqa", fresh=True), ids, with_number)
            assert torch.allclose(found, expected, atol=1e-5)
            if step == 0:
                assert torch.equal(found, logits(zoo.build("llama_gqa", fresh=True), ids))
