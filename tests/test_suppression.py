"""Suppression as settings, as arms, and as hooks that are on during a whole training."""

import json
import math

import pytest
import torch
import zoo

from lens_geometry.anatomy import attached
from lens_geometry.edits import applied, remove_diagonal, scale
from lens_geometry.edits.suppressing import Gate
from lens_geometry.errors import GeometryError, LensGeometryError, SiteError
from lens_geometry.training.suppression import ARMS, Suppression, Suppressor, arm

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


def test_a_gate_starts_at_a_half_in_every_chosen_layer():
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    suppressor = Suppressor(model, Suppression("value", gate=True, layers="1-2"))
    assert {name: tuple(w.shape) for name, w in suppressor.parameters.items()} == {"gate.1": (48,), "gate.2": (48,)}
    expected = logits(model, ids, scale(model, "value", parallel=0.5, layers="1-2"))
    assert torch.allclose(logits(model, ids, suppressor.hooks), expected, atol=1e-6)


def test_a_gate_is_the_sigmoid_of_the_layers_input_in_full_precision_under_autocast_too():
    model, ids, seen = zoo.build("llama_gqa"), zoo.tokens(), {}
    suppressor = Suppressor(model, arm("gate"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in suppressor.parameters.values():
            weight.copy_(torch.randn(48, generator=generator))
    with torch.no_grad(), attached(model, [("blocks.2.hook_resid_pre", lambda x, hook: seen.update(x=x.clone()))]):
        model(ids, return_type=None)
    gate = Gate(suppressor.parameters["gate.2"])
    with torch.autocast("cpu", torch.bfloat16):
        found = gate(seen["x"])
    assert found.dtype == torch.float32
    w = gate.weight.detach().double()
    by_hand = [[1 / (1 + math.exp(-(x.double() @ w))) for x in row] for row in seen["x"]]
    assert torch.allclose(found, torch.tensor(by_hand), atol=1e-6)


def test_state_and_settings_go_to_disk_and_back():
    model = zoo.build("llama_gqa")
    suppression = Suppression("attn", parallel=-0.5, schedule="cosine", schedule_steps=7, layers=(0, 3))
    assert Suppression.from_dict(json.loads(json.dumps(suppression.as_dict()))) == suppression
    one, other = (Suppressor(model, suppression) for _ in range(2))
    one.at_step(3)
    other.load(one.state())
    assert other.parallel_now == one.parallel_now == suppression.parallel_at(3)
    one, other = (Suppressor(model, arm("gate_attn")) for _ in range(2))
    with torch.no_grad():
        one.parameters["gate.1"].fill_(2.0)
    state = one.state()
    with torch.no_grad():
        one.parameters["gate.1"].fill_(3.0)  # what was taken is a copy
    other.load(state)
    assert (other.parameters["gate.1"] == 2.0).all()
    with pytest.raises(SiteError, match=r"gate\.3 is missing where \(48,\)"):
        other.load({name: gate for name, gate in state.items() if name != "gate.3"})
    with pytest.raises(SiteError, match="gate.0"):
        Suppressor(model, arm("value")).load(state)


@pytest.mark.parametrize("name", list(ARMS))
def test_every_arm_goes_to_json_and_back(name):
    assert Suppression.from_dict(json.loads(json.dumps(ARMS[name].as_dict()))) == ARMS[name]


def test_the_noise_of_the_norm_matched_arm_is_that_of_the_ids_and_not_of_the_batch():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(3, 9)
    suppressor = Suppressor(model, arm("norm_matched"))
    suppressor.batch.ids = [70, 71, 72]
    whole = logits(model, ids, suppressor.hooks)
    suppressor.batch.ids = [71]
    assert torch.allclose(logits(model, ids[1:2], suppressor.hooks)[0], whole[1], atol=1e-11)
    suppressor.batch.ids = [73]
    assert not torch.allclose(logits(model, ids[1:2], suppressor.hooks)[0], whole[1], atol=1e-3)
    reseeded = Suppressor(model, arm("norm_matched"), seed=1)
    reseeded.batch.ids = [70, 71, 72]
    assert not torch.allclose(logits(model, ids, reseeded.hooks), whole, atol=1e-3)


def test_the_diagonal_arm_is_attention_with_its_diagonal_masked_before_softmax():
    model, ids = zoo.build("llama_gqa", fresh=True), zoo.tokens()

    def mask(scores, hook):
        own = torch.eye(scores.shape[-1], dtype=torch.bool)
        own[0, 0] = False
        return scores.masked_fill(own, float("-inf"))

    masked = [(f"blocks.{layer}.attn.hook_attn_scores", mask) for layer in range(4)]
    expected = logits(model, ids, masked)
    assert torch.allclose(logits(model, ids, Suppressor(model, arm("diagonal")).hooks), expected, atol=1e-5)
    without = logits(model, ids, remove_diagonal(model, renormalise=False))
    assert torch.equal(logits(model, ids, Suppressor(model, arm("diagonal_shrinking")).hooks), without)
    assert not torch.allclose(without, expected, atol=1e-2)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"site": "block"}, SiteError, "no suppression with site 'block'"),
        ({"site": "attn", "control": "noise"}, SiteError, "choose one of none, norm_matched, diagonal"),
        ({"site": "attn", "schedule": "step", "schedule_steps": 3}, SiteError, "no suppression with schedule"),
        ({"site": "none", "parallel": 0.5}, SiteError, "nothing is suppressed"),
        ({"gate": True}, SiteError, "nothing is suppressed"),
        ({"site": "attn", "parallel": float("nan")}, GeometryError, "no finite number"),
        ({"site": "attn", "parallel": True}, GeometryError, "no finite number"),
        ({"site": "attn", "schedule": "linear"}, GeometryError, "whole number of 1 or more"),
        ({"site": "attn", "schedule_steps": 5}, GeometryError, "leave it at 0"),
        ({"site": "attn", "gate": True, "parallel": 0.5}, SiteError, "makes its own scale"),
        ({"site": "attn", "gate": True, "schedule": "linear", "schedule_steps": 5}, SiteError, "follows no schedule"),
        ({"site": "attn", "gate": 1}, SiteError, "gate is 1"),
        ({"site": "attn", "control": "diagonal"}, SiteError, "use site=.value"),
        ({"site": "value", "control": "diagonal", "parallel": 0.5}, SiteError, "removed wholly"),
        ({"site": "value", "renormalise": False}, SiteError, "only the diagonal"),
        ({"site": "value", "layers": (0.5,)}, SiteError, "whole numbers"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_a_cure(settings, error, words):
    with pytest.raises(error, match=words) as caught:
        Suppression(**settings)
    assert "Cure:" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["vaule", "value:half", "baseline:0.5", "gate:0.5", "diagonal:0.5", ":0.5", "value:nan"]
)
def test_arms_that_there_are_not_are_refused(name):
    with pytest.raises(LensGeometryError, match="Cure:"):
        arm(name)


def test_a_site_or_layer_that_the_model_does_not_have_is_refused():
    with pytest.raises(SiteError, match="no layer 9"):
        Suppressor(zoo.build("llama_gqa"), Suppression("value", layers=(9,)))
    with pytest.raises(SiteError, match="cannot be edited"):
        Suppressor(zoo.build("opt"), arm("diagonal"))
    with pytest.raises(SiteError, match="no site 'attn'"):
        Suppressor(zoo.build("opt_post_norm"), arm("attn"))


def test_chosen_layers_alone_are_suppressed():
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    suppressor = Suppressor(model, Suppression("value", layers=(1, 3)))
    assert torch.equal(
        logits(model, ids, suppressor.hooks), logits(model, ids, scale(model, "value", parallel=0.0, layers=[1, 3]))
    )
    assert {int(name.split(".")[1]) for name, _ in suppressor.hooks} == {1, 3}
