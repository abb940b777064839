"""Continuations and the profile over steps: by hand, with and without the cache, and what they refuse."""

import math

import numpy as np
import pandas as pd
import pytest
import reference
import torch
import zoo

from lens_geometry.data import load_text, tokenize
from lens_geometry.edits import Batch, scale
from lens_geometry.errors import DataError, ModelError, SiteError
from lens_geometry.experiments import continuations, generation_profile
from lens_geometry.experiments.generation import repetition
from lens_geometry.geometry import METRICS
from lens_geometry.stats import bootstrap_means

PROMPTS = ["Hello there", "Good day", "Good luck", "It was a dark night"]
SMALL = {"max_new_tokens": 8, "progress": False}
SPECIES = ("llama_gqa", "gpt2", "gemma2", "neox", "qwen3", "opt")
CASES = [(name, backend) for name, backend in zoo.cases("bridge", "hooked") if name in SPECIES]
FAST_FIRST = [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] in ("qwen3", "neox"))) for case in CASES]


def row_of(table, **labels):
    for name, value in labels.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


def ids_of(model, text):
    return model.tokenizer(text, add_special_tokens=False)["input_ids"]


def tokens_of(row):
    return [int(token) for token in row["token_ids"].split()]


def test_a_continuation_is_that_of_a_plain_loop_and_its_numbers_are_counted_by_hand():
    model, n = zoo.build("llama_gqa", tokenizer=True), 8
    table = continuations(model, PROMPTS, sites=("attn",), parallel=(-0.5,), when=("new",), **SMALL).table
    assert len(table) == 2 * len(PROMPTS)
    for number, prompt in enumerate(PROMPTS):
        prompt_ids = torch.tensor([ids_of(model, prompt)])
        length = prompt_ids.shape[1]
        hooks = scale(model, "attn", parallel=-0.5, when="new", batch=Batch(prompt_length=length))
        written = {}
        for site, edit in (("none", []), ("attn", hooks)):
            ids = prompt_ids
            for _ in range(n):
                with torch.no_grad():
                    logits = model.run_with_hooks(ids, return_type="logits", fwd_hooks=edit)
                ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
            with torch.no_grad():
                logs = torch.log_softmax(model(ids, return_type="logits").double(), -1)[0]
            logprob = sum(float(logs[t - 1, ids[0, t]]) for t in range(length, length + n)) / n
            written[site] = ids[0, length:].tolist(), logprob
        plain, other = (row_of(table, prompt=number, site=site) for site in ("none", "attn"))
        assert plain["prompt_text"] == other["prompt_text"] == prompt
        assert tokens_of(plain) == written["none"][0]
        assert tokens_of(other) == written["attn"][0]
        agree = next((i for i in range(n) if written["none"][0][i] != written["attn"][0][i]), n)
        assert other["n_agree"] == agree
        assert pd.isna(other["first_difference"]) if agree == n else other["first_difference"] == agree
        assert plain["logprob"] == pytest.approx(written["none"][1], abs=1e-5)
        assert other["logprob"] == pytest.approx(written["attn"][1], abs=1e-5)
        assert other["logprob_change"] == pytest.approx(written["attn"][1] - written["none"][1], abs=1e-5)
        assert other["text"] == model.tokenizer.decode(prompt_ids[0].tolist() + written["attn"][0])[len(prompt) :]
        assert other["text"][: other["agreed_characters"]] == plain["text"][: other["agreed_characters"]]
    assert (table.loc[table["site"] == "attn", "n_agree"] > 0).all()  # the first one is the unedited prompt's
    assert (table.loc[table["site"] == "attn", "n_agree"] < n).any()


@pytest.mark.parametrize(("name", "backend"), FAST_FIRST)
def test_a_cache_changes_no_token_and_no_number(name, backend):
    model, prompts = zoo.build(name, backend, tokenizer=True), PROMPTS[1:]
    arguments = {"sites": ("attn", "value"), "parallel": (-0.5,), "when": ("always", "prompt", "new"), **SMALL}
    with_cache, without = (
        continuations(model, prompts, use_past_kv_cache=cached, **arguments) for cached in (True, False)
    )
    assert with_cache.meta["kv_cache"]
    assert not without.meta["kv_cache"]
    assert not [warning for warning in with_cache.meta["warnings"] if "cache" in warning]
    assert with_cache.table["token_ids"].tolist() == without.table["token_ids"].tolist()
    np.testing.assert_allclose(with_cache.table["logprob"], without.table["logprob"], atol=1e-5)
    edited = with_cache.table[with_cache.table["site"] != "none"]
    assert (edited["n_agree"] < edited["n_new"]).mean() > 0.3
    assert (edited["status"] == "ok").all()


@pytest.mark.parametrize(("name", "backend"), FAST_FIRST)
def test_the_profile_over_steps_has_the_same_numbers_with_and_without_a_cache(name, backend):
    model = zoo.build(name, backend, tokenizer=True)
    sites = ("attn", "mlp", "block", "value", "value_excl_self")
    results = [
        generation_profile(model, PROMPTS[1:3], profile_sites=sites, use_past_kv_cache=cached, **SMALL)
        for cached in (True, False)
    ]
    assert [result.meta["kv_cache"] for result in results] == [True, False]
    cached, whole = (result.table for result in results)
    for column in ("mean", "std", "ci_low", "ci_high"):
        size = whole["mean"].abs().clip(lower=0.05)
        assert ((cached[column] - whole[column]).abs() / size).max() < 2e-3, column
    assert len(whole) == 5 * (1 + 4) * 8 * len(METRICS)


@pytest.mark.parametrize("site", ["mlp", "value", "value_excl_self"])
def test_a_step_is_the_decomposition_of_its_newest_token_by_plain_loops(site):
    model, prompts = zoo.build("llama_gqa", dtype=torch.float64, tokenizer=True), PROMPTS[1:3] + PROMPTS[:1]
    settings = {"profile_sites": (site,), **SMALL}
    table = generation_profile(model, prompts, **settings).table
    written = continuations(model, prompts, sites=("attn",), parallel=(0.0,), **SMALL).table
    per_prompt = {}
    for number, prompt in enumerate(prompts):
        ids = ids_of(model, prompt) + tokens_of(row_of(written, prompt=number, site="none"))
        _, cache = model.run_with_cache(torch.tensor([ids]))
        place = len(ids_of(model, prompt)) - 1 + 3  # step 3
        for layer in range(4):
            found = reference.vectors(cache, site, layer)
            heads = [reference.numbers(*pair) for (_, t, _), pair in found.items() if t == place]
            for metric in METRICS:
                mean = math.fsum(head[metric] for head in heads) / len(heads)
                per_prompt.setdefault((layer, metric), []).append(mean)
    for (layer, metric), values in per_prompt.items():
        row = row_of(table, layer=layer, metric=metric, step=3)
        assert row["mean"] == pytest.approx(np.mean(values), rel=1e-5)
        assert row["std"] == pytest.approx(np.std(values, ddof=1), rel=1e-4)
        assert row["ci_low"] <= row["mean"] <= row["ci_high"]
        assert row["n"] == 3
    for metric in METRICS:
        over_layers = np.mean([per_prompt[layer, metric] for layer in range(4)], 0)
        row = table[table["layer"].isna() & (table["metric"] == metric) & (table["step"] == 3)].iloc[0]
        assert row["mean"] == pytest.approx(np.mean(over_layers), rel=1e-5)
        assert row["std"] == pytest.approx(np.std(over_layers, ddof=1), rel=1e-4)


def test_batch_size_and_the_order_of_prompts_change_nothing():
    model = zoo.build("llama_gqa", dtype=torch.float64, tokenizer=True)
    arguments = {"sites": ("mlp",), "parallel": (0.0,), **SMALL}
    one, other = (continuations(model, PROMPTS, batch_size=size, **arguments).table for size in (1, 8))
    pd.testing.assert_frame_equal(one, other, rtol=1e-6)
    turned = continuations(model, PROMPTS[::-1], **arguments).table
    for number, prompt in enumerate(PROMPTS):
        rows = [t[t["prompt_text"] == prompt]["token_ids"].tolist() for t in (one, turned)]
        assert rows[0] == rows[1]
        assert set(turned[turned["prompt_text"] == prompt]["prompt"]) == {len(PROMPTS) - 1 - number}
    profiles = [
        generation_profile(model, PROMPTS, profile_sites=("mlp",), batch_size=size, **SMALL).table for size in (1, 8)
    ]
    pd.testing.assert_frame_equal(*profiles, rtol=1e-5)


@pytest.mark.skipif(zoo.MAJOR > 3, reason="TransformerLens 4 has no HookedTransformer")
def test_a_cache_that_is_wrong_is_found_and_not_used():
    model, ids = zoo.build("gpt2", "hooked"), zoo.tokens(2, 6)
    bridge = zoo.build("gpt2")
    arguments = {"sites": ("attn",), "parallel": (0.5,), "when": ("new",), **SMALL}
    with pytest.warns(UserWarning, match="no KV cache was used"):
        result = continuations(model, ids, **arguments)
    assert not result.meta["kv_cache"]
    assert "the last layer is off by" in result.meta["warnings"][-1]
    expected = continuations(bridge, ids, **arguments)
    assert expected.meta["kv_cache"]
    assert result.table["token_ids"].tolist() == expected.table["token_ids"].tolist()
    with pytest.warns(UserWarning, match="no KV cache was used"):
        measured = generation_profile(model, ids, profile_sites=("attn",), **SMALL)
    whole = generation_profile(model, ids, profile_sites=("attn",), use_past_kv_cache=False, **SMALL)
    pd.testing.assert_frame_equal(measured.table, whole.table)  # nothing of the wrong run is left in it


def test_a_pattern_shown_too_late_turns_the_cache_off_with_a_warning():
    model = zoo.build("opt", tokenizer=True)
    arguments = {"parallel": (-0.5,), **SMALL}
    with pytest.warns(UserWarning, match="too late for value_excl_self"):
        result = continuations(model, PROMPTS[:2], sites=("value_excl_self",), **arguments)
    assert not result.meta["kv_cache"]
    assert result.meta["settings"]["use_past_kv_cache"]
    assert continuations(model, PROMPTS[:2], sites=("value",), **arguments).meta["kv_cache"]


def test_a_model_without_a_cache_says_so():
    with pytest.warns(UserWarning, match="this model keeps none"):
        result = continuations(zoo.build("gpt2", "native"), zoo.tokens(2, 6), sites=("mlp",), **SMALL)
    assert not result.meta["kv_cache"]


def test_a_generate_that_fails_gives_way_to_a_plain_loop(monkeypatch):
    model = zoo.build("llama_gqa", tokenizer=True)
    expected = continuations(model, PROMPTS[:1], sites=("mlp",), **SMALL).table

    def fail(*_, **__):
        raise NotImplementedError("no generation here")

    monkeypatch.setattr(type(model), "generate", fail)
    with pytest.warns(UserWarning, match="no generation here"):
        found = continuations(model, PROMPTS[:1], sites=("mlp",), **SMALL).table
    assert found["token_ids"].tolist() == expected["token_ids"].tolist()


def test_without_a_tokenizer_text_is_the_ids():
    result = continuations(zoo.build("llama_gqa"), zoo.tokens(2, 5), sites=("mlp",), parallel=(-2.0,), **SMALL)
    for row in result.table.itertuples():
        assert row.text.split() == row.token_ids.split()
        assert row.text[: row.agreed_characters].split() == row.token_ids.split()[: row.n_agree]
    assert (result.table["n_agree"] < 8).any()


def test_a_result_survives_saving(tmp_path):
    result = continuations(zoo.build("llama_gqa", tokenizer=True), PROMPTS[:2], sites=("mlp",), **SMALL)
    again = type(result).load(result.save(tmp_path))
    pd.testing.assert_frame_equal(again.table, result.table)
    assert again.meta["data"]["text"] == "2 prompts"
    assert again.meta["decoding"].startswith("greedy")


def test_the_bundled_prompts_are_used_when_none_are_given():
    model = zoo.build("llama_gqa", tokenizer=True, fresh=True)
    model.cfg.n_ctx = 200  # a byte is a token here
    model.original_model.config.max_position_embeddings = 200
    result = continuations(model, None, sites=("mlp",), parallel=(0.0,), when=("always",), **SMALL)
    assert result.meta["data"]["text"] == "4 bundled prompts"
    assert result.table["prompt"].nunique() == 4


def test_an_edit_that_changes_nothing_and_one_that_breaks_have_a_status():
    model = zoo.build("llama_gqa", fresh=True, tokenizer=True)
    arguments = {"sites": ("mlp",), "when": ("always",), **SMALL}
    assert set(continuations(model, PROMPTS[:2], parallel=(0.0, 1.0), **arguments).table["status"]) == {"ok"}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if (".1." in name and "down_proj" in name) or "blocks.1.mlp.out" in name:
                p.zero_()
    idle = continuations(model, PROMPTS[:2], parallel=(0.0,), layers="1", **arguments)
    assert idle.table["status"].tolist() == ["ok", "no_effect"] * 2
    assert idle.meta["counts"]["no_effect_rows"] == 2
    half = zoo.build("llama_gqa", dtype=torch.float16, tokenizer=True)
    broken = continuations(half, PROMPTS[:2], parallel=(1e7,), layers="3", **arguments)
    assert set(broken.table.loc[broken.table["site"] == "mlp", "status"]) == {"nonfinite"}
    assert broken.meta["counts"]["nonfinite_rows"] == 2


@pytest.mark.parametrize(
    ("prompts", "changes", "error", "words"),
    [
        (["Hello there", "a"], {}, DataError, "a prompt has 1 tokens"),
        (["Hello there", "a" * 60], {}, DataError, "it must have 2 to 56"),
        (["Hello there"], {"sequence_length": 5}, DataError, "it must have 2 to 5"),
        ([], {}, DataError, "there are no prompts"),
        (zoo.tokens(1, 60), {}, DataError, "longer than the model's context"),
        (zoo.tokens(1, 6).float(), {}, DataError, "must be integers"),
        (7, {}, DataError, "data is a int"),
        (load_text("austen"), {}, DataError, "long text is cut with tokenize"),
        (None, {"max_new_tokens": 63}, DataError, "no room for a prompt"),
        (["Hello there"], {"max_new_tokens": 1}, DataError, "max_new_tokens is 1"),
        (["Hello there"], {"when": ("later",)}, DataError, "choose among always"),
        (["Hello there"], {"parallel": ()}, DataError, "nothing to edit"),
        (["Hello there"], {"sites": ("atn",)}, SiteError, "no site"),
        (["Hello there"], {"layers": "9"}, SiteError, "layers 0 to 3"),
    ],
)
def test_what_cannot_be_continued_is_refused_with_a_cure(prompts, changes, error, words):
    with pytest.raises(error, match=words) as caught:
        continuations(zoo.build("llama_gqa", tokenizer=True), prompts, **{**SMALL, **changes})
    assert "Cure:" in str(caught.value)


def test_strings_need_a_tokenizer_and_a_model_is_needed_at_all():
    with pytest.raises(DataError, match="no tokenizer"):
        continuations(zoo.build("llama_gqa"), ["Hello there"], **SMALL)
    with pytest.raises(ModelError):
        generation_profile("smollm2-135m", ["Hello there"], **SMALL)


def test_tokens_made_beforehand_are_prompts_too():
    model = zoo.build("llama_gqa", tokenizer=True)
    tokens = tokenize(model, ["Hello there", "Good day"], sequence_length=20)
    found, expected = (
        continuations(model, prompts, sites=("mlp",), **SMALL).table
        for prompts in (tokens, ["Hello there", "Good day"])
    )
    pd.testing.assert_frame_equal(found, expected)


def test_hooks_and_mode_are_as_they_were_afterwards():
    model = zoo.build("llama_gqa", tokenizer=True, fresh=True)
    model.train()
    state = torch.get_rng_state()
    continuations(model, PROMPTS[:1], sites=("mlp",), **SMALL)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_repetition_counts_what_was_there_before():
    assert repetition([5, 5, 5, 5, 5]) == pytest.approx(2 / 3)
    assert repetition([1, 2, 3, 4]) == 0.0
    assert math.isnan(repetition([1, 2]))


def test_bootstrap_means_are_those_of_items_drawn_together():
    values = np.random.default_rng(0).normal(size=(3, 40)) + np.arange(3)[:, None]
    found = bootstrap_means(values, resamples=4000)
    np.testing.assert_allclose(found["mean"], values.mean(1))
    np.testing.assert_allclose(found["std"], values.std(1, ddof=1))
    half = (found["ci_high"] - found["ci_low"]) / 2
    np.testing.assert_allclose(half, 1.96 * values.std(1) / 40**0.5, rtol=0.08)
    holes = values.copy()
    holes[0, :5], holes[1, 0] = np.nan, np.inf
    left = bootstrap_means(holes)
    np.testing.assert_allclose(left["mean"], [values[0, 5:].mean(), values[1, 1:].mean(), values[2].mean()])
    assert np.isnan(bootstrap_means(values[:, :1])["ci_low"]).all()
