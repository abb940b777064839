"""The model class of lm-evaluation-harness: its numbers against plain loops and against the harness' own class."""

import importlib
import random

import local_tasks
import numpy as np
import pytest
import torch
import zoo

from lens_geometry.anatomy import attached
from lens_geometry.edits import scale
from lens_geometry.errors import DataError, HookError, ModelError
from lens_geometry.evals import edited_lm, load_tasks, own_random_state, run_tasks

lm_eval = pytest.importorskip("lm_eval")
TASKS = ["local_choice", "local_text", "local_generation"]
BACKENDS = ("bridge", "hooked", "native") if zoo.MAJOR < 4 else ("bridge", "native")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_tasks(TASKS, include_path=local_tasks.write(tmp_path_factory.mktemp("tasks")))


def model(backend="bridge", name="llama_gqa", **more):
    return zoo.build(name, backend, tokenizer=True, **more)


def answers(lm, loaded):
    run_tasks(lm, loaded, limit=None, fewshot_seed=1)
    return lm.answers


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, i, ("a task", i, 1)) for i, each in enumerate(arguments)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("edit", [{}, {"parallel": 0.0}])
def test_batch_size_changes_no_answer(backend, edit, loaded):
    found = {}
    for size in (1, 3, 7):
        hooks = scale(model(backend), "mlp", **edit) if edit else ()
        found[size] = answers(edited_lm(model(backend), hooks, batch_size=size), loaded)
    assert len(found[1]) == 9 * 3 + 9 + 9
    for size in (3, 7):
        assert [a[:3] for a in found[size]] == [a[:3] for a in found[1]]
        for a, b in zip(found[size], found[1], strict=True):
            assert a.log_likelihood == pytest.approx(b.log_likelihood, abs=1e-5)


@pytest.mark.parametrize("site", ["attn", "value_excl_self"])
def test_an_edit_that_draws_noise_or_chooses_positions_is_independent_of_the_batch_too(site, loaded):
    lms = [
        edited_lm(
            model(),
            lambda batch: scale(
                model(), site, parallel=0.0, control="isotropic", positions=slice(-3, None), batch=batch
            ),
            batch_size=size,
        )
        for size in (1, 7)
    ]
    one, seven = (answers(lm, loaded) for lm in lms)
    assert [a.said for a in one] == [a.said for a in seven]
    np.testing.assert_allclose([a.log_likelihood for a in one], [a.log_likelihood for a in seven], atol=1e-5)


def test_a_no_op_is_bit_equal_and_an_edit_moves_every_answer(loaded):
    plain, no_op, edited = (
        answers(edited_lm(model(), hooks, batch_size=4), loaded)
        for hooks in ((), scale(model(), "mlp"), scale(model(), "mlp", parallel=0.0))
    )
    assert no_op == plain
    assert all(a.log_likelihood != b.log_likelihood for a, b in zip(edited, plain, strict=True))
    assert [a.said for a in edited] != [a.said for a in plain]


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_likelihoods_are_those_of_a_plain_loop(backend):
    chosen = model(backend, dtype=torch.float64)
    hooks = scale(chosen, "attn", parallel=0.5)
    context, continuation = "The town ", "of Bath"
    found = edited_lm(chosen, hooks, batch_size=2).loglikelihood(
        requests("loglikelihood", (context, continuation), ("", continuation), ("The town", " of Bath"))
    )
    ids = [2 + b - 2 for b in chosen.tokenizer.encode(context + continuation, add_special_tokens=False)]

    def by_hand(ids, scored):
        with torch.no_grad():
            logits = chosen.run_with_hooks(torch.tensor([ids]), return_type="logits", fwd_hooks=hooks)[0]
        logs = torch.log_softmax(logits, -1)
        places = range(len(ids) - scored, len(ids))
        greedy = all(int(logs[t - 1].argmax()) == ids[t] for t in places)
        return sum(float(logs[t - 1, ids[t]]) for t in places), greedy

    for (value, greedy), expected in zip(
        found, (by_hand(ids, 8), by_hand([0, *ids[9:]], 7), by_hand(ids, 8)), strict=True
    ):  # the harness gives the context's last space to the continuation; a text without context follows BOS
        assert value == pytest.approx(expected[0], rel=1e-6)
        assert greedy == expected[1]


def test_greedy_is_true_for_what_greedy_decoding_gives():
    lm = edited_lm(model(), batch_size=1)
    (text,) = lm.generate_until(requests("generate_until", ("Bath", {"max_gen_toks": 3, "until": []})))
    ids = lm.tok_encode("Bath")
    with torch.no_grad():
        for _ in range(3):
            ids.append(int(model()(torch.tensor([ids]), return_type="logits")[0, -1].argmax()))
    assert text == lm.tokenizer.decode(ids[4:])
    assert [lm._loglikelihood_tokens([(None, ids[:4], each)])[0][1] for each in (ids[4:], [*ids[4:6], ids[6] ^ 1])] == [
        True,
        False,
    ]


@pytest.mark.parametrize("edit", [{}, {"parallel": 0.0}])
@pytest.mark.parametrize("prepend_bos", [False, True])
def test_scores_agree_with_the_harness_own_class_on_a_bridge(edit, prepend_bos, loaded):
    chosen = model()
    hooks = scale(chosen, "mlp", **edit) if edit else []
    theirs = importlib.import_module("lm_eval.models.huggingface").HFLM(
        pretrained=chosen.original_model, tokenizer=chosen.tokenizer, batch_size=1, add_bos_token=prepend_bos
    )
    ours = edited_lm(chosen, hooks, batch_size=5, prepend_bos=prepend_bos)
    tasks = TASKS if not prepend_bos else ["local_choice", "local_generation"]  # theirs scores the BOS in rolling texts
    with attached(chosen, hooks):
        expected = run_tasks(theirs, loaded, limit=None, fewshot_seed=1)
    found = run_tasks(ours, loaded, limit=None, fewshot_seed=1)
    for task in tasks:
        for a, b in zip(found["samples"][task], expected["samples"][task], strict=True):
            assert a["prompt_hash"] == b["prompt_hash"]
            if task == "local_generation":
                assert a["resps"] == b["resps"]
            elif task == "local_text":
                assert a["resps"][0][0] == pytest.approx(b["resps"][0][0], rel=1e-5)
            else:
                np.testing.assert_allclose(np.array(a["resps"], float), np.array(b["resps"], float), rtol=1e-5)
        scores = {key: value for key, value in expected["results"][task].items() if isinstance(value, float)}
        assert scores == {key: pytest.approx(found["results"][task][key], rel=1e-5) for key in scores}
        assert scores


def test_simple_evaluate_takes_it_and_says_what_was_run(tmp_path):
    manager = importlib.import_module("lm_eval.tasks").TaskManager(
        include_path=str(local_tasks.write(tmp_path / "tasks")), include_defaults=False
    )
    lm = edited_lm(model(), scale(model(), "mlp", parallel=0.0), batch_size=4)
    found = lm_eval.simple_evaluate(model=lm, tasks=["local_choice"], task_manager=manager, limit=5)
    assert set(found["results"]["local_choice"]) >= {"acc,none", "acc_norm,none"}
    assert found["config"]["edited_hooks"] == sorted(
        f"blocks.{i}.{name}" for i in range(4) for name in ("hook_mlp_out", "hook_resid_mid")
    )
    with pytest.raises(DataError, match="use_cache"):
        lm_eval.simple_evaluate(
            model=lm, tasks=["local_choice"], task_manager=manager, use_cache=str(tmp_path / "answers")
        )


def test_a_hook_that_never_fires_and_an_edit_that_changes_nothing_raise(loaded):
    silent = [("blocks.1.attn.hook_result", lambda tensor, hook: 0 * tensor)]  # fires where use_attn_result is on
    with pytest.raises(HookError, match="never fired"):
        answers(edited_lm(model(), silent), loaded)
    with pytest.raises(HookError, match="left every activation"):
        answers(edited_lm(model(), scale(model(), "mlp", parallel=0.0, positions=slice(60, 64))), loaded)
    with pytest.raises(HookError, match="no such hook"):
        edited_lm(model(), [("blocks.1.attn.hook_kk", lambda tensor, hook: tensor)])


def test_generation_ends_before_the_first_stop_sequence_at_eos_and_at_the_most_tokens():
    lm = edited_lm(model(), batch_size=2)

    def written(text, **options):
        """The answer of a model that would write `text`, one byte after the other."""
        script = iter([lm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in text] + [lm.eot_token_id])

        def scripted(ids, documents):
            return 9.0 * torch.nn.functional.one_hot(torch.full((len(ids), len(ids[0])), next(script)), 258)

        lm._logits = scripted
        (said,) = lm.generate_until(requests("generate_until", ("Q", {"max_gen_toks": 20, **options})))
        return said, len(list(script))

    assert written("ab##cd\n", until=["\n", "##"]) == ("ab", 4)
    assert written("ab##cd\n", until="\n") == ("ab##cd", 1)
    assert written("abcd", until=[]) == ("abcd", 0)
    assert written("abcd", until=[""], max_gen_toks=3) == ("abc", 2)
    assert lm.answers[-1].log_likelihood == pytest.approx(-3 * np.log1p(257 * np.exp(-9.0)), rel=1e-4)


def test_what_is_longer_than_the_context_is_cut_on_the_left_and_marked():
    lm = edited_lm(model(), batch_size=3, max_length=16)
    long, short = "x" * 30 + "The town", "wn"
    (a, _), (b, _) = lm.loglikelihood(requests("loglikelihood", (long, " of Bath"), (short, " of Bath")))
    kept = lm.tok_encode(long + " of Bath")[-17:]  # 16 to read, and the last one to predict
    assert a == pytest.approx(edited_lm(model())._loglikelihood_tokens([(None, kept[:9], kept[9:])])[0][0], abs=1e-5)
    assert a != pytest.approx(b, abs=1e-3)
    assert [answer.truncated for answer in lm.answers] == [True, False]
    options = {"until": [], "max_gen_toks": 6}
    one, two = lm.generate_until(requests("generate_until", (long, options), (long[-10:], options)))
    assert one == two
    assert [answer.truncated for answer in lm.answers[2:]] == [True, False]
    with pytest.raises(DataError, match="more than the context"):
        lm.loglikelihood(requests("loglikelihood", ("a", "b" * 17)))
    with pytest.raises(DataError, match="no room for a prompt"):
        lm.generate_until(requests("generate_until", ("a", {"max_gen_toks": 16})))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"do_sample": True}, "samples"),
        ({"temperature": 0.7}, "samples"),
        ({"num_beams": 4}, "num_beams"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
    ],
)
def test_anything_but_greedy_decoding_is_refused(options, words):
    with pytest.raises(DataError, match=words):
        edited_lm(model()).generate_until(requests("generate_until", ("a", {"max_gen_toks": 2, **options})))


def test_greedy_requests_are_accepted_however_they_say_it():
    lm = edited_lm(model())
    options = [{}, {"do_sample": False, "temperature": 0.7, "top_p": 1.0}, {"temperature": 0.0, "num_beams": 1}]
    texts = lm.generate_until(requests("generate_until", *(("a", {"max_tokens": 2, **each}) for each in options)))
    assert len(set(texts)) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_that_begins_with_the_padding_token_is_not_taken_for_padding(backend):
    chosen = model(backend, fresh=True)
    wanted = edited_lm(chosen)._loglikelihood_tokens([(None, [1, 5, 6], [7])])
    chosen.tokenizer.padding_side = "left"
    assert edited_lm(chosen)._loglikelihood_tokens([(None, [1, 5, 6], [7])]) == wanted


def test_models_tokenizers_and_settings_that_cannot_be_used_are_refused():
    with pytest.raises(ModelError, match="no tokenizer"):
        edited_lm(zoo.build("llama_gqa"))
    with pytest.raises(ModelError, match="Hugging Face model"):
        edited_lm(zoo.hugging_face("llama_gqa"))
    for settings in ({"batch_size": 0}, {"max_length": 65}, {"max_length": 0}, {"batch_size": "auto"}):
        with pytest.raises(DataError, match=next(iter(settings))):
            edited_lm(model(), **settings)
    with pytest.raises(DataError, match="no token of its own"):
        edited_lm(model()).loglikelihood(requests("loglikelihood", ("a", "")))
    with pytest.raises(ModelError, match="outside the model's vocabulary"):
        edited_lm(model())._loglikelihood_tokens([(None, [3], [4]), (None, [300, 4], [5])])


def test_tasks_that_are_not_there_are_one_error_with_the_nearest_name(tmp_path):
    include = local_tasks.write(tmp_path / "tasks")
    manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=str(include), include_defaults=False)
    with pytest.raises(DataError, match="did you mean local_choice"):
        load_tasks(["local_choise"], task_manager=manager)
    with pytest.raises(DataError, match="no task is named"):
        load_tasks([])
    with pytest.raises(DataError, match="include_path"):
        load_tasks(["local_choice"], include_path=tmp_path / "nowhere")
    (include / "documents.jsonl").unlink()
    with pytest.raises(DataError, match="could not be loaded"):
        load_tasks(["local_choice"], include_path=include)


def test_the_random_state_of_others_is_left_alone(loaded):
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    expected = random.random(), np.random.random(), float(torch.rand(()))  # noqa: NPY002
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    with own_random_state(5):
        inside = random.random(), float(torch.rand(()))
    answers(edited_lm(model()), loaded)
    assert (random.random(), np.random.random(), float(torch.rand(()))) == expected  # noqa: NPY002
    with own_random_state(5):
        assert (random.random(), float(torch.rand(()))) == inside
