"""Suppression in a run of transformers.Trainer: the same curve as a loop of one's own, and what is saved."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file
from test_plain_models import bridged
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import lens_geometry as lg
from lens_geometry.edits import applied, scale, suppress
from lens_geometry.edits.suppressing import Suppression
from lens_geometry.errors import GeometryError, HookError, ModelError, SiteError
from lens_geometry.suppressed import write_suppression

STEPS, LR = 4, 1e-2


class Observed(Trainer):
    """A Trainer that keeps the batches and the losses of its training steps."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            self.batches.append(inputs["input_ids"].clone())
            self.losses.append(loss.item())
        return loss


def texts(seed=0, n=8):
    return [{"input_ids": ids, "labels": ids} for ids in zoo.tokens(n, 12, seed=seed)]


def trainer(directory, *callbacks, model=None, **settings):
    settings = {
        "max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "learning_rate": LR, "weight_decay": 0.0,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "lr_scheduler_type": "constant",
        "optim": "adamw_torch", "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 3, **settings,
    }  # fmt: skip
    made = Observed(
        model=zoo.hugging_face("llama_gqa") if model is None else model,
        args=TrainingArguments(output_dir=str(directory), **settings),
        train_dataset=texts(),
        eval_dataset=texts(seed=1, n=4),
        callbacks=list(callbacks),
    )
    made.batches, made.losses = [], []
    return made


def loop(model, loss_of, batches):
    """The same training, written out; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    losses = []
    for ids in batches:
        loss = loss_of(ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def mean_loss(logits, ids):
    """Over the 2 x 11 predictions of a batch, in the order in which transformers does it: Adam doubles roundings."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / 22


def weights(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("site", ["value", pytest.param("attn", marks=pytest.mark.slow)])
def test_the_curve_of_a_trainer_is_that_of_a_loop_with_transformer_lens_hooks(tmp_path, site):
    bridge = bridged(zoo.hugging_face("llama_gqa"))
    for name, weight in bridge.original_model.named_parameters():
        weight.requires_grad_(not name.endswith("bias"))  # TransformerLens adds one, and would clip its gradient too
    run = trainer(tmp_path, lg.SuppressionCallback(site))
    run.train()
    with applied(bridge, scale(bridge, site, parallel=0.0)):
        bridge.train()
        losses = loop(bridge.original_model, lambda ids: mean_loss(bridge(ids, return_type="logits"), ids), run.batches)
    assert len(run.losses) == STEPS
    assert run.losses == pytest.approx(losses, rel=1e-5)
    plain = zoo.hugging_face("llama_gqa").train()
    unedited = loop(plain, lambda ids: plain(ids, labels=ids).loss, run.batches)
    assert max(abs(a - b) for a, b in zip(losses, unedited, strict=True)) > 0.05


def test_without_an_edit_a_trainer_is_plain_training_to_the_last_bit(tmp_path):
    runs = [trainer(tmp_path / "bare")]
    runs += [
        trainer(tmp_path / str(i), callback)
        for i, callback in enumerate([lg.SuppressionCallback("none"), lg.SuppressionCallback("attn", parallel=1.0)])
    ]
    for run in runs:
        run.train()
    plain = zoo.hugging_face("llama_gqa").train()
    losses = loop(plain, lambda ids: plain(ids, labels=ids, num_items_in_batch=22).loss, runs[0].batches)
    for run in runs:
        assert run.losses == losses
        for name, weight in weights(run.model).items():
            assert torch.equal(weight, weights(plain)[name]), name
    assert not (tmp_path / "bare" / "checkpoint-2" / "geometry.json").exists()


def test_checkpoints_say_what_they_were_trained_under(tmp_path):
    callback = lg.SuppressionCallback("attn", 0.5, schedule="linear", schedule_steps=8, layers="1-")
    run = trainer(tmp_path, callback, save_total_limit=2)
    run.train()
    run.save_model()
    for place, done in (("checkpoint-2", 1), ("checkpoint-4", 3), (".", 3)):
        saved = json.loads((tmp_path / place / "geometry.json").read_text(encoding="utf-8"))
        assert (tmp_path / place / "config.json").exists()
        assert saved["format"] == 1
        assert Suppression.from_dict(saved["suppression"]) == callback.suppression
        assert saved["suppression"]["layers"] == "1-"
        assert saved["parallel_now"] == 1.0 - 0.5 * done / 8
    (tmp_path / "elsewhere").mkdir()
    callback.save(tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "geometry.json").read_text() == (tmp_path / "geometry.json").read_text()


def test_a_schedule_moves_the_scale_from_step_to_step(tmp_path):
    callback = lg.SuppressionCallback("value", 0.0, schedule="linear", schedule_steps=2)
    run = trainer(tmp_path, callback)
    run.train()
    model = zoo.hugging_face("llama_gqa").train()
    scales = iter((1.0, 0.5, 0.0, 0.0))
    handle = suppress(model, "value", parallel=1.0)

    def loss_of(ids):
        handle.set_parallel(next(scales))
        return model(ids, labels=ids, num_items_in_batch=22).loss

    assert run.losses == loop(model, loss_of, run.batches)


@pytest.mark.parametrize("keep_on", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_evaluations_are_under_the_edit_and_it_stays_or_goes_by_choice(tmp_path, keep_on):
    callback = lg.SuppressionCallback("value", keep_on=keep_on)
    run = trainer(tmp_path, callback, eval_strategy="steps", eval_steps=4)
    run.train()
    seen = next(line["eval_loss"] for line in run.state.log_history if "eval_loss" in line)
    clean = copy.deepcopy(zoo.hugging_face("llama_gqa"))
    clean.load_state_dict(run.model.state_dict())
    ids = torch.stack([text["input_ids"] for text in texts(seed=1, n=4)])
    with torch.no_grad():
        bare = float(clean(ids, labels=ids).loss)
        with suppress(clean, "value"):
            edited = float(clean(ids, labels=ids).loss)
    assert seen == pytest.approx(edited, rel=1e-5)
    assert abs(bare - edited) > 1e-2
    assert run.evaluate()["eval_loss"] == pytest.approx(edited if keep_on else bare, rel=1e-5)
    callback.remove()
    assert run.evaluate()["eval_loss"] == pytest.approx(bare, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_and_accumulation_change_nothing_but_rounding(tmp_path, reentrant):
    found = []
    for settings in (
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}},
    ):
        run = trainer(
            tmp_path, lg.SuppressionCallback("attn", 0.3), max_steps=2, gradient_accumulation_steps=2,
            save_strategy="no", **settings,
        )  # fmt: skip
        run.train()
        found.append(weights(run.model))
    for name, weight in found[0].items():
        assert torch.allclose(weight, found[1][name], atol=1e-6), name


def test_a_run_that_goes_on_has_the_same_curve_and_refuses_another_suppression(tmp_path):
    def callback(parallel=0.2):
        return lg.SuppressionCallback("value", parallel, schedule="cosine", schedule_steps=6)

    whole = trainer(tmp_path, callback())
    whole.train()
    rest = trainer(tmp_path, callback())
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert rest.losses == whole.losses[2:]
    with pytest.raises(ModelError, match="it differs in parallel"):
        trainer(tmp_path, callback(0.3)).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.slow
def test_the_best_checkpoint_is_left_with_its_own_scale(tmp_path):
    callback = lg.SuppressionCallback("value", 0.0, schedule="linear", schedule_steps=4)
    run = trainer(
        tmp_path, callback, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2, greater_is_better=True,
        metric_for_best_model="eval_loss", learning_rate=10.0,
    )  # fmt: skip
    run.train()
    assert run.state.best_global_step == 2  # the worse one here
    assert callback.parallel_now == 0.75
    assert json.loads((tmp_path / "geometry.json").read_text())["parallel_now"] == 0.75
    assert callback.handle.layers[0].edit.parallel == 0.75


@pytest.mark.slow
def test_trained_again_a_model_carries_one_edit(tmp_path):
    model, callback = zoo.hugging_face("llama_gqa"), lg.SuppressionCallback("mlp", 0.5)
    for _ in range(2):
        trainer(tmp_path, callback, model=model, max_steps=1, save_strategy="no").train()
    assert all(len(block.mlp._forward_hooks) == 1 for block in model.model.layers)


def test_an_edit_that_did_not_run_stops_the_training_at_its_first_step(tmp_path):
    model = zoo.hugging_face("llama_gqa")
    run = trainer(tmp_path, lg.SuppressionCallback("mlp"), model=model)
    twin = copy.deepcopy(model.model.layers[1])
    model.model.layers[1].forward = twin.forward  # as a library does that brings in layers of its own
    with pytest.raises(HookError, match="1 of 4 edits never ran"):
        run.train()
    assert len(run.losses) == 1


def test_an_edit_that_changed_nothing_is_an_error_when_training_ends(tmp_path):
    model = zoo.hugging_face("llama_gqa")
    for block in model.model.layers:
        block.mlp.down_proj.weight.requires_grad_(False).zero_()
    with pytest.raises(HookError, match="left every activation as it was"):
        trainer(tmp_path, lg.SuppressionCallback("mlp"), model=model, save_strategy="no").train()


def test_settings_that_cannot_be_are_refused_at_once():
    for arguments, error in (
        (dict(site="everything"), SiteError),
        (dict(site="value", parallel=float("inf")), GeometryError),
        (dict(site="value", schedule="linear"), GeometryError),
        (dict(site="value", layers=3.5), SiteError),
    ):
        with pytest.raises(error):
            lg.SuppressionCallback(**arguments)


def test_a_checkpoint_loaded_in_any_way_is_the_model_that_was_trained(tmp_path):
    run = trainer(tmp_path, lg.SuppressionCallback("value", 0.25, layers=[1, 3]), model=zoo.hugging_face("llama_gqa"))
    run.processing_class = zoo.tokenizer()
    run.train()
    place, ids = tmp_path / "checkpoint-4", zoo.tokens(2, 12, seed=5)
    with torch.no_grad():
        expected = run.model(ids).logits
        found = lg.load_model(str(place), device="cpu")(ids, return_type="logits")
        plain = AutoModelForCausalLM.from_pretrained(place)
        bare = plain(ids).logits
        with lg.suppress_as_saved(plain, place):
            again = plain(ids).logits
    assert torch.allclose(found, expected, atol=1e-4)
    assert torch.allclose(again, expected, atol=1e-4)
    assert not torch.allclose(bare, expected, atol=1e-2)
    for arguments, words in ((dict(site="value", gate=True), "a learned gate"), (None, "no geometry.json")):
        (place / "geometry.json").unlink()
        if arguments:
            write_suppression(place, Suppression(**arguments), 0.0)
            save_file({}, place / "gate.safetensors")
        with pytest.raises(ModelError, match=words):
            lg.suppress_as_saved(plain, place)


PROGRAM = """
import sys
from pathlib import Path
import test_trainer_callback as tests
import lens_geometry as lg
out, batch = sys.argv[1], int(sys.argv[2])
run = tests.trainer(out, lg.SuppressionCallback("value"), per_device_train_batch_size=batch, max_steps=2,
                    gradient_checkpointing=batch == 2)
run.train()
Path(out, type(run.model_wrapped).__name__).touch()
"""


@pytest.mark.slow
def test_two_processes_with_checkpointing_are_one_process_with_the_doubled_batch(tmp_path):
    here = Path(__file__).parent
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
              "localhost:0"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{here.parent}{os.pathsep}{here}", "OMP_NUM_THREADS": "1"}
    found = []
    for how, name, batch in ((launch, "two", 2), ([], "one", 4)):
        command = [sys.executable, *how, str(tmp_path / "program.py"), str(tmp_path / name), str(batch)]
        subprocess.run(command, check=True, env=environment, capture_output=True)
        found.append(load_file(tmp_path / name / "checkpoint-2" / "model.safetensors"))
        assert (tmp_path / name / "checkpoint-2" / "geometry.json").exists()
    assert (tmp_path / "two" / "DistributedDataParallel").exists()
    for weight, tensor in found[0].items():
        assert torch.allclose(tensor, found[1][weight], atol=1e-4), weight  # steps are 1e-2


@pytest.mark.slow
def test_importing_the_package_does_not_import_transformers():
    program = "import sys, lens_geometry; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
