"""Edits in generation: the same tokens with and without a KV cache, and `when` edits what it says."""

import pytest
import torch
import zoo

from lens_geometry.anatomy import attached, inspect
from lens_geometry.edits import WHEN, Batch, applied, scale
from lens_geometry.errors import HookError
from lens_geometry.sites import SITES

EDITED = ("attn", "mlp", "block", "value", "value_excl_self")
SLOW = ("mlp", "block", "value")  # of the same kind as the two others
SPECIES = ("llama_gqa", "gpt2", "gemma2", "neox", "qwen3", "opt")
CASES = [(name, backend) for name, backend in zoo.cases() if name in SPECIES]
NEW = 12  # with a prompt of 6: well beyond the window of 8 of gemma2


def keeps_cache(name, backend):
    """Native bridges run whole sequences whatever they are asked for; a late pattern cannot be had from a cache."""
    return backend != "native" and inspect(zoo.build(name, backend, tokenizer=True)).layers[0].score_scale is None


def generated(model, ids, hooks=(), cached=True, n=NEW):
    with torch.no_grad(), applied(model, list(hooks)):
        return model.generate(
            ids, max_new_tokens=n, do_sample=False, stop_at_eos=False, use_past_kv_cache=cached, prepend_bos=False,
            return_type="tokens", verbose=False,
        )  # fmt: skip


def greedy_loop(model, ids, hooks_of=lambda ids: [], n=NEW):
    """Whole sequences, one token at a time, with hooks made anew for each length; the tokens and the last logits."""
    logits = None
    for _ in range(n):
        with torch.no_grad(), attached(model, hooks_of(ids)):
            logits = model(ids, return_type="logits")[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids, logits


@pytest.mark.parametrize("site", [pytest.param(s, marks=[pytest.mark.slow] * (s in SLOW)) for s in EDITED])
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_edited_generation_gives_the_same_tokens_with_and_without_the_cache(name, backend, site):
    model, ids = zoo.build(name, backend, tokenizer=True), zoo.tokens(2, 6)
    if inspect(model).refusal(SITES[site], 0, editing=True):
        pytest.skip("this model does not have the site")
    if site == "value_excl_self" and backend == "bridge" and not keeps_cache(name, backend):
        for when in WHEN:
            hooks = scale(model, site, parallel=-1.5, when=when, batch=Batch(prompt_length=6))
            with pytest.raises(HookError, match="KV cache"):
                generated(model, ids, hooks)
        return
    unedited = generated(model, ids, cached=False)
    found = {}
    for when in WHEN:
        hooks = scale(model, site, parallel=-1.5, when=when, batch=Batch(prompt_length=6))
        texts = [generated(model, ids, hooks, cached) for cached in (True, False)]
        assert torch.equal(*texts), when
        assert not torch.equal(texts[0], unedited), when
        found[when] = texts[0]
    assert torch.equal(found["new"][:, :7], unedited[:, :7])  # the first new token is the unedited prompt's
    assert not torch.equal(found["new"], found["always"])


@pytest.mark.parametrize("site", EDITED)
@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "neox"])
def test_when_is_the_mask_of_prompt_or_new_tokens_in_a_plain_loop(name, site):
    model, ids = zoo.build(name, tokenizer=True), zoo.tokens(2, 6)

    def masked(new):
        def hooks_of(ids):
            mask = torch.zeros(ids.shape, dtype=torch.bool)
            mask[:, 6:] = True
            return scale(model, site, parallel=-0.5, positions=mask if new else ~mask)

        return hooks_of

    for when in ("new", "prompt"):
        expected, logits = greedy_loop(model, ids, masked(when == "new"))
        hooks = scale(model, site, parallel=-0.5, when=when, batch=Batch(prompt_length=6))
        assert torch.equal(generated(model, ids, hooks, cached=True), expected)
        once = model.run_with_hooks(expected[:, :-1], return_type="logits", fwd_hooks=hooks)[:, -1]
        assert torch.equal(once, logits)


@pytest.mark.parametrize("site", EDITED)
def test_when_leaves_the_other_tokens_to_the_bit(site):
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 12)
    name = SITES[site].target
    hook = {"attn_out": "hook_attn_out", "mlp_out": "hook_mlp_out", "z": "attn.hook_z", "resid_post": "hook_resid_post"}
    kept = []
    for hooks in (
        [],
        scale(model, site, parallel=0.3, layers=1, when="prompt", batch=Batch(prompt_length=5)),
        scale(model, site, parallel=0.3, layers=1, when="new", batch=Batch(prompt_length=5)),
    ):
        keep = (f"blocks.1.{hook[name]}", lambda tensor, hook: kept.append(tensor.clone()))
        with torch.no_grad():
            model.run_with_hooks(ids, fwd_hooks=[*hooks, keep])
    base, prompt, new = kept
    assert torch.equal(new[:, :5], base[:, :5])
    assert torch.equal(prompt[:, 5:], base[:, 5:])
    assert not torch.allclose(prompt[:, 1:5], base[:, 1:5], atol=1e-3)
    assert not torch.allclose(new[:, 5:], base[:, 5:], atol=1e-3)


def test_left_padding_counts_as_prompt():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    hooks = scale(model, "mlp", parallel=0.0, when="new", batch=Batch(prompt_length=7))
    with torch.no_grad():
        base = model(ids, attention_mask=mask, return_type="logits")
        with applied(model, hooks):
            edited = model(ids, attention_mask=mask, return_type="logits")
    real = mask[:, :7].bool()  # padding's own rows attend to anything, and nothing attends to them
    assert torch.equal(edited[:, :7][real], base[:, :7][real])
    assert not torch.allclose(edited[:, 7:], base[:, 7:], atol=1e-3)


def test_one_batch_object_serves_prompts_of_different_lengths():
    model, batch = zoo.build("llama_gqa", tokenizer=True), Batch()
    found = []
    with applied(model, scale(model, "attn", parallel=-0.5, when="new", batch=batch)):
        for length in (4, 9):
            batch.prompt_length = length
            found.append(
                model.generate(
                    zoo.tokens(1, length), max_new_tokens=6, do_sample=False, stop_at_eos=False, verbose=False
                )
            )
    for length, tokens in zip((4, 9), found, strict=True):
        fresh = scale(model, "attn", parallel=-0.5, when="new", batch=Batch(prompt_length=length))
        assert torch.equal(tokens, generated(model, zoo.tokens(1, length), fresh, n=6))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"when": "later"}, "choose one of always, prompt, new"),
        ({"when": "new"}, "Batch(prompt_length="),
        ({"when": "prompt", "batch": None}, "Batch(prompt_length="),
    ],
)
def test_a_when_that_cannot_be_is_refused_at_once_with_a_cure(arguments, words):
    with pytest.raises(HookError) as caught:
        scale(zoo.build("llama_gqa"), "mlp", parallel=0.0, **arguments)
    assert words in str(caught.value)
    assert "Cure:" in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "length", "words"),
    [
        (Batch(), 6, "prompt_length is None"),
        (Batch(prompt_length=0), 6, "prompt_length is 0"),
        (Batch(prompt_length=True), 6, "prompt_length is True"),
        (Batch(prompt_length=1), 1, "prompt of one token"),
        (Batch(prompt_length=8), 6, "neither the whole prompt"),
    ],
)
def test_a_pass_whose_new_tokens_are_not_known_is_refused(batch, length, words):
    model = zoo.build("llama_gqa")
    for when in ("new", "prompt"):
        hooks = scale(model, "mlp", parallel=0.0, when=when, batch=batch)
        with pytest.raises(HookError, match=words), applied(model, hooks):
            model(zoo.tokens(1, length))


@pytest.mark.parametrize("site", EDITED)
def test_several_tokens_that_go_on_from_a_cache_are_refused(site):
    model, ids = zoo.build("llama_gqa"), zoo.tokens(1, 12)
    cache = model.original_model(ids[:, :4], use_cache=True).past_key_values
    hooks = scale(model, site, parallel=0.0, when="new", batch=Batch(prompt_length=4))
    with pytest.raises(HookError, match="goes on from a KV cache"), applied(model, hooks):
        model(ids[:, 4:], past_key_values=cache)


def test_an_edit_of_new_tokens_that_met_none_is_an_error_that_says_so():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 6)
    hooks = scale(model, "mlp", parallel=0.0, when="new", batch=Batch(prompt_length=6))
    with pytest.raises(HookError, match="when='new' needs passes over new tokens"), applied(model, hooks):
        model(ids)
    with applied(model, hooks):  # and none when it met one
        model(zoo.tokens(2, 7))
