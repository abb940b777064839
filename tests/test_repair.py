"""Repairs of one pathway in a perturbed run, against plain hooks, formulas, and the clean run itself."""

from __future__ import annotations

import pytest
import torch
import zoo

from lens_geometry.anatomy import attached, inspect
from lens_geometry.edits import PATHWAYS, applied, clean_run, repair
from lens_geometry.errors import HookError, SiteError
from lens_geometry.norm_anatomy import require_final_norm, require_norms

IDS = zoo.tokens(2, 9)
NO_NORMS = ("olmo2", "opt_post_norm")  # their norms follow the branches


def pushed(tensor, hook):
    """A perturbation of the stream that leaves position 0 alone."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)).to(tensor.dtype)
    noise[:, 0] = 0
    return tensor + 0.3 * tensor.norm(dim=-1, keepdim=True) / tensor.shape[-1] ** 0.5 * noise


PUSH = [("blocks.1.hook_resid_pre", pushed), ("blocks.2.hook_resid_pre", pushed)]


def possible(model, layers="1-"):
    """The pathways that this model has."""
    found = []
    for pathway in PATHWAYS:
        try:
            clean_run(model, IDS, pathway, layers=layers)
        except SiteError:
            continue
        found.append(pathway)
    return found


def logits(model, hooks=()):
    with torch.no_grad(), attached(model, hooks):  # what run_with_hooks does, at a tenth of its cost on a bridge
        return model(IDS, return_type="logits")


def reads(model, hooks, names):
    """What the named hooks show in a run with these hooks."""
    kept = {}
    readers = [(name, lambda tensor, hook, name=name: kept.update({name: tensor.clone()})) for name in names]
    logits(model, [*hooks, *readers])
    return kept


QUICK = [("gpt2", "bridge"), ("neox", "bridge"), ("opt", "bridge"), ("olmo2", "bridge"), ("gpt2", "native")]
QUICK += [("llama_gqa", "hooked"), ("gemma2", "hooked"), ("opt_post_norm", "bridge")]


def cases(*backends, exclude=()):
    """Every animal, most of them in the slow suite."""
    found = zoo.cases(*backends, exclude=exclude)
    return [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in found]


@pytest.mark.parametrize(("name", "backend"), cases())
def test_repairing_everything_gives_the_clean_logits_and_repairing_nothing_the_perturbed_ones(name, backend):
    model = zoo.build(name, backend)
    pathways = possible(model)
    lacking = {"layernorm_scale", "layernorm_output"} if name in NO_NORMS else set()
    if (name == "opt" and backend == "bridge") or (backend == "native" and zoo.MAJOR < 4):
        lacking.add("attention_pattern")
    if name == "opt_post_norm":
        lacking |= {"attention_pattern", "attention_output", "mlp_output"}
    assert set(PATHWAYS) - set(pathways) == lacking
    base, perturbed = logits(model), logits(model, PUSH)
    assert not torch.equal(base, perturbed)
    clean = clean_run(model, IDS, pathways, layers="1-")
    before = {key: value.clone() for key, value in clean.items()}
    with applied(model, PUSH + repair(model, pathways, clean, layers="1-")), torch.no_grad():
        assert torch.equal(model(IDS, return_type="logits"), base)
    assert torch.equal(logits(model, PUSH), perturbed)
    assert torch.equal(logits(model, PUSH + repair(model, pathways, clean, layers="1-")), base)  # once more
    assert all(torch.equal(value, before[key]) for key, value in clean.items())
    for pathway in pathways:  # alone, each does something else, and on the clean run nothing at all
        hooks = repair(model, pathway, clean, layers="1-")
        found = logits(model, PUSH + hooks)
        assert not torch.equal(found, perturbed)
        assert torch.equal(found, base) == (pathway == "final_norm")
        assert torch.equal(logits(model, hooks), base)


HOOKS_OF = {
    "attention_pattern": "blocks.{}.attn.hook_pattern",
    "head_output": "blocks.{}.attn.hook_z",
    "attention_output": "blocks.{}.hook_attn_out",
    "mlp_output": "blocks.{}.hook_mlp_out",
}


@pytest.mark.parametrize(("name", "backend"), cases("bridge", "hooked", exclude=("opt_post_norm", "opt")))
def test_each_pathway_is_what_a_plain_hook_does(name, backend):
    model = zoo.build(name, backend)
    _, cache = model.run_with_cache(IDS)
    for pathway, hook in HOOKS_OF.items():
        plain = [(hook.format(i), lambda tensor, hook, i=i, n=hook: cache[n.format(i)].clone()) for i in (1, 3)]
        expected = logits(model, PUSH + plain)
        assert torch.equal(logits(model, PUSH + repair(model, pathway, cache, layers=(1, 3))), expected)
    if name in NO_NORMS:
        return
    shown = "hook_out" if backend == "bridge" else "hook_normalized"
    names = [f"blocks.{i}.{norm}.{shown}" for i in (1, 3) for norm in ("ln1", "ln2")]
    plain = [(n, lambda tensor, hook, n=n: cache[n].clone()) for n in names]
    expected = logits(model, PUSH + plain)
    assert torch.equal(logits(model, PUSH + repair(model, "layernorm_output", cache, layers=(1, 3))), expected)


@pytest.mark.skipif(zoo.MAJOR > 3, reason="HookedTransformer is of TransformerLens 3")
@pytest.mark.parametrize("name", ["gpt2", pytest.param("neox", marks=pytest.mark.slow), "llama_gqa", "gemma3"])
def test_both_classes_of_a_model_repair_alike(name):
    bridge, hooked = zoo.build(name), zoo.build(name, "hooked")
    for pathway in PATHWAYS:
        one, other = (
            logits(m, PUSH + repair(m, pathway, clean_run(m, IDS, pathway, layers="1-2"), layers="1-2"))
            for m in (bridge, hooked)
        )
        assert torch.allclose(one, other, atol=5e-5), pathway


@pytest.mark.parametrize(("name", "backend"), cases(exclude=(*NO_NORMS, "moe")))
def test_a_repaired_scale_is_the_norms_denominator_and_nothing_else(name, backend):
    model = zoo.build(name, backend, torch.float64)
    exact = backend != "bridge" or name == "gpt2"  # the other bridges' norms are Hugging Face's, some in float32
    norms = [norm for pair in require_norms(model, "1-3", scale=True).values() for norm in pair]
    clean = clean_run(model, IDS, "layernorm_scale", layers="1-3")
    streams = {n.name: f"{n.name[:8]}.hook_resid_{_stream(model, n.name)}" for n in norms}
    now = reads(model, PUSH + repair(model, "layernorm_scale", clean, layers="1-3"), [n.output for n in norms])
    seen = reads(model, PUSH + repair(model, "layernorm_scale", clean, layers="1-3"), [*streams.values()])
    cold = reads(model, [], [*streams.values()])
    for norm in norms:
        x, was = seen[streams[norm.name]], cold[streams[norm.name]]
        if _centred(model):
            x, was = x - x.mean(-1, keepdim=True), was - was.mean(-1, keepdim=True)
        expected = x / (was.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        if norm.output.endswith("hook_out"):
            part = getattr(model.blocks[int(norm.name[7])], norm.name[9:])
            weight = part.original_component.weight
            expected = expected * (1 + weight if name.startswith("gemma") else weight)
            if getattr(part.original_component, "bias", None) is not None:
                expected = expected + part.original_component.bias
        found = now[norm.output].reshape(expected.shape)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12 if exact and backend != "native" else 2e-5), norm.name


def _stream(model, norm):
    return "mid" if norm.endswith("ln2") and not inspect(model).parallel else "pre"


def _centred(model):
    return "RMS" not in str(model.cfg.normalization_type)


def test_rescaling_agrees_with_setting_the_scale_where_a_class_allows_both():
    model = zoo.build("gpt2", dtype=torch.float64)
    clean = clean_run(model, IDS, "layernorm_scale", layers="1-2")
    mine = logits(model, PUSH + repair(model, "layernorm_scale", clean, layers="1-2"))
    plain = [(n, lambda tensor, hook, n=n: clean[n].clone()) for n in clean]
    assert set(clean) == {f"blocks.{i}.ln{k}.hook_scale" for i in (1, 2) for k in (1, 2)}
    expected = logits(model, PUSH + plain)
    assert torch.allclose(mine, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(mine, logits(model, PUSH), atol=1e-3)


@pytest.mark.skipif(zoo.MAJOR > 3, reason="HookedTransformer is of TransformerLens 3")
def test_ln1_fires_three_times_and_is_repaired_three_times():
    model = zoo.build("llama_gqa", "hooked")
    clean = clean_run(model, IDS, "layernorm_output", layers=1)
    with applied(model, PUSH + repair(model, "layernorm_output", clean, layers=1)) as fired, torch.no_grad():
        model(IDS)
    assert fired["blocks.1.ln1.hook_normalized"] == 3
    names = [f"blocks.1.attn.hook_{x}" for x in "qkv"]
    cold, now = reads(model, [], names), reads(model, PUSH + repair(model, "layernorm_output", clean, layers=1), names)
    assert all(torch.equal(cold[name], now[name]) for name in names)


def test_the_parallel_models_branches_are_both_reset_by_their_norms():
    model = zoo.build("neox")
    clean = clean_run(model, IDS, "layernorm_output", layers=2)
    names = ["blocks.2.hook_attn_out", "blocks.2.hook_mlp_out"]
    now = reads(model, PUSH + repair(model, "layernorm_output", clean, layers=2), names)
    assert all(torch.equal(now[name], act) for name, act in reads(model, [], names).items())


def test_heads_and_positions_are_repaired_where_they_were_chosen_and_left_elsewhere():
    model = zoo.build("llama_gqa")
    for pathway, name in (("head_output", "blocks.2.attn.hook_z"), ("attention_pattern", "blocks.2.attn.hook_pattern")):
        clean = clean_run(model, IDS, pathway, layers=2)
        hooks = repair(model, pathway, clean, layers=2, heads=[0, 4], positions=slice(5, None))
        was, now = reads(model, PUSH, [name])[name], reads(model, PUSH + hooks, [name])[name]
        expected = was.clone()
        if pathway == "head_output":
            expected[:, 5:, [0, 4]] = clean[name][:, 5:, [0, 4]]
        else:
            expected[:, [0, 4], 5:] = clean[name][:, [0, 4], 5:]
        assert torch.equal(now, expected)
        assert not torch.equal(now, was)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[1, 3] = True
    clean = clean_run(model, IDS, "mlp_output", layers=2)
    name = "blocks.2.hook_mlp_out"
    now = reads(model, PUSH + repair(model, "mlp_output", clean, layers=2, positions=mask), [name])[name]
    was = reads(model, PUSH, [name])[name]
    assert torch.equal((now != was).any(-1), mask)


def test_norms_are_found_where_their_branches_read_them():
    for name, backend in QUICK:
        if name in NO_NORMS or (name, backend) not in zoo.cases():
            continue
        found = require_norms(zoo.build(name, backend), scale=True)
        assert all(
            [norm.name for norm in norms] == [f"blocks.{i}.ln1", f"blocks.{i}.ln2"] for i, norms in found.items()
        )
        assert {norm.scale_is_set for norms in found.values() for norm in norms} == {backend == "hooked"}
    for name in NO_NORMS:
        with pytest.raises(SiteError, match=r"no output of blocks\.0\.ln1 to repair"):
            require_norms(zoo.build(name))
        assert require_final_norm(zoo.build(name)).output == "ln_final.hook_out"


def test_a_clean_run_is_of_the_unedited_model_also_inside_an_edit():
    model = zoo.build("gpt2")
    expected = clean_run(model, IDS, ("mlp_output", "final_norm"), layers=(0, 2))
    assert set(expected) == {"blocks.0.hook_mlp_out", "blocks.2.hook_mlp_out", "ln_final.hook_out"}
    with model.hooks(fwd_hooks=PUSH):
        inside = clean_run(model, IDS, ("mlp_output", "final_norm"), layers=(0, 2))
        perturbed = model(IDS, return_type="logits")
    assert all(torch.equal(inside[name], act) for name, act in expected.items())
    assert torch.equal(perturbed, logits(model, PUSH))


def test_a_repair_with_nothing_to_repair_is_no_silent_one():
    model = zoo.build("llama_gqa")
    clean = clean_run(model, IDS, "attention_output", layers="0-1")
    with (
        pytest.raises(HookError, match="the repair left every activation"),
        applied(  # upstream of what is perturbed
            model, PUSH + repair(model, "attention_output", clean, layers=0)
        ),
    ):
        model(IDS)
    with applied(model, PUSH + repair(model, "attention_output", clean, layers="0-1")):
        model(IDS)


@pytest.mark.parametrize(("name", "backend"), zoo.cases("bridge", "hooked", exclude=zoo.NAMES[1:]))
def test_clean_activations_that_do_not_fit_are_refused(name, backend):
    model = zoo.build(name, backend)
    clean = clean_run(model, IDS, "attention_output", layers=1)
    hooks = PUSH + repair(model, "attention_output", clean, layers="1-2")
    with pytest.raises(HookError, match=r"have no blocks\.2\.hook_attn_out.*clean_run"):
        logits(model, hooks)
    hooks = repair(model, "attention_output", clean, layers=1)
    for ids in (IDS[:1], IDS[:, :5]):
        with pytest.raises(HookError, match="in the same batch"):
            model.run_with_hooks(ids, fwd_hooks=hooks)
    clean["blocks.1.hook_attn_out"] = clean["blocks.1.hook_attn_out"].double()
    with pytest.raises(HookError, match="float64"):
        logits(model, hooks)


@pytest.mark.parametrize(("name", "backend"), zoo.cases("bridge", "hooked", exclude=zoo.NAMES[:3] + zoo.NAMES[4:]))
def test_generation_under_a_cache_is_refused(name, backend):
    model = zoo.build(name, backend, tokenizer=True)
    for length in (1, 6):
        ids = IDS[:1, :length]
        for pathway in ("mlp_output", "final_norm"):
            hooks = repair(model, pathway, clean_run(model, ids, pathway, layers=1), layers=1)
            with pytest.raises(HookError, match="under a KV cache|without a KV cache"), model.hooks(fwd_hooks=hooks):
                model.generate(ids, max_new_tokens=3, do_sample=False, verbose=False, prepend_bos=False)


def test_the_flat_scale_of_opt_is_not_mistaken_for_that_of_another_batch():
    model = zoo.build("opt")
    clean = clean_run(model, IDS, "layernorm_scale", layers=1)
    hooks = repair(model, "layernorm_scale", {**clean, "blocks.1.ln1.hook_scale": torch.ones(3, 6, 1)}, layers=1)
    with pytest.raises(HookError, match="in the same batch"):  # 3 x 6 tokens are as many as 2 x 9
        model.run_with_hooks(zoo.tokens(3, 6), fwd_hooks=hooks)


def test_pathways_that_are_shown_but_not_used_and_names_that_are_none_are_refused():
    with pytest.raises(SiteError, match="the map is shown, not used"):
        repair(zoo.build("opt"), "attention_pattern", {})
    with pytest.raises(SiteError, match="choose among attention_pattern"):
        repair(zoo.build("gpt2"), "attention", {})
    with pytest.raises(SiteError, match="choose among"):
        repair(zoo.build("gpt2"), (), {})
    with pytest.raises(SiteError, match="no pathway that is repaired has heads"):
        repair(zoo.build("gpt2"), "mlp_output", {}, heads=[0])
    with pytest.raises(SiteError, match="heads 0 to 3"):
        repair(zoo.build("gpt2"), "head_output", {}, heads=[7])
    with pytest.raises(SiteError, match="layers 0 to 3"):
        clean_run(zoo.build("gpt2"), IDS, "mlp_output", layers=4)
    with pytest.raises(SiteError, match="after the branch"):
        repair(zoo.build("olmo2"), "layernorm_output", {}) if zoo.MAJOR < 4 else require_norms(
            zoo.build("opt_post_norm")
        )


def test_a_bfloat16_model_stays_in_its_dtype():
    model = zoo.build("gpt2", dtype=torch.bfloat16)
    base = logits(model)
    pathways = [pathway for pathway in PATHWAYS if pathway != "final_norm"]
    for pathway in pathways:
        clean = clean_run(model, IDS, pathway, layers="1-")
        found = logits(model, PUSH + repair(model, pathway, clean, layers="1-"))
        assert found.dtype == base.dtype
        assert torch.isfinite(found).all()
