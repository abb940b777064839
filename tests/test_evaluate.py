"""Tasks under many edits: the table against the harness' own numbers, its intervals, statuses and refusals."""

import json

import local_tasks
import numpy as np
import pandas as pd
import pytest
import torch
import zoo

from lens_geometry import cli
from lens_geometry.edits import scale
from lens_geometry.errors import DataError, HookError, ModelError
from lens_geometry.evals import edited_lm
from lens_geometry.evaluation_plots import evaluation_figure
from lens_geometry.experiments import evaluate, scaling_edits
from lens_geometry.report import write_report
from lens_geometry.results import Result

lm_eval = pytest.importorskip("lm_eval")
TASKS = ["local_choice", "local_text", "local_generation"]


@pytest.fixture(scope="module")
def include(tmp_path_factory):
    return local_tasks.write(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def model():
    return zoo.build("llama_gqa", tokenizer=True)


@pytest.fixture(scope="module")
def result(model, include):
    edits = {
        "mlp 0": scale(model, "mlp", parallel=0.0),
        "no-op": scale(model, "mlp"),
        "noise": lambda batch: scale(model, "mlp", parallel=0.0, control="isotropic", batch=batch),
    }
    with pytest.warns(UserWarning, match="'no-op' changed no answer"):
        return evaluate(model, TASKS, edits, include_path=include, batch_size=4, progress=False)


def row(table, **labels):
    for name, value in labels.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_there_is_a_row_for_every_task_metric_and_edit_and_for_the_unedited_model(result):
    table = result.table
    assert len(table) == 4 * 4
    assert not table.duplicated(["task", "metric", "filter", "edit"]).any()
    assert list(table["edit"].unique()) == ["none", "mlp 0", "no-op", "noise"]
    unedited = table[table["edit"] == "none"]
    assert (unedited[["change", "change_low", "change_high", "n_changed"]] == 0).all(axis=None)
    assert set(unedited["status"]) == {"ok"}


def test_values_are_the_harness_own_and_changes_their_differences(result, model, include):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(include), include_defaults=False)
    for edit, hooks in {"none": (), "mlp 0": scale(model, "mlp", parallel=0.0)}.items():
        found = lm_eval.simple_evaluate(
            model=edited_lm(model, hooks, batch_size=4), tasks=TASKS, task_manager=manager, bootstrap_iters=0
        )["results"]
        for task, metric in (("local_choice", "acc_norm"), ("local_text", "word_perplexity")):
            one = row(result.table, task=task, metric=metric, edit=edit)
            assert one["value"] == found[task][f"{metric},none"]
            assert one["change"] == one["value"] - one["base_value"]
            assert one["change_low"] <= one["change"] <= one["change_high"]
    text = row(result.table, task="local_text", metric="word_perplexity", edit="mlp 0")
    assert text["change"] != 0
    assert text["change_low"] < text["change_high"]
    assert not text["higher_is_better"]


def test_an_edit_without_effect_is_told_from_one_that_acts(result):
    table = result.table
    assert set(table[table["edit"] == "no-op"]["status"]) == {"no_effect"}
    acting = table[table["edit"].isin(["mlp 0", "noise"])]
    assert set(acting["status"]) == {"ok"}
    assert set(acting[acting["task"] == "local_text"]["n_changed"]) == {9}
    assert result.meta["counts"] == {
        "rows": 16,
        "nonfinite_rows": 0,
        "no_effect_rows": 4,
        "truncated_requests": 0,
    }


def test_meta_says_what_was_run_and_survives_saving(result, tmp_path):
    again = Result.load(result.save(tmp_path))
    pd.testing.assert_frame_equal(again.table, result.table)
    meta = again.meta
    assert meta["tasks"]["local_generation"]["generation_kwargs"] == {
        "do_sample": False,
        "max_gen_toks": 6,
        "until": ["e"],
    }
    assert meta["tasks"]["local_choice"]["documents"] == 9
    assert meta["context"] == {"max_length": 64, "prepend_bos": False, "padding": "none"}
    assert meta["edits"]["none"] == []
    assert "blocks.0.hook_mlp_out" in meta["edits"]["mlp 0"]
    assert meta["versions"]["lm-eval"] == lm_eval.__version__
    assert len(meta["model"]["fingerprint"]) == 64


def test_the_same_call_gives_the_same_table_and_hashes_whatever_the_batch_size(model, result, include, tmp_path):
    edits = {"mlp 0": scale(model, "mlp", parallel=0.0)}
    again = evaluate(model, TASKS, edits, include_path=include, batch_size=7, progress=False)
    expected = result.table[result.table["edit"].isin(["none", "mlp 0"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(again.table, expected, rtol=1e-5)
    assert again.meta["tasks"] == result.meta["tasks"]
    docs = local_tasks.documents()
    docs[4]["question"] += "?"
    other = local_tasks.write(tmp_path / "other", docs)
    moved = evaluate(model, ["local_choice"], {}, include_path=other, progress=False).meta["tasks"]["local_choice"]
    assert moved["questions_sha256"] != result.meta["tasks"]["local_choice"]["questions_sha256"]


def test_the_interval_is_a_paired_bootstrap_over_documents(model, tmp_path):
    docs = local_tasks.documents(24)
    include = local_tasks.write(tmp_path / "tasks", docs)
    edits = {"attn 0": scale(model, "attn", parallel=0.0)}
    table = evaluate(model, ["local_choice", "local_text"], edits, include_path=include, progress=False).table
    acc = row(table, metric="acc", edit="attn 0")
    lm = {name: edited_lm(model, hooks, batch_size=8) for name, hooks in {"none": (), **edits}.items()}
    right = {}
    for name, each in lm.items():
        pairs = [(doc["question"], choice) for doc in docs for choice in local_tasks.CHOICES]
        values = np.array([value for value, _ in each.loglikelihood(_requests(*pairs))]).reshape(24, 3)
        right[name] = values.argmax(1) == np.array([doc["gold"] for doc in docs])
    difference = right["attn 0"].astype(float) - right["none"]
    assert acc["change"] == pytest.approx(difference.mean())
    rng = np.random.default_rng(5)
    draws = [difference[rng.integers(24, size=24)].mean() for _ in range(4000)]
    assert acc["change_low"] == pytest.approx(np.quantile(draws, 0.025), abs=0.03)
    assert acc["change_high"] == pytest.approx(np.quantile(draws, 0.975), abs=0.03)
    assert acc["n_documents"] == 24
    text = row(table, metric="word_perplexity", edit="attn 0")
    assert text["change_low"] < text["change"] < text["change_high"]


def _requests(*pairs):
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, pair, i, ("a task", i, 1)) for i, pair in enumerate(pairs)]


def test_documents_without_a_finite_answer_are_counted_and_left_out(model, include):
    def in_long_texts(tensor, hook):
        return tensor * (0.5 if tensor.shape[1] < 28 else float("nan"))

    where = "blocks.2.hook_mlp_out"
    edits = {"some": [(where, in_long_texts)], "all": [(where, lambda tensor, hook: tensor / 0)]}
    with pytest.warns(UserWarning, match="not finite"):
        table = evaluate(model, ["local_choice"], edits, include_path=include, progress=False).table
    some, all_ = (row(table, metric="acc", edit=edit) for edit in edits)
    assert (some["status"], all_["status"]) == ("nonfinite", "nonfinite")
    assert (some["n_documents"], some["n_nonfinite"]) == (7, 2)  # documents 3 and 7 are the long ones
    halved = [(where, lambda tensor, hook: 0.5 * tensor)]
    lm = edited_lm(model, halved)
    right = []
    for index, doc in enumerate(local_tasks.documents()):
        if index not in (3, 7):
            values = [lm.loglikelihood(_requests((doc["question"], c)))[0][0] for c in doc["choices"]]
            right.append(int(np.argmax(values)) == doc["gold"])
    assert some["value"] == pytest.approx(np.mean(right))
    assert np.isnan([some["change_low"], all_["value"], all_["change"]]).all()
    assert (all_["n_documents"], all_["n_nonfinite"]) == (0, 9)
    blown = zoo.build("llama_gqa", tokenizer=True, fresh=True)
    with torch.no_grad():
        for parameter in blown.parameters():
            parameter.fill_(float("inf"))
    with pytest.raises(ModelError, match="not finite"):
        evaluate(blown, ["local_choice"], {}, include_path=include, progress=False)


@pytest.mark.filterwarnings("ignore:.*pattern:UserWarning")
def test_an_edit_that_reaches_no_answer_is_refused(include):
    opt = zoo.build("opt", tokenizer=True)  # shows its pattern and does not use it
    idle = [("blocks.0.attn.hook_pattern", lambda tensor, hook: 0.5 * tensor)]
    with pytest.raises(HookError, match="'idle' changed no answer"):
        evaluate(opt, ["local_choice"], {"idle": idle}, include_path=include, progress=False)
    with pytest.raises(HookError, match="no such hook"):
        evaluate(opt, ["local_choice"], {"idle": [("hook_nowhere", idle[0][1])]}, include_path=include)
    with pytest.raises(DataError, match="that is the unedited model's name"):
        evaluate(opt, ["local_choice"], {"none": idle}, include_path=include)


def test_few_shot_examples_limits_and_generation_follow_the_settings(model, tmp_path):
    sampled = {"generation_kwargs": {"until": ["e"], "do_sample": True, "temperature": 0.8, "top_k": 5}}
    shots = {"fewshot_split": "test", "fewshot_config": {"sampler": "default"}}
    include = local_tasks.write(tmp_path / "tasks", local_generation=sampled, local_choice={**shots, "num_fewshot": 0})
    common = {"include_path": include, "progress": False}
    with pytest.raises(DataError, match="force_greedy=True"):
        evaluate(model, ["local_generation"], {}, max_new_tokens=4, **common)
    result = evaluate(model, ["local_generation"], {}, force_greedy=True, max_new_tokens=4, limit=3, **common)
    assert set(result.table["n_documents"]) == {3}
    about = result.meta["tasks"]["local_generation"]
    assert about["generation_kwargs"] == {"until": ["e"], "do_sample": False, "max_gen_toks": 4}
    assert (about["documents"], about["documents_available"]) == (3, 9)
    with pytest.warns(UserWarning, match="fixes its number of few-shot examples at 0"):
        zero = evaluate(model, ["local_choice"], {}, num_fewshot=1, **common)
    local_tasks.write(tmp_path / "tasks", local_choice=shots)
    with pytest.warns(UserWarning, match="cut on the left"):
        one = evaluate(model, ["local_choice"], {}, num_fewshot=2, **common)
    assert (zero.meta["tasks"]["local_choice"]["num_fewshot"], one.meta["tasks"]["local_choice"]["num_fewshot"]) == (
        0,
        2,
    )
    assert (one.table["n_truncated"] > 0).all()
    again = evaluate(model, ["local_choice"], {}, num_fewshot=2, **common)
    assert again.meta["tasks"] == one.meta["tasks"]
    other = evaluate(model, ["local_choice"], {}, num_fewshot=2, fewshot_seed=7, **common)
    assert (
        other.meta["tasks"]["local_choice"]["questions_sha256"] != one.meta["tasks"]["local_choice"]["questions_sha256"]
    )


@pytest.mark.parametrize("changes", [{"batch_size": 0}, {"limit": 0}, {"num_fewshot": -1}, {"max_new_tokens": 0}])
def test_settings_out_of_range_are_refused(model, changes):
    with pytest.raises(DataError, match=next(iter(changes))):
        evaluate(model, ["local_choice"], {}, **changes)


def test_scaling_edits_are_named_and_include_their_controls(model):
    edits = scaling_edits(model, ("attn", "value"), layers="1-2", perpendicular=(0.5,), controls=("gain",))
    assert list(edits) == [
        f"{site} {component} {number}{control} layers 1-2"
        for site in ("attn", "value")
        for component, number in (("parallel", "0"), ("perpendicular", "0.5"))
        for control in ("", " gain")
    ]
    from lens_geometry.edits import Batch

    names = {name for name, _ in edits["attn perpendicular 0.5 layers 1-2"](Batch())}
    assert names == {f"blocks.{i}.{hook}" for i in (1, 2) for hook in ("hook_attn_out", "hook_resid_pre")}


def test_the_figure_and_the_report_hold_every_score(result, tmp_path):
    figure = evaluation_figure(result.table)
    assert len(figure.data) == 4
    drawn = {trace.xaxis: trace for trace in figure.data}
    assert list(drawn["x"].y) == [0, 1, 2]
    acc = result.table[(result.table["metric"] == "acc") & (result.table["edit"] != "none")]
    np.testing.assert_array_equal(drawn["x"].x, acc["change"])
    assert drawn["x"].marker.symbol[1] == "circle-open"
    assert "unedited" in figure.layout.annotations[0].text
    page = write_report([result], tmp_path / "report.html").read_text()
    for words in ("Downstream tasks", "local_text: word_perplexity", "no answer changed", "lower is better"):
        assert words in page


def test_the_command_writes_its_files_and_prints_the_table(capsys, tmp_path, include, monkeypatch):
    monkeypatch.setenv("LENS_GEOMETRY_CACHE", str(tmp_path / "cache"))
    arguments = (
        "evaluate --model tiny-random-llama --sites mlp --parallel 0 --limit 3 --no-progress --tasks local_choice"
    )
    where = ["--include-path", str(include), "--out", str(tmp_path / "out")]
    assert cli.main([*arguments.split(), *where]) == 0
    printed = capsys.readouterr().out
    assert "mlp parallel 0" in printed
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "table.parquet",
        "table.csv",
        "meta.json",
        "figure.html",
    }
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["model"]["name"] == "tiny-random-llama"
    assert cli.main([*arguments.split(), "--include-path", str(tmp_path / "nowhere")]) == 2
    assert "no such directory of tasks" in capsys.readouterr().err


FACTS = [
    ("The capital of France is", [" Paris", " Berlin", " a spoon", " seven"], 0),
    ("Two plus two is", [" blue", " four", " Tuesday", " the sea"], 1),
    ("The opposite of hot is", [" dog", " green", " cold", " song"], 2),
    ("Fish live in the", [" sky", " clock", " fire", " water"], 3),
    ("At night it is", [" dark", " soup", " nine", " Paris"], 0),
    ("A year has twelve", [" noses", " months", " colours", " kings"], 1),
    ("The sun rises in the", [" drawer", " shoe", " east", " milk"], 2),
    ("Birds can", [" read", " cook", " rust", " fly"], 3),
]


@pytest.mark.slow
def test_the_real_model_knows_more_unedited_than_without_its_perpendicular_part(tmp_path):
    from lens_geometry.models import load_model

    try:
        model = load_model("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))
    docs = [{"question": q, "choices": c, "gold": gold, "answer": c[gold].strip()} for q, c, gold in FACTS]
    include = local_tasks.write(
        tmp_path / "tasks",
        docs,
        local_generation={"generation_kwargs": {"until": [".", ",", "\n"], "max_gen_toks": 4, "do_sample": False}},
    )
    edits = {
        "without": scale(model, "value", perpendicular=0.0),
        "no-op": scale(model, "value"),
    }
    with pytest.warns(UserWarning, match="no-op"):
        table = evaluate(
            model, ["local_choice", "local_generation"], edits, include_path=include, batch_size=4, progress=False
        ).table
    acc = table[table["metric"] == "acc"].set_index("edit")
    assert acc.loc["none", "value"] >= 0.75
    assert acc.loc["without", "value"] <= acc.loc["none", "value"] - 0.25
    assert acc.loc["without", "change_low"] < acc.loc["without", "change"] < 0  # eight documents: a wide interval
    assert (table[table["edit"] == "no-op"]["n_changed"] == 0).all()
    assert (table[table["edit"] == "without"]["status"] == "ok").all()
    assert acc.loc["without", "n_changed"] >= 8 * (acc.loc["none", "value"] - acc.loc["without", "value"])
    one = evaluate(model, ["local_choice"], {}, include_path=include, batch_size=1, progress=False).table
    assert (
        one["value"].tolist() == table[(table["task"] == "local_choice") & (table["edit"] == "none")]["value"].tolist()
    )
