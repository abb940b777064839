"""The trainer: equal models in either class, runs that go on bit for bit, and what stops them."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from lens_geometry import loaders, summaries
from lens_geometry.cli import main
from lens_geometry.errors import DataError, DivergedError, ModelError, ResultError, SiteError, TrainingError
from lens_geometry.models import load_model
from lens_geometry.results import alone
from lens_geometry.training import Shape, TrainingConfig, arm, prepare_tokens, train, trainer
from lens_geometry.training import checkpoint as saved
from lens_geometry.training.comparison import compare_arms
from lens_geometry.training.data import batch_numbers, open_tokens
from lens_geometry.training.model import (
    build_model,
    fresh_hugging_face_model,
    hugging_face_weights,
    open_model,
    save_model,
)
from lens_geometry.training.suppression import Suppression, Suppressor
from lens_geometry.training_plots import arms_figure
from lens_geometry.training_sections import arms_section

BACKENDS = ("bridge", "hooked") if loaders.hooked_class() else ("bridge",)
TINY = Shape(n_layers=2, n_heads=4, n_key_value_heads=2, d_model=32, d_mlp=48, n_ctx=16, d_vocab=300)
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune. "


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("tokens")
    for number in range(8):
        (place / f"{number}.txt").write_text(TEXT[number:] * (number + 2))
    prepare_tokens([str(place)], place / "tokens", d_vocab=300, held_out=0.2, progress=False)
    return str(place / "tokens")


@pytest.fixture
def config(tokens: str, tmp_path: Path) -> TrainingConfig:
    return TrainingConfig(
        tokens,
        str(tmp_path / "run"),
        shape=TINY,
        steps=6,
        batch_size=4,
        warm_up=2,
        evaluate_every=3,
        evaluation_sequences=5,
        checkpoint_every=2,
        backend="bridge",
        progress=False,
    )


def curve(config: TrainingConfig) -> list[dict[str, Any]]:
    """The lines of a run's curve without its times."""
    lines = [json.loads(line) for line in (Path(config.out) / saved.CURVE).read_text().splitlines()]
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]


@pytest.mark.parametrize("norm", ["RMS", "LN"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saved_model_gives_the_same_logits_in_plain_transformers_and_in_either_class(
    norm: Any, backend: Any, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    shape, ids = replace(TINY, norm=norm), torch.arange(24).reshape(2, 12)
    model = build_model(shape, 0, backend=backend)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        logits = model(ids, return_type="logits")
        save_model(model, shape, tmp_path)
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(plain(ids).logits, logits, rtol=1e-5, atol=1e-5)
        for other in BACKENDS:
            again = open_model(tmp_path, other)
            torch.testing.assert_close(again(ids, return_type="logits"), logits, rtol=1e-5, atol=1e-5)
            for name, weight in hugging_face_weights(again).items():
                assert torch.equal(weight, hugging_face_weights(model)[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_trains_the_parameters_of_the_recipe_and_no_bias_more(backend: Any) -> None:
    for norm in ("RMS", "LN"):
        shape = replace(TINY, norm=norm)
        model = build_model(shape, 0, backend=backend)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trained == sum(p.numel() for p in fresh_hugging_face_model(shape, 0).parameters())
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert not any(bool(p.any()) for p in frozen)


def test_models_that_differ_in_their_norm_start_from_the_same_matrices() -> None:
    rms, ln = (dict(fresh_hugging_face_model(replace(TINY, norm=n), 3).named_parameters()) for n in ("RMS", "LN"))
    assert {name for name in ln if name not in rms} == {name for name in ln if name.endswith("norm.bias")} != set()
    assert all(torch.equal(rms[name], ln[name]) for name in rms)
    other = dict(fresh_hugging_face_model(TINY, 4).named_parameters())
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(other[name], rms[name])
    assert rms[name].std().item() == pytest.approx(0.02 / 2, rel=0.1)  # sqrt(2 layers) = 2
    assert rms["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_without_an_edit_is_plain_training_bit_for_bit(config: TrainingConfig, backend: Any) -> None:
    config = replace(config, backend=backend)
    train(config)
    losses = [line["loss"] for line in curve(config) if "loss" in line]

    model = build_model(TINY, 0, backend=backend)
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = [p for p in parameters if p.ndim == 1]
    matrices = [p for p in parameters if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    windows = open_tokens(config.tokens).train.windows(TINY.n_ctx)
    plain = []
    for step in range(config.steps):
        ids, scored = windows.batch(batch_numbers(len(windows), 0, step, 4))
        logits = model(ids[:, :-1], return_type="logits")
        targets = torch.where(scored, ids[:, 1:], -100)
        loss = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none").sum() / int(scored.sum())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = trainer.learning_rate(step, config)
        optimizer.step()
        plain.append(loss.item())
    assert losses == plain
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["baseline", "value", "gate", "norm_matched"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    config: TrainingConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = replace(config, out=config.out + "-whole", suppression=arm(name))
    train(whole)
    stopped = replace(config, suppression=arm(name))
    add = saved.Curve.add

    def killed(self: saved.Curve, line: dict[str, Any]) -> None:
        if line.get("step") == 5 and "loss" in line:
            raise KeyboardInterrupt
        add(self, line)

    monkeypatch.setattr(saved.Curve, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        train(stopped)
    monkeypatch.undo()
    train(stopped)
    assert curve(stopped) == curve(whole)
    last = [saved.newest_checkpoint(Path(run.out)) for run in (stopped, whole)]
    assert (last[0] / "model.safetensors").read_bytes() == (last[1] / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["baseline", "value"])
def test_a_finished_run_is_read_and_not_run_again(
    config: TrainingConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, suppression=arm(name))
    first = train(config)
    monkeypatch.setattr(trainer, "backward", lambda *_: pytest.fail("trained again"))
    again = train(config)
    pd.testing.assert_frame_equal(first.table, again.table)


def test_two_processes_do_not_train_in_one_directory(config: TrainingConfig) -> None:
    with alone(Path(config.out), "training"), pytest.raises(ResultError, match="another process is training"):
        train(config)


def test_other_settings_in_the_same_directory_are_refused_by_name(config: TrainingConfig) -> None:
    train(config)
    with pytest.raises(
        TrainingError, match=r"differs in lr \(0.002 there, 0.0001 here\), steps \(6 there, 7 here\) .*config.json"
    ):
        train(replace(config, lr=1e-4, steps=7))
    train(replace(config, keep=1, checkpoint_every=3))  # what changes no number may change


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = saved.save_file

    def full(tensors: Any, path: Path) -> None:
        if "00000004" in str(path):
            raise OSError(28, "No space left on device")
        write(tensors, path)

    monkeypatch.setattr(saved, "save_file", full)
    with pytest.raises(TrainingError, match=r"step 4 could not be written .*No space left.*free space"):
        train(config)
    places = sorted(path.name for path in (Path(config.out) / "checkpoints").iterdir())
    assert places == ["step-00000002"]
    monkeypatch.undo()
    whole = replace(config, out=config.out + "-whole")
    train(config)
    train(whole)
    assert curve(config) == curve(whole)


def test_what_a_kill_left_of_a_checkpoint_is_no_checkpoint(config: TrainingConfig) -> None:
    train(config)
    whole = saved.newest_checkpoint(Path(config.out))
    assert whole is not None
    shutil.copytree(whole, whole.with_name(".step-00000008.unfinished"))
    half = shutil.copytree(whole, whole.with_name("step-00000009"))
    (half / "lens_geometry.json").unlink()
    assert saved.newest_checkpoint(Path(config.out)) == whole
    saved.remove_old(Path(config.out), 2)
    assert not list(whole.parent.glob(".*"))


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(config: TrainingConfig) -> None:
    train(config)
    newest = saved.newest_checkpoint(Path(config.out))
    assert newest is not None
    assert newest.name == "step-00000006"
    (newest / "model.safetensors").write_bytes(b"cut")
    assert saved.newest_checkpoint(Path(config.out)).name == "step-00000004"
    before = curve(config)
    train(config)
    assert curve(config) == before


def test_a_loss_that_is_not_finite_stops_with_the_step_the_batch_and_the_last_checkpoint(
    config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_losses = trainer.token_losses
    calls = []

    def broken(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return step_losses(*arguments) * (math.nan if torch.is_grad_enabled() and len(calls) > 8 else 1.0)

    monkeypatch.setattr(trainer, "token_losses", broken)
    with pytest.raises(TrainingError, match=r"loss is nan.*step-0000000\d \[step \d, batch [0-9a-f]{16}\]"):
        train(config)


@pytest.mark.parametrize("where", ["loss", "held-out"])
def test_a_checkpoint_is_kept_only_of_weights_whose_loss_is_finite(
    config: TrainingConfig, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "loss":
        step_of = trainer.backward

        def broken(*arguments: Any) -> float:
            return math.nan if arguments[5] == 4 else step_of(*arguments)

        monkeypatch.setattr(trainer, "backward", broken)
    else:
        measured = trainer.evaluate
        losses = iter([1.0, 1.0, 1.0, math.nan])  # bare, and before steps 0, 3 and 6
        monkeypatch.setattr(trainer, "evaluate", lambda *arguments: (next(losses), measured(*arguments)[1]))
    with pytest.raises(
        DivergedError, match=f"loss is nan.*last good checkpoint is .*step-0000000{2 if where == 'loss' else 4}"
    ):
        train(replace(config, keep=1))
    places = [path.name for path in (Path(config.out) / "checkpoints").iterdir()]
    assert places == [f"step-0000000{2 if where == 'loss' else 4}"]


def test_a_curve_that_lacks_steps_is_refused_and_never_measured_anew_from_trained_weights(
    config: TrainingConfig,
) -> None:
    train(replace(config, suppression=arm("value")))
    path = Path(config.out) / saved.CURVE
    whole = path.read_text()
    path.write_text("")
    with pytest.raises(TrainingError, match="the curve lacks steps before step 6"):
        train(replace(config, suppression=arm("value")))
    path.write_text("".join(line for line in whole.splitlines(True) if '"step": 6' not in line))
    train(replace(config, suppression=arm("value")))  # the last evaluation alone, under the edit
    assert [json.loads(line)["held_out_loss"] for line in path.read_text().splitlines() if '"step": 6' in line] == [
        json.loads(line)["held_out_loss"] for line in whole.splitlines() if '"step": 6' in line
    ]


def test_a_full_disk_when_a_run_goes_on_leaves_its_curve(
    config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config)
    path = Path(config.out) / saved.CURVE
    before = path.read_text()

    def full(self: Path, *_: Any, **__: Any) -> int:
        self.write_bytes(b"{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(TrainingError, match="No space left"):
        saved.Curve(path, 6)
    monkeypatch.undo()
    assert path.read_text() == before


def test_settings_may_change_while_there_is_no_checkpoint_and_tokens_may_be_moved(
    config: TrainingConfig, tmp_path: Path
) -> None:
    with pytest.raises(SiteError, match="no layer 7"):
        train(replace(config, suppression=Suppression("value", layers=(7,))))
    train(config)
    shutil.copytree(config.tokens, tmp_path / "elsewhere")
    train(replace(config, tokens=str(tmp_path / "elsewhere")))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(TrainingError, match="a run with other settings is here"):
        train(replace(config, out=str(tmp_path / "model")))
    with pytest.raises(ModelError, match=r"a training run, not a model.*step-00000006"):
        load_model(config.out)


def test_a_loaded_checkpoint_has_no_token_put_before_a_text_that_training_never_put_there(
    config: TrainingConfig,
) -> None:
    model = load_model(train(replace(config, steps=1, warm_up=0)).meta["checkpoint"])
    ids = model.to_tokens("It is")[0].tolist()
    assert ids == model.tokenizer("It is", add_special_tokens=False)["input_ids"]


def test_a_missing_tokenizer_is_seen_before_the_first_step(config: TrainingConfig, tmp_path: Path) -> None:
    shutil.copytree(config.tokens, tmp_path / "tokens", ignore=shutil.ignore_patterns("tokenizer"))
    with pytest.raises(DataError, match="tokenizer cannot be read"):
        train(replace(config, tokens=str(tmp_path / "tokens")))
    assert not (Path(config.out) / saved.CURVE).exists()


def test_an_optimisers_state_that_is_damaged_or_another_classs_is_one_error(config: TrainingConfig) -> None:
    train(config)
    newest = saved.newest_checkpoint(Path(config.out))
    assert newest is not None
    model = build_model(TINY, 0, backend="bridge")
    optimizer = trainer.make_optimizer(model, Suppressor(model, Suppression()), config)
    saved.load_optimizer(optimizer, newest)
    optimizer.param_groups[0]["names"][0] = "blocks.0.attn.W_Q"
    with pytest.raises(TrainingError, match="another class of model"):
        saved.load_optimizer(optimizer, newest)
    (newest / saved.OPTIMIZER).write_bytes(b"\xff" * (newest / saved.OPTIMIZER).stat().st_size)
    with pytest.raises(TrainingError, match="optimiser's state cannot be read"):
        train(config)


@pytest.mark.parametrize("broken_arm", ["baseline", "both"])
def test_a_comparison_whose_baseline_diverges_is_still_saved(
    config: TrainingConfig, broken_arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = trainer.backward

    def broken(model: Any, suppressor: Any, *rest: Any) -> float:
        return math.nan if broken_arm == "both" or not suppressor.hooks else step(model, suppressor, *rest)

    monkeypatch.setattr(trainer, "backward", broken)
    result = compare_arms(config, ["value"])
    result.save(config.out)
    final = result.table[result.table["kind"] == "final"].set_index("arm")
    assert final.loc["value", "status"] == ("diverged" if broken_arm == "both" else "no baseline")
    words = summaries.training_summary(result.table)
    assert ("the baseline of its seeds came to no end" in words) == (broken_arm == "baseline")
    assert "".join(arms_section(result.table, "key"))


def test_arms_refuse_a_suppression_beside_them(config: TrainingConfig) -> None:
    with pytest.raises(TrainingError, match="arms have their own settings"):
        compare_arms(replace(config, suppression=Suppression("mlp")), ["value"])


def test_the_command_refuses_an_unknown_arm_and_seeds_without_arms_before_anything_is_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--arms", "valeu", "--out", str(tmp_path / "run")]) == 2
    assert main(["train", "--seeds", "3", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "there is no arm 'valeu'" in said
    assert "--seeds and --first-seed count runs of --arms" in said
    assert not (tmp_path / "run").exists()


def test_accumulated_parts_make_the_same_step_as_the_whole_batch(config: TrainingConfig) -> None:
    train(config)
    parts = replace(config, out=config.out + "-parts", accumulation=2)
    train(parts)
    one, other = ([line["loss"] for line in curve(run) if "loss" in line] for run in (config, parts))
    np.testing.assert_allclose(one, other, rtol=1e-5)


def test_arms_are_compared_pair_by_pair_from_equal_weights_on_equal_batches(config: TrainingConfig) -> None:
    result = compare_arms(config, ["value", "attn:0.5"], seeds=2)
    table = result.table
    final = table[(table["kind"] == "final") & (table["at"] == "equal tokens")].set_index("arm")
    for name in ("baseline", "value", "attn:0.5"):
        runs = [train(replace(config, out=f"{config.out}/{name.replace(':', '-')}-seed{seed}", seed_weights=seed,
                              seed_batches=seed, suppression=arm(name))) for seed in (0, 1)]  # fmt: skip
        losses = [run.meta["held_out_loss"] for run in runs]
        assert final.loc[name, "held_out_loss"] == pytest.approx(np.mean(losses), abs=1e-9)
        assert final.loc[name, "change"] == pytest.approx(
            final.loc[name, "held_out_loss"] - final.loc["baseline", "held_out_loss"], abs=1e-9
        )
    assert final.loc["value", "change_low"] <= final.loc["value", "change"] <= final.loc["value", "change_high"]
    first = table[table["kind"] == "first"]
    assert first.groupby("seed")["bare_loss"].nunique().eq(1).all()
    value = first[first["arm"] == "value"]
    assert (value["held_out_loss"] != value["bare_loss"]).all()
    baseline = first[first["arm"] == "baseline"]
    assert (baseline["held_out_loss"] == baseline["bare_loss"]).all()
    assert len(arms_figure(table).data) > 6
    assert "attn:0.5" in summaries.training_summary(table)


def test_an_arm_that_diverges_is_counted_and_the_others_go_on(
    config: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = trainer.backward

    def broken(model: Any, suppressor: Any, *rest: Any) -> float:
        return math.nan if suppressor.hooks else step(model, suppressor, *rest)

    monkeypatch.setattr(trainer, "backward", broken)
    table = compare_arms(config, ["value"]).table
    final = table[(table["kind"] == "final")].set_index("arm")
    assert final.loc["value", "n_diverged"] == 1
    assert final.loc["value", "status"] == "diverged"
    assert "diverged" in summaries.training_summary(table)
    assert table[table["arm"] == "value"]["status"].str.startswith("diverged").all()


def test_runs_that_saw_other_batches_are_not_compared(config: TrainingConfig) -> None:
    compare_arms(config, ["value"])
    path = Path(config.out) / "value-seed0" / saved.CURVE
    path.write_text(path.read_text().replace('"batch": "', '"batch": "x'))
    with pytest.raises(TrainingError, match="differ in batch"):
        compare_arms(config, ["value"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"betas": (1.0, 2.0)}, "betas are"),
        ({"sharding": "FSDP"}, "unknown sharding 'FSDP'"),
        ({"batch_size": 5, "accumulation": 2}, "cannot be cut"),
        ({"shape": replace(TINY, d_vocab=290)}, "vocabulary of 300.*--d-vocab 300"),
        ({"batch_size": 10**6}, "more than the"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config: TrainingConfig, changes: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        train(replace(config, **changes))


@pytest.mark.parametrize(("how", "dtype"), [("auto", torch.float32), ("off", torch.float32), ("on", torch.bfloat16)])
def test_autocast_is_bfloat16_where_it_is_asked_for_and_left_off_on_a_cpu(
    config: TrainingConfig, how: Any, dtype: torch.dtype
) -> None:
    with trainer.autocast(replace(config, autocast=how), torch.device("cpu")):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    with pytest.raises(TrainingError, match="unknown autocast"):
        replace(config, autocast=True)


def test_a_shape_whose_heads_do_not_fit_is_refused() -> None:
    with pytest.raises(TrainingError, match="do not fit d_model 34"):
        replace(TINY, d_model=34)
    with pytest.raises(TrainingError, match="do not fit"):
        replace(TINY, n_key_value_heads=3)


def test_the_learning_rate_rises_in_a_line_and_falls_in_half_a_cosine() -> None:
    config = TrainingConfig("t", "o", steps=110, warm_up=10, lr=1.0)
    rates = [trainer.learning_rate(step, config) for step in range(110)]
    assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert rates[60] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


SCRIPT = """
import sys
from lens_geometry.training import Shape, TrainingConfig, arm, train
tokens, out = sys.argv[1:]
shape = Shape(n_layers=2, n_heads=4, n_key_value_heads=2, d_model=32, d_mlp=48, n_ctx=16, d_vocab=300)
train(TrainingConfig(tokens, out, shape=shape, steps=40, batch_size=4, warm_up=2, evaluate_every=5,
      evaluation_sequences=5, checkpoint_every=3, backend="bridge", progress=False, suppression=arm("value")))
"""


@pytest.mark.slow
def test_a_run_killed_again_and_again_has_the_curve_of_one_that_was_not(tokens: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(out: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", SCRIPT, tokens, str(out)], env=environment)

    assert start(tmp_path / "whole").wait() == 0
    for kill_at in (1, 4, 9, 17, 23, 31):
        process = start(tmp_path / "killed")
        path = tmp_path / "killed" / saved.CURVE
        while process.poll() is None:
            steps = path.read_text().count('"batch"') if path.exists() else 0
            if steps >= kill_at:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.005)
        process.wait()
    assert start(tmp_path / "killed").wait() == 0
    one, other = (
        [{k: v for k, v in json.loads(x).items() if "seconds" not in k} for x in path.read_text().splitlines()]
        for path in (tmp_path / "whole" / saved.CURVE, tmp_path / "killed" / saved.CURVE)
    )
    assert one == other
