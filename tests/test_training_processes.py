"""Several processes, and blocks run again in the backward pass: the numbers of one process that keeps everything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_together import together

from lens_geometry import loaders
from lens_geometry.edits import applied
from lens_geometry.errors import TrainingError
from lens_geometry.training import Shape, TrainingConfig, arm, prepare_tokens, train
from lens_geometry.training import checkpoint as saved
from lens_geometry.training.model import build_model
from lens_geometry.training.processes import Processes, check_parts, clip_gradients, join, own_rows
from lens_geometry.training.recomputation import recompute_blocks
from lens_geometry.training.suppression import Suppressor

BACKENDS = ("bridge", "hooked") if loaders.hooked_class() else ("bridge",)
ARMS = ("baseline", "value", "gate")
TINY = Shape(n_layers=2, n_heads=4, n_key_value_heads=2, d_model=32, d_mlp=48, n_ctx=16, d_vocab=300)
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune. "


def ids(batch: int = 2) -> torch.Tensor:
    return torch.randint(300, (batch, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("tokens")
    for number in range(8):
        (place / f"{number}.txt").write_text(TEXT[number:] * (number + 2))
    prepare_tokens([str(place)], place / "tokens", d_vocab=300, held_out=0.2, progress=False)
    return str(place / "tokens")


def run_of(tokens: str, out: Path, **changes: Any) -> TrainingConfig:
    settings: dict[str, Any] = dict(steps=4, batch_size=8, warm_up=2, evaluate_every=2, evaluation_sequences=5)
    settings |= dict(checkpoint_every=2, progress=False, device="cpu", shape=TINY)
    return TrainingConfig(tokens, str(out), **{**settings, **changes})


def gradients(model: Any, name: str, *, bfloat16: bool = False) -> dict[str, torch.Tensor]:
    """Of every trained parameter, the gates' too, from one batch under an arm."""
    suppressor = Suppressor(model, arm(name))
    suppressor.batch.ids = [3, 4]
    with applied(model, suppressor.hooks):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = model.train()(ids(), return_type="loss")
        loss.backward()
    found = {n: p.grad for n, p in (*model.named_parameters(), *suppressor.parameters.items()) if p.requires_grad}
    return {n: gradient for n, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "bfloat16"),
    [("value", False), ("gate", False), ("norm_matched_attn", False), ("diagonal", False), ("value", True)],
)
def test_gradients_of_recomputed_blocks_are_those_of_kept_ones_to_the_last_bit(
    backend: Any, name: str, bfloat16: bool
) -> None:
    kept = gradients(build_model(TINY, 0, backend=backend), name, bfloat16=bfloat16)
    model = build_model(TINY, 0, backend=backend)
    recompute_blocks(model)
    again = gradients(model, name, bfloat16=bfloat16)
    assert kept.keys() == again.keys()
    assert len(kept) > 10
    assert all(torch.equal(gradient, again[n]) for n, gradient in kept.items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_of_a_recomputed_block_fire_twice_in_their_order(backend: Any) -> None:
    model, fired = build_model(TINY, 0, backend=backend), []
    recompute_blocks(model)
    names = ["blocks.1.hook_resid_pre", "blocks.1.attn.hook_v", "blocks.1.attn.hook_z"]
    hooks = [(name, lambda tensor, hook, name=name: fired.append(name)) for name in names]
    with applied(model, hooks):
        loss = model.train()(ids(), return_type="loss")
        assert fired == names
        loss.backward()
    assert fired == 2 * names


def test_one_process_by_itself_does_not_import_accelerate(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setitem(sys.modules, "accelerate", None)  # importing it would fail
    assert join() == Processes(rank=0, count=1)
    config = run_of(tokens, tmp_path, steps=1, warm_up=0, backend=BACKENDS[-1])
    assert len(train(config).table) == 4


def test_rows_of_all_processes_together_are_the_part_and_none_is_twice() -> None:
    teams = [Processes(rank, 4) for rank in range(4)]
    rows = [row for team in teams for row in range(*own_rows(8, 12, team).indices(100))]
    assert rows == list(range(8, 20))
    check_parts(12, 3, teams[0])
    with pytest.raises(TrainingError, match="batch of 12 cannot be cut into 2 parts for each of 4 processes"):
        check_parts(12, 2, teams[0])


def test_several_processes_refuse_a_device_that_they_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match="cannot share 'cuda:0'"):
        join(device="cuda:0")


@pytest.mark.parametrize("largest", [0.0, 0.5, 1e6])
def test_clipping_is_that_of_torch_to_the_last_bit(largest: float) -> None:
    def made() -> list[torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        found = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 2, 2))]
        for parameter in found[:2]:  # the third has no gradient
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        return found

    ours, theirs = made(), made()
    norm = torch.nn.utils.clip_grad_norm_(theirs, largest or float("inf"))
    assert clip_gradients(ours, largest) == float(norm)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours[:2], theirs[:2], strict=True))


def curve(config: TrainingConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.out) / saved.CURVE).read_text().splitlines()]


def forget_the_end(config: TrainingConfig) -> None:
    """As if the run had been killed before its last checkpoint, of step 4, was written."""
    shutil.rmtree(Path(config.out) / "checkpoints" / "step-00000004")
    (Path(config.out) / "table.parquet").unlink()


def assert_same_curve(one: TrainingConfig, other: TrainingConfig) -> None:
    ours, theirs = curve(one), curve(other)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    assert [line.get("batch") for line in ours] == [line.get("batch") for line in theirs]
    for mine, line in zip(ours, theirs, strict=True):
        for name in ("loss", "held_out_loss", "bare_held_out_loss", "gradient_norm", "lr"):
            assert (name in mine) == (name in line)
            assert mine.get(name, 0.0) == pytest.approx(line.get(name, 0.0), abs=1e-5)


Runs = dict[tuple[str, str, str], TrainingConfig]


@pytest.fixture(scope="module")
def runs(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every arm in either class: by one process, by two that share data, and by two under FSDP in two parts each.

    The "resumed" run was begun by one process and is gone on with by two under FSDP.
    """
    place = tmp_path_factory.mktemp("runs")
    fsdp = {"sharding": "fsdp", "accumulation": 2, "gradient_checkpointing": True}
    kinds: dict[str, dict[str, Any]] = {"one": {}, "data_parallel": {"sharding": "data_parallel"}, "fsdp": fsdp}
    found = {
        (backend, name, kind): run_of(
            tokens, place / f"{backend}-{name}-{kind}", backend=backend, suppression=arm(name), **changes
        )
        for backend in BACKENDS
        for name in ARMS
        for kind, changes in kinds.items()
    }
    resumed = run_of(tokens, place / "resumed", backend=BACKENDS[-1], suppression=arm("gate"), sharding="fsdp")
    found[BACKENDS[-1], "gate", "resumed"] = resumed
    for config in (resumed, *(config for (_, _, kind), config in found.items() if kind == "one")):
        train(config)
    forget_the_end(resumed)
    together([config for (_, _, kind), config in found.items() if kind != "one"], place / "two")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data_parallel", "fsdp"])
@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_processes_have_the_curve_of_one_with_the_whole_batch(
    runs: Runs, backend: str, name: str, kind: str
) -> None:
    two, one = runs[backend, name, kind], runs[backend, name, "one"]
    assert_same_curve(two, one)
    found = [saved.newest_checkpoint(Path(config.out)) for config in (two, one)]
    assert found[0] is not None
    assert found[1] is not None
    assert {file.name for file in found[0].iterdir()} == {file.name for file in found[1].iterdir()}
    for file in ("model.safetensors", saved.OPTIMIZER):
        ours, theirs = (load_file(directory / file) for directory in found)
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(tensor, theirs[key], atol=2e-4) for key, tensor in ours.items())


@pytest.mark.slow
def test_a_run_that_one_process_began_is_gone_on_with_by_two(runs: Runs) -> None:
    assert_same_curve(runs[BACKENDS[-1], "gate", "resumed"], runs[BACKENDS[-1], "gate", "one"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["data_parallel", "fsdp"])
def test_a_run_that_two_processes_began_is_gone_on_with_by_one(runs: Runs, kind: str) -> None:
    two, one = runs[BACKENDS[-1], "gate", kind], runs[BACKENDS[-1], "gate", "one"]
    forget_the_end(two)
    result = train(two)
    assert_same_curve(two, one)
    assert result.meta["config"]["sharding"] == kind
    assert result.meta["processes"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--multi_gpu"], "2, data parallel"), (["--use_fsdp", "--fsdp_version", "2"], "2, FSDP")],
)
def test_the_launch_line_of_the_documentation_trains_in_as_many_processes(
    tokens: str, tmp_path: Path, flags: list[str], words: str
) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", *flags, "--num_processes", "2"]
    train_it = ["-m", "lens_geometry.cli", "train", "--tokens", tokens, "--out", str(tmp_path), "--device", "cpu"]
    few = dict(steps=2, warm_up=1, batch_size=4, n_layers=1, n_heads=4, d_model=32, d_mlp=48, n_ctx=16, d_vocab=300)
    settings = [text for name, value in few.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launch, *train_it, *settings, "--no-progress"], env=variables, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("held-out loss") == 1
    assert json.loads((tmp_path / "meta.json").read_text())["processes"] == words
