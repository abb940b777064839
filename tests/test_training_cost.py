"""Presets and what they cost: counts against models on the meta device, FLOPs and bytes against what torch counts."""

import dataclasses

import pandas as pd
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lens_geometry import cli, loaders
from lens_geometry.errors import TrainingError
from lens_geometry.results import Result
from lens_geometry.training.config import Shape, TrainingConfig
from lens_geometry.training.cost import (
    CostSettings,
    cost,
    cost_table,
    count_parameters,
    flops_per_token,
    kept_activations,
    memory,
)
from lens_geometry.training.model import build_model, hugging_face_model, is_added_bias, wrapped
from lens_geometry.training.presets import PRESETS, find_preset, preset_config, with_preset

EXACT = {
    "296M": 295_220_224,
    "436M": 441_114_880,
    "528M": 526_734_080,
    "1.4B": 1_156_941_824,
    "2.7B": 2_336_197_120,
}
TINY = Shape(n_layers=3, n_heads=4, n_key_value_heads=2, d_model=64, d_mlp=192, n_ctx=32, d_vocab=300)
BACKENDS = ["bridge"] + ["hooked"] * (loaders.hooked_class() is not None)


def on_meta(shape):
    """Hugging Face's own model of this shape, of which nothing is allocated."""
    with torch.device("meta"):
        model = hugging_face_model(shape)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    return model


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_exactly_so_many_parameters_and_nothing_is_allocated_to_see_it(name):
    shape = PRESETS[name].shape
    model = on_meta(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == EXACT[name]
    counted = count_parameters(shape)
    assert counted.total == EXACT[name]
    assert counted.embedding == model.get_input_embeddings().weight.numel()
    assert counted.other == EXACT[name] - counted.embedding
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    assert counted.norms == norms


@pytest.mark.skipif(loaders.hooked_class() is None, reason="TransformerLens 4 has no HookedTransformer")
@pytest.mark.parametrize("name", ["1.4B", "2.7B"])
def test_a_hooked_transformer_of_a_preset_has_as_many_trained_parameters(name):
    with torch.device("meta"):
        model = wrapped(on_meta(PRESETS[name].shape), "hooked", device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == EXACT[name]
    assert all(is_added_bias(n) for n, p in model.named_parameters() if not p.requires_grad)


@pytest.mark.parametrize("norm", ["RMS", "LN"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_for_either_norm_and_for_untied_embeddings(norm, tied):
    shape = dataclasses.replace(TINY, norm=norm, tied=tied)
    assert count_parameters(shape).total == sum(p.numel() for p in on_meta(shape).parameters())


def test_the_three_shapes_of_ours_are_near_their_names_and_the_two_published_ones_are_below_theirs():
    sizes = {"296M": 296e6, "436M": 436e6, "528M": 528e6, "1.4B": 1.4e9, "2.7B": 2.7e9}
    off = {name: EXACT[name] / size - 1 for name, size in sizes.items()}
    assert all(abs(off[name]) < 0.012 for name in ("296M", "436M", "528M"))
    assert off["1.4B"] == pytest.approx(-0.174, abs=1e-3)
    assert off["2.7B"] == pytest.approx(-0.135, abs=1e-3)
    assert {name for name, preset in PRESETS.items() if preset.published} == {"1.4B", "2.7B"}


def test_the_published_shapes_recipe_and_twenty_heads_of_the_published_code():
    small, large = PRESETS["1.4B"], PRESETS["2.7B"]
    names = ("n_layers", "n_heads", "n_key_value_heads", "d_model", "n_ctx")
    assert [getattr(small.shape, name) for name in names] == [24, 16, 4, 2048, 2048]
    assert [getattr(large.shape, name) for name in names] == [32, 32, 8, 2560, 2048]
    assert (small.recipe.lr, large.recipe.lr) == (4e-4, 3e-4)
    assert small.recipe.tokens == 200_000 * 256 * 2048
    twenty = dataclasses.replace(large.shape, n_heads=20, n_key_value_heads=5)
    assert count_parameters(twenty) == count_parameters(large.shape)
    assert flops_per_token(twenty) == flops_per_token(large.shape)


@pytest.mark.parametrize("name", PRESETS)
def test_a_gated_mlp_has_as_many_parameters_as_an_ungated_one_of_four_widths(name):
    shape = PRESETS[name].shape
    assert shape.d_mlp % 64 == 0
    assert 3 * shape.d_mlp * shape.d_model == pytest.approx(8 * shape.d_model**2, rel=0.012)
    assert shape.n_heads == 4 * shape.n_key_value_heads


def test_a_preset_is_a_run_of_the_trainer_whose_settings_can_be_changed():
    config = preset_config("2.7B", tokens="tokens", out="run", accumulation=64, seed_weights=3)
    assert config.shape == PRESETS["2.7B"].shape
    assert (config.lr, config.batch_size, config.accumulation) == (3e-4, 256, 64)
    assert config.lr_at_end == pytest.approx(3e-5)
    assert (config.steps, config.warm_up, config.clip, config.weight_decay) == (200_000, 2000, 1.0, 0.1)
    assert (config.betas, config.seed_weights, config.autocast) == ((0.9, 0.95), 3, "on")


def test_what_is_asked_for_beside_a_preset_holds_and_the_rest_is_the_presets():
    default = TrainingConfig(tokens="", out="results/train")
    shape = dataclasses.replace(default.shape, d_model=2560, n_heads=20, n_key_value_heads=5)
    given = dataclasses.replace(default, out="run", accumulation=16, gradient_checkpointing=True, shape=shape)
    config = with_preset("2.7B", given, default)
    assert config.shape == dataclasses.replace(PRESETS["2.7B"].shape, n_heads=20, n_key_value_heads=5)
    assert (config.out, config.accumulation, config.gradient_checkpointing) == ("run", 16, True)
    assert (config.steps, config.lr, config.batch_size) == (200_000, 3e-4, 256)


def test_a_preset_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(TrainingError, match=r"no preset '1.3B'.*296M, 436M"):
        find_preset("1.3B")
    with pytest.raises(TrainingError, match="no preset"):
        CostSettings(preset=("7B",))
    for wrong in (dict(utilisation=0.0), dict(utilisation=1.5), dict(devices=0), dict(sequences=0)):
        with pytest.raises(TrainingError):
            CostSettings(**wrong)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_flop_formula_is_what_torch_counts(backend):
    model, batch = build_model(TINY, 0, backend=backend), 2
    ids = torch.randint(TINY.d_vocab, (batch, TINY.n_ctx), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(ids, return_type="logits").square().sum().backward()
    beyond = counter.get_total_flops() - flops_per_token(TINY) * ids.numel()
    rotary = 2 * TINY.n_ctx * TINY.d_head // 2  # some versions of Hugging Face's model make the angles as a product
    assert beyond in ((0, rotary) if backend == "bridge" else (0,))


def test_checkpointing_runs_the_blocks_forward_once_more():
    blocks = 2 * count_parameters(TINY).block_matrices + 4 * TINY.n_layers * TINY.n_ctx * TINY.d_model
    assert flops_per_token(TINY, checkpointing=True) - flops_per_token(TINY) == blocks
    assert flops_per_token(TINY) == 6 * count_parameters(TINY).multiplied + 12 * TINY.n_layers * TINY.n_ctx * 64


def test_weights_gradients_and_optimiser_take_exactly_the_bytes_of_the_formula():
    model = build_model(TINY, 0, backend="bridge")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained)
    ids = torch.randint(TINY.d_vocab, (1, 8), generator=torch.Generator().manual_seed(0))
    model(ids, return_type="loss").backward()
    optimiser.step()
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)  # noqa: E731
    needed = memory(TINY, "data_parallel", devices=8, sequences=1, checkpointing=False)
    assert needed.weights == size(trained)
    assert needed.gradients == size(p.grad for p in trained)
    averages = [state[name] for state in optimiser.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert needed.optimiser == size(averages)
    shared = memory(TINY, "fsdp", devices=8, sequences=1, checkpointing=False)
    assert 8 * shared.weights == pytest.approx(needed.weights, abs=32)
    assert (shared.optimiser, shared.activations) == (2 * shared.weights, needed.activations)
    assert shared.gathered > needed.gathered == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_estimate_of_activations_is_near_what_autograd_keeps(backend):
    model, batch = build_model(TINY, 0, backend=backend), 4
    ids = torch.randint(TINY.d_vocab, (batch, TINY.n_ctx), generator=torch.Generator().manual_seed(0))
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # held, so that no other takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, return_type="loss")
    assert loss.requires_grad
    counted = sum(storage.nbytes() for storage in kept.values())
    assert kept_activations(TINY, ids.numel(), checkpointing=False) == pytest.approx(counted, rel=0.25)


def test_the_table_is_marked_as_computed_and_its_hours_follow_from_its_flops():
    result = cost(CostSettings(preset=("1.4B",), devices=4, utilisation=0.5))
    assert result.meta["computed"] is True
    table = result.table.set_index(["sharding", "checkpointing"])
    plain, again = table.loc[("data_parallel", False)], table.loc[("data_parallel", True)]
    assert plain["hours_h100"] == pytest.approx(plain["total_flops"] / (4 * 0.5 * 989e12) / 3600)
    assert plain["total_flops"] == pytest.approx(104_857_600_000 * (6 * 1_156_841_472 + 12 * 24 * 2048**2), rel=1e-12)
    assert 1.25 < again["hours_h100"] / plain["hours_h100"] < 1.34
    assert plain["token_file_gb"] == pytest.approx(209.7, abs=0.1)
    assert again["activations_gib"] < plain["activations_gib"] / 4
    assert len(cost_table(CostSettings(devices=1))) == 2 * len(PRESETS)  # nothing to share with


def test_the_command_prints_the_table_and_saves_it_when_asked(capsys, tmp_path):
    assert cli.main(["cost", "--preset", "1.4B", "2.7B"]) == 0
    printed = capsys.readouterr().out
    assert "computed, not measured" in printed
    assert "1,156,941,824" in printed
    assert "296M" not in printed
    assert cli.main(["cost", "--out", str(tmp_path)]) == 0
    saved = Result.load(tmp_path)
    assert set(saved.table["preset"]) == set(PRESETS)
    assert isinstance(saved.table, pd.DataFrame)
    assert cli.main(["cost", "--preset", "9B"]) == 2
    assert "there is no preset" in capsys.readouterr().err
