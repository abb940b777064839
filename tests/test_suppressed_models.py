"""A checkpoint that was trained under an edit is that edited model wherever it is loaded and run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import zoo

import lens_geometry as lg
from lens_geometry import bundled, models, runner
from lens_geometry.anatomy import attached
from lens_geometry.edits import remove_diagonal, scale
from lens_geometry.edits.noise import SharedNoise
from lens_geometry.errors import HookError, ModelError, ResultError
from lens_geometry.loading_options import HowLoaded, Loading
from lens_geometry.prefix import Streams
from lens_geometry.suppressed import read_suppression, save_suppression
from lens_geometry.training.suppression import ARMS, Suppression, Suppressor, arm

BACKENDS = ("bridge", "hooked") if zoo.MAJOR < 4 else ("bridge",)
IDS = torch.arange(40, 80).reshape(2, 20)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENS_GEOMETRY_CACHE", str(tmp_path_factory.mktemp("cache")))
        return bundled.bundled_directory("tiny-random-llama")


@pytest.fixture(scope="module")
def bare(plain: Path) -> Any:
    return lg.load_model(str(plain))


def checkpoint(plain: Path, where: Path, suppression: Suppression, model: Any) -> tuple[Path, Suppressor]:
    """A copy of a model's directory that says it was trained under a suppression, its gates not at zero."""
    directory = Path(shutil.copytree(plain, where / "checkpoint"))
    suppressor = Suppressor(model, suppression, batch=SharedNoise())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in suppressor.parameters.values():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    save_suppression(directory, suppressor)
    return directory, suppressor


def logits(model: Any, hooks: Any = (), ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad(), attached(model, list(hooks)):
        return model(ids, return_type="logits")


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "bridge") for name in [*ARMS, "value:0.5"]), *((name, BACKENDS[-1]) for name in ("value", "gate"))],
)
def test_a_loaded_checkpoint_computes_what_was_trained(
    name: str, backend: str, plain: Path, bare: Any, tmp_path: Path
) -> None:
    directory, suppressor = checkpoint(plain, tmp_path, arm(name), bare)
    model = lg.load_model(str(directory), backend=backend)
    assert torch.allclose(logits(model), logits(bare, suppressor.hooks), atol=1e-4)
    found = models.describe(model)["suppression"]
    if name == "baseline":
        assert found is None
    else:
        assert not torch.allclose(logits(model), logits(bare), atol=1e-3)
        assert found["status"] == "attached"
        assert found["settings"] == json.loads(json.dumps(arm(name).as_dict()))


def test_a_checkpoint_saved_within_a_schedule_is_loaded_at_its_scale(plain: Path, bare: Any, tmp_path: Path) -> None:
    suppression = Suppression("attn", parallel=0.2, schedule="cosine", schedule_steps=10)
    directory, suppressor = checkpoint(plain, tmp_path, suppression, bare)
    suppressor.at_step(5)
    save_suppression(directory, suppressor)
    model = lg.load_model(str(directory))
    assert models.describe(model)["suppression"]["parallel_now"] == pytest.approx(0.6)
    assert torch.allclose(logits(model), logits(bare, scale(bare, "attn", parallel=0.6)), atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_edit_survives_what_a_notebook_does_and_its_own_removal_is_said(
    backend: str, plain: Path, bare: Any, tmp_path: Path
) -> None:
    directory, _ = checkpoint(plain, tmp_path, arm("value"), bare)
    model = lg.load_model(str(directory), backend=backend)
    before = logits(model)
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: x + 1)]):
        assert not torch.equal(model(IDS), before)
    model.reset_hooks()
    _, cache = model.run_with_cache(IDS)
    assert torch.equal(logits(model), before)
    z, v = cache["blocks.1.attn.hook_z"], cache["blocks.1.attn.hook_v"].repeat_interleave(2, 2)
    assert torch.cosine_similarity(z, v, dim=-1)[:, 1:].abs().max() < 1e-4
    assert runner.model_warnings(model) == []
    model.reset_hooks(including_permanent=True)
    assert models.describe(model)["suppression"]["status"] == "removed"
    assert "was removed" in runner.model_warnings(model)[0]


def test_an_edit_of_ones_own_comes_after_the_models(plain: Path, bare: Any, tmp_path: Path) -> None:
    directory, suppressor = checkpoint(plain, tmp_path, arm("value:0.5"), bare)
    model = lg.load_model(str(directory))
    for site in ("mlp", "value", "attn"):
        one_after_the_other = [*suppressor.hooks, *scale(bare, site, parallel=0.3, perpendicular=0.8)]
        with lg.applied(model, scale(model, site, parallel=0.3, perpendicular=0.8)):
            assert torch.allclose(model(IDS), logits(bare, one_after_the_other), atol=1e-6)


@pytest.mark.parametrize("name", ["value_excl_self", "gate", "diagonal"])
def test_a_suppressed_model_generates_the_same_with_and_without_a_cache(
    name: str, plain: Path, bare: Any, tmp_path: Path
) -> None:
    directory, suppressor = checkpoint(plain, tmp_path, arm(name), bare)
    model = lg.load_model(str(directory))
    made = [
        model.generate(
            IDS[:1, :8], max_new_tokens=6, use_past_kv_cache=cached, do_sample=False, verbose=False,
            stop_at_eos=False, return_type="tokens", prepend_bos=False,
        )
        for cached in (True, False)
    ]  # fmt: skip
    assert torch.equal(*made)
    ids = IDS[:1, :8]
    for _ in range(6):
        ids = torch.cat([ids, logits(bare, suppressor.hooks, ids)[:, -1:].argmax(-1)], 1)
    assert torch.equal(made[0], ids)


def test_the_norm_matched_control_refuses_a_cache_where_its_noise_would_not_know_its_place(
    plain: Path, bare: Any, tmp_path: Path
) -> None:
    model = lg.load_model(str(checkpoint(plain, tmp_path, arm("norm_matched"), bare)[0]))
    with pytest.raises(HookError, match="KV cache"):
        model.generate(IDS[:1, :8], max_new_tokens=3, use_past_kv_cache=True, do_sample=False, verbose=False)


@pytest.mark.parametrize("name", ["gate", "norm_matched"])
def test_experiments_see_the_suppressed_model_in_any_batch_size(
    name: str, plain: Path, bare: Any, tmp_path: Path
) -> None:
    model = lg.load_model(str(checkpoint(plain, tmp_path, arm(name), bare)[0]))
    tables = []
    for size in (1, 3):
        settings = {"batch_size": size, "progress": False, "controls": (), "perpendicular": (), "sites": ("value",)}
        result = lg.scaling_sweep(model, torch.arange(60).reshape(5, 12), parallel=(0.0,), **settings)
        tables.append(result.table)
        assert result.meta["model"]["suppression"]["status"] == "attached"
        assert not any("hooks of its own" in line for line in result.meta["warnings"])
    assert tables[0]["loss"].to_numpy() == pytest.approx(tables[1]["loss"].to_numpy(), rel=1e-5)
    with torch.no_grad():
        base = float(model(torch.arange(60).reshape(5, 12), return_type="loss"))
    assert tables[0]["base_loss"].iloc[0] == pytest.approx(base, rel=1e-5)


def test_the_prefix_of_a_suppressed_model_is_reused(plain: Path, bare: Any, tmp_path: Path) -> None:
    model = lg.load_model(str(checkpoint(plain, tmp_path, arm("gate"), bare)[0]))
    tokens = lg.tokenize(model, torch.arange(60).reshape(5, 12))
    assert Streams(model, tokens, [0, 2]).kept.keys() == {2}
    settings = runner.RunSettings(batch_size=2, progress=False)
    hooks = scale(model, "mlp", parallel=0.0, layers=2)
    whole, reused = (
        runner.run_conditions(
            model, tokens, [runner.Condition("edit", lambda batch: hooks, first_layer=layer)], settings
        )
        for layer in (0, 2)
    )
    assert (whole["edit"].sums == reused["edit"].sums).all()
    assert (whole["edit"].sums != whole["base"].sums).any()


def test_a_clean_run_is_the_suppressed_model(plain: Path, bare: Any, tmp_path: Path) -> None:
    directory, suppressor = checkpoint(plain, tmp_path, arm("value"), bare)
    model = lg.load_model(str(directory))
    with attached(bare, suppressor.hooks):
        _, expected = bare.run_with_cache(IDS)
    clean = lg.clean_run(model, IDS, "attention_output")
    assert clean
    for name, activation in clean.items():
        assert torch.allclose(activation, expected[name], atol=1e-5)


def test_a_journal_of_the_bare_model_is_not_gone_on_with(plain: Path, bare: Any, tmp_path: Path) -> None:
    directory, _ = checkpoint(plain, tmp_path, arm("value"), bare)
    sweep = {"sites": ("mlp",), "parallel": (0.0,), "controls": (), "perpendicular": (), "progress": False}
    data = torch.arange(60).reshape(5, 12)
    lg.scaling_sweep(lg.load_model(str(directory)), data, out=tmp_path / "out", **sweep)
    left_out = lg.load_model(str(directory), without_suppression=True)
    with pytest.warns(UserWarning, match="left out"), pytest.raises(ResultError, match="suppression"):
        lg.scaling_sweep(left_out, data, out=tmp_path / "out", **sweep)


def test_results_of_a_model_whose_suppression_was_left_out_say_so(plain: Path, bare: Any, tmp_path: Path) -> None:
    directory, _ = checkpoint(plain, tmp_path, arm("value"), bare)
    model = Loading(str(directory), HowLoaded(without_suppression=True)).load()
    with pytest.warns(UserWarning, match="left out"):
        result = lg.profile(model, IDS, progress=False)
    assert result.meta["model"]["suppression"]["status"] == "left out"
    assert result.meta["model"]["suppression"]["settings"]["site"] == "value"
    assert any("left out" in line for line in result.meta["warnings"])


def damaged(directory: Path, **changes: Any) -> None:
    path = directory / "geometry.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def without(directory: Path, key: str) -> None:
    path = directory / "geometry.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != key}))


def narrower(directory: Path) -> None:
    gates = safetensors.torch.load_file(directory / "gate.safetensors")
    safetensors.torch.save_file(
        {name: gate[:5].clone() for name, gate in gates.items()}, directory / "gate.safetensors"
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: damaged(d, suppression={**arm("gate").as_dict(), "site": "vaule"}), "no suppression with site"),
        (lambda d: damaged(d, suppression={**arm("gate").as_dict(), "temperature": 2}), "no settings of a suppression"),
        (lambda d: damaged(d, suppression={**arm("gate").as_dict(), "parallel": "half"}), "no finite number"),
        (lambda d: damaged(d, suppression=["value"]), "no settings of a suppression"),
        (lambda d: damaged(d, suppression={**arm("gate").as_dict(), "layers": [99]}), "no layer 99"),
        (lambda d: damaged(d, format=2), "newer lens-geometry"),
        (lambda d: damaged(d, format="x"), "format 'x'"),
        (lambda d: damaged(d, parallel_now=None), "cannot be read"),
        (lambda d: damaged(d, parallel_now=float("nan")), "contradicts the settings"),
        (lambda d: damaged(d, parallel_now=0.5), "contradicts the settings"),
        (lambda d: without(d, "format"), "cannot be read"),
        (lambda d: without(d, "suppression"), "cannot be read"),
        (lambda d: (d / "geometry.json").write_text("{"), "cannot be read"),
        (lambda d: (d / "geometry.json").write_text("[]"), "cannot be read"),
        (lambda d: (d / "geometry.json").write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda d: (d / "gate.safetensors").unlink(), "gate are missing"),
        (lambda d: (d / "gate.safetensors").write_bytes(b"nonsense"), "cannot be read"),
        (lambda d: safetensors.torch.save_file({"gate.0": torch.zeros(64)}, d / "gate.safetensors"), "does not fit"),
        (narrower, r"gate.0 is \(5,\)"),
    ],
)
def test_an_edit_that_cannot_be_read_or_attached_is_never_left_out_in_silence(
    damage: Any, words: str, plain: Path, bare: Any, tmp_path: Path
) -> None:
    directory, _ = checkpoint(plain, tmp_path, arm("gate"), bare)
    damage(directory)
    with pytest.raises(ModelError, match=words) as caught:
        lg.load_model(str(directory))
    assert "without_suppression=True" in str(caught.value)


def test_an_edit_that_cannot_be_read_may_be_left_out_by_name(plain: Path, bare: Any, tmp_path: Path) -> None:
    directory, _ = checkpoint(plain, tmp_path, arm("gate"), bare)
    damaged(directory, format=2)
    model = lg.load_model(str(directory), without_suppression=True)
    assert torch.equal(logits(model), logits(bare))
    found = models.describe(model)["suppression"]
    assert found["status"] == "left out"
    assert "format 2" in found["problem"]


def test_a_checkpoint_saved_again_without_a_gate_keeps_none(plain: Path, bare: Any, tmp_path: Path) -> None:
    directory, _ = checkpoint(plain, tmp_path, arm("gate"), bare)
    save_suppression(directory, Suppressor(bare, arm("value")))
    assert not (directory / "gate.safetensors").exists()
    found = read_suppression(directory)
    assert found is not None
    assert found.suppression == arm("value")
    assert read_suppression(plain) is None


def test_the_diagonal_arms_are_the_two_removals(plain: Path, bare: Any) -> None:
    for name, renormalise in (("diagonal", True), ("diagonal_shrinking", False)):
        expected = logits(bare, remove_diagonal(bare, renormalise=renormalise))
        assert torch.equal(logits(bare, Suppressor(bare, arm(name)).hooks), expected)
