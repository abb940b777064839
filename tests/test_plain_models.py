"""The edit on plain Hugging Face models: equal to the TransformerLens form, and gone without a trace."""

import copy
import threading

import pytest
import torch
import transformers
import zoo
from torch import nn

import lens_geometry as lg
from lens_geometry.edits import PLAIN_SITES, applied, scale, suppress
from lens_geometry.edits.plain_layouts import LAYOUTS
from lens_geometry.errors import GeometryError, HookError, ModelError, SiteError

# fmt: off
_COMMON = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=4, num_attention_heads=6,
               num_key_value_heads=2, vocab_size=zoo.VOCAB, max_position_embeddings=64, bos_token_id=0,
               eos_token_id=0, pad_token_id=1, tie_word_embeddings=False, attn_implementation="eager")
OUTSIDE = {  # not in the zoo
    "mistral": ("Mistral", _COMMON),
    "qwen2": ("Qwen2", _COMMON),
    "qwen3_moe": ("Qwen3Moe", dict(_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                   experts_implementation="eager")),
    "stablelm": ("StableLm", dict(_COMMON, rope_parameters=dict(rope_type="default", rope_theta=10_000.0,
                                                                partial_rotary_factor=0.5), use_qkv_bias=True)),
    "stablelm_parallel": ("StableLm", dict(_COMMON, use_parallel_residual=True)),
}
# fmt: on
MAIN = ("llama_gqa", "neox", "gpt2", "stablelm")
OTHER = (
    "llama_bias", "mistral", "qwen2", "qwen3", "neox_sequential", "stablelm_parallel", "gemma2", "gemma3", "olmo2",
    "granite", "moe", "qwen3_moe",
)  # fmt: skip
RARE = [pytest.param(name, marks=pytest.mark.slow) for name in OTHER]


def plain(name, dtype=torch.float64):
    if name not in OUTSIDE:
        return zoo.hugging_face(name, dtype)
    family, settings = OUTSIDE[name]
    architecture = f"{family}ForCausalLM"
    with zoo.quiet():
        config = getattr(transformers, f"{family}Config")(**settings, architectures=[architecture])
        model = getattr(transformers, architecture)(config)
    zoo.fill(model)
    return model.to(dtype).eval()


def bridged(model):
    """A TransformerBridge of a copy."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    own = copy.deepcopy(model)
    with zoo.quiet():
        return build_bridge_from_module(own, type(model).__name__, hf_config=own.config, tokenizer=None).eval()


def gradients(bridge):
    """The gradients of a bridge's weights, by the plain model's names."""
    found = {
        name.replace("_original_component.", ""): parameter.grad
        for name, parameter in bridge.original_model.named_parameters()
        if parameter.grad is not None
    }
    found = {name.replace(".attn.o.", ".attn.c_proj.").replace(".attention.o.", ".attention.dense."): grad
             for name, grad in found.items()}  # fmt: skip
    for name in [name for name in found if ".attn.q." in name or ".attention.q." in name]:
        q, k, v = (found.pop(name.replace(".q.", f".{letter}.")) for letter in "qkv")
        if "attention.q." in name:  # NeoX: the three of each head together, as rows
            heads = [part.unflatten(0, (4, 12)) for part in (q, k, v)]
            found[name.replace(".q.", ".query_key_value.")] = torch.stack(heads, 1).flatten(0, 2)
        else:  # GPT-2: one after the other, as columns
            columns = [part.T if part.ndim == 2 else part for part in (q, k, v)]
            found[name.replace(".q.", ".c_attn.")] = torch.cat(columns, -1)
    return found


def backward(logits):
    weight = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).reshape(logits.shape)
    (logits * weight).sum().backward()


def size(x):
    return float(x.detach().norm())


@pytest.mark.parametrize("name", [*MAIN, *RARE])
def test_logits_and_the_gradient_of_every_weight_equal_the_transformer_lens_form(name):
    model, ids = plain(name), zoo.tokens(2, 9)
    bridge = bridged(model)
    with torch.no_grad():
        base = model(ids).logits
        apart = size(bridge(ids, return_type="logits") - base) / size(base)  # NeoX's rotary tables are made in float32
    tolerance = max(1e-12, 10 * apart)
    assert tolerance < 1e-5
    for site in PLAIN_SITES:
        model.zero_grad()
        bridge.zero_grad()
        with suppress(model, site, parallel=0.2, perpendicular=0.9):
            ours = model(ids).logits
            backward(ours)
        with applied(bridge, scale(bridge, site, parallel=0.2, perpendicular=0.9)):
            theirs = bridge(ids, return_type="logits")
            backward(theirs)
        assert size(ours - theirs) <= tolerance * size(theirs), site
        assert size(ours - base) > 1e-2 * size(base), site
        expected = gradients(bridge)
        for weight, parameter in model.named_parameters():
            assert size(parameter.grad - expected[weight]) <= tolerance * (1e-3 + size(expected[weight])), (
                site,
                weight,
            )


@pytest.mark.parametrize("name", ["llama_gqa", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "neox"))])
def test_in_float32_they_agree_to_five_digits(name):
    model, ids = plain(name, torch.float32), zoo.tokens(2, 9)
    bridge = bridged(model)
    for site in PLAIN_SITES:
        with suppress(model, site), torch.no_grad():
            ours = model(ids).logits
        with applied(bridge, scale(bridge, site, parallel=0.0)), torch.no_grad():
            assert size(ours - bridge(ids, return_type="logits")) < 1e-5 * size(ours)


def test_every_architecture_of_the_table_is_tested():
    blocks = set()
    for name in (*MAIN, *OTHER):
        family = OUTSIDE[name][0] if name in OUTSIDE else zoo._SPECIES[name][1].removesuffix("ForCausalLM")
        blocks.add({"GPTNeoX": "GPTNeoXLayer", "GPT2LMHeadModel": "GPT2Block"}.get(family, f"{family}DecoderLayer"))
    assert blocks == set(LAYOUTS)


def logits(model, ids, **settings):
    with torch.no_grad():
        return model(ids, **settings).logits


@pytest.mark.parametrize("name", ["llama_gqa", "neox", "gpt2"])
def test_scale_one_changes_no_bit_and_afterwards_nothing_is_left(name):
    model, ids = plain(name, torch.float32), zoo.tokens()
    base = logits(model, ids)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    for site in PLAIN_SITES:
        with suppress(model, site, parallel=1.0):
            assert torch.equal(logits(model, ids), base)
        with suppress(model, site, parallel=0.5):
            assert not torch.allclose(logits(model, ids), base, atol=1e-3)
        assert torch.equal(logits(model, ids), base)
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert model.config._attn_implementation == "eager"


def test_layers_heads_positions_and_groupings_mean_what_they_mean_in_scale():
    model, ids = plain("llama_gqa"), zoo.tokens()
    bridge, mask = bridged(model), zoo.tokens() % 2 == 0
    for site, settings in (
        ("value", dict(heads=[1, 4], layers="1-2")),
        ("value_excl_self", dict(heads=1, grouping="kv_group", layers=-1)),
        ("value", dict(grouping="merged", positions=[3, -1])),
        ("attn", dict(positions=mask, perpendicular=1.2)),
        ("mlp", dict(control="isotropic", seed=3)),
        ("mlp", dict(parallel=torch.tensor([1.0, 0.5, 0.25, 1.0]))),
        ("value", dict(parallel=lambda resid: resid[..., 0].sigmoid())),
    ):
        settings = {"parallel": 0.0, **settings}
        with suppress(model, site, **settings):
            ours = logits(model, ids)
        with torch.no_grad(), applied(bridge, scale(bridge, site, **settings)):
            theirs = bridge(ids, return_type="logits")
        assert size(ours - theirs) < 1e-12 * size(ours), (site, settings)


@pytest.mark.parametrize("name", ["llama_gqa", "neox", "gpt2"])
def test_sdpa_gives_what_eager_gives_and_cannot_tell_a_token_s_own_weight(name):
    model, ids = plain(name, torch.float32), zoo.tokens()
    eager = {}
    for kind in ("eager", "sdpa"):
        model.set_attn_implementation(kind)
        for site in set(PLAIN_SITES) - {"value_excl_self"}:
            with suppress(model, site):
                found = logits(model, ids)
            assert torch.allclose(eager.setdefault(site, found), found, atol=1e-4, rtol=1e-4), site
    with pytest.raises(SiteError, match="'sdpa' attention never has") as caught:
        suppress(model, "value_excl_self")
    assert 'set_attn_implementation("eager")' in caught.value.cure


@pytest.mark.parametrize("name", ["llama_gqa", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "neox"))])
def test_generation_with_a_cache_gives_the_tokens_of_generation_without(name):
    model, ids = plain(name, torch.float32), zoo.tokens(2, 5)
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=1, eos_token_id=None)
    unedited = model.generate(ids, **settings)
    for site in PLAIN_SITES:
        with suppress(model, site, parallel=-1.5):
            cached, whole = (model.generate(ids, use_cache=use, **settings) for use in (True, False))
        assert torch.equal(cached, whole), site
        assert not torch.equal(cached, unedited), site


def test_under_a_static_cache_a_token_s_own_weight_is_refused_and_a_value_edit_is_right():
    model, ids = plain("llama_gqa", torch.float32), zoo.tokens(1, 5)
    settings = dict(max_new_tokens=4, do_sample=False, pad_token_id=1, eos_token_id=None, disable_compile=True)
    with pytest.raises(HookError, match="static cache"), suppress(model, "value_excl_self"):
        model.generate(ids, cache_implementation="static", **settings)
    assert model.config._attn_implementation == "eager"
    with suppress(model, "value"):
        static = model.generate(ids, cache_implementation="static", **settings)
        assert torch.equal(static, model.generate(ids, use_cache=False, **settings))


def trained(model, ids, **settings):
    """The gradients after one backward pass under an edit, with or without checkpointing."""
    model.train()
    model.zero_grad()
    with suppress(model, **settings):
        backward(model(ids).logits)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama_gqa", pytest.param("neox", marks=pytest.mark.slow)])
def test_gradient_checkpointing_changes_no_gradient(name, reentrant):
    model, ids = plain(name), zoo.tokens(2, 9)
    expected = {site: trained(model, ids, site=site, parallel=0.2) for site in PLAIN_SITES}
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for site in PLAIN_SITES:
        found = trained(model, ids, site=site, parallel=0.2)
        for weight, gradient in expected[site].items():
            assert torch.allclose(found[weight], gradient, rtol=1e-11, atol=1e-11), (site, weight)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_backward_pass_that_would_compute_layers_again_without_the_edit_is_refused(reentrant):
    model, ids = plain("llama_gqa", torch.float32).train(), zoo.tokens()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with suppress(model, "value"):
        loss = model(ids, labels=ids).loss
    with pytest.raises(HookError, match="after its edit was taken off") as caught:
        loss.backward()
    assert "inside the `with`" in caught.value.cure
    del loss, caught
    model(ids, labels=ids).loss.backward()  # a pass of its own is none of the edit's business


def test_an_edit_under_autocast_is_computed_in_float32():
    model, ids = plain("llama_gqa", torch.float32), zoo.tokens()
    seen = {}
    keep = model.model.layers[1].post_attention_layernorm.register_forward_pre_hook
    before = model.model.layers[1].input_layernorm.register_forward_pre_hook(
        lambda module, args: seen.update(before=args[0].double())
    )
    after = keep(lambda module, args: seen.update(after=args[0].double()))
    with suppress(model, "attn", layers=1), torch.autocast("cpu", torch.bfloat16):
        logits(model, ids)
    before.remove()
    after.remove()
    update = seen["after"] - seen["before"]
    along = (update * seen["before"]).sum(-1) / (update.norm(dim=-1) * seen["before"].norm(dim=-1))
    assert along.abs().max() < 2e-3  # the rounding of the update to bfloat16, and no more


@pytest.mark.parametrize("name", ["gpt2", "neox_sequential"])
def test_what_is_edited_is_what_is_added_after_dropout(name):
    model, ids = plain(name).train(), zoo.tokens()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    block = model.base_model.h[1] if name == "gpt2" else model.base_model.layers[1]
    norms = (block.ln_1, block.ln_2) if name == "gpt2" else (block.input_layernorm, block.post_attention_layernorm)
    seen = []
    handles = [norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach())) for norm in norms]
    with suppress(model, "attn", layers=1), torch.random.fork_rng(devices=[]):
        logits(model, ids)
    for handle in handles:
        handle.remove()
    before, update = seen[0], seen[1] - seen[0]
    assert ((update * before).sum(-1).abs() < 1e-12 * update.norm(dim=-1) * before.norm(dim=-1)).all()


def test_bfloat16_stays_bfloat16():
    model, ids = plain("llama_gqa", torch.bfloat16), zoo.tokens()
    for site in PLAIN_SITES:
        with suppress(model, site):
            assert logits(model, ids).dtype == torch.bfloat16


def test_two_edits_follow_one_another_and_go_in_any_order():
    model, ids = plain("llama_gqa"), zoo.tokens()
    bridge = bridged(model)
    first = suppress(model, "value_excl_self", parallel=0.5)
    second = suppress(model, "value_excl_self", parallel=0.7, perpendicular=0.8)
    both = logits(model, ids)
    with (
        torch.no_grad(),
        applied(
            bridge,
            scale(bridge, "value_excl_self", parallel=0.5)
            + scale(bridge, "value_excl_self", parallel=0.7, perpendicular=0.8),
        ),
    ):
        assert size(bridge(ids, return_type="logits") - both) < 1e-12 * size(both)
    first.remove()
    alone = logits(model, ids)
    second.remove()
    with suppress(model, "value_excl_self", parallel=0.7, perpendicular=0.8):
        assert torch.equal(logits(model, ids), alone)
    assert not torch.allclose(alone, both)


def test_a_handle_can_be_given_another_scale_and_removed_twice():
    model, ids = plain("llama_gqa"), zoo.tokens()
    handle = suppress(model, "mlp", parallel=1.0)
    base = logits(model, ids)
    handle.set_parallel(0.25)
    found = logits(model, ids)
    with pytest.raises(GeometryError, match="no number"):
        handle.set_parallel("half")
    handle.remove()
    handle.remove()
    with suppress(model, "mlp", parallel=0.25):
        assert torch.equal(logits(model, ids), found)
    assert torch.equal(logits(model, ids), base)


def test_passes_in_several_threads_do_not_meet():
    model = plain("llama_gqa")
    texts = [zoo.tokens(1, 40, seed=seed) for seed in range(4)]
    with suppress(model, "value_excl_self"):
        expected = [logits(model, ids) for ids in texts]
        found = [None] * 4

        def run(i):
            for _ in range(5):
                found[i] = logits(model, texts[i])

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_learned_gate_gets_its_gradient():
    model, ids = plain("llama_gqa"), zoo.tokens()
    gate = torch.zeros(48, dtype=torch.float64, requires_grad=True)
    with suppress(model, "attn", parallel=lambda resid: torch.sigmoid(resid @ gate)):
        model(ids, labels=ids).loss.backward()
    assert gate.grad.norm() > 1e-6


def test_wrappers_are_looked_through():
    model, ids = plain("llama_gqa"), zoo.tokens()
    wrapper = nn.Module()
    wrapper.module = model
    with suppress(model, "value"):
        expected = logits(model, ids)
    with suppress(wrapper, "value"):
        assert torch.equal(logits(model, ids), expected)
    with suppress(model.model, "value"):  # the model without its head
        assert torch.equal(logits(model, ids), expected)


def test_an_edit_that_did_nothing_is_an_error_that_says_so():
    model, ids = plain("llama_gqa"), zoo.tokens()
    with pytest.raises(HookError, match="4 of 4 edits never ran .no forward pass"), suppress(model, "attn"):
        pass
    with pytest.raises(HookError, match="2 of 4 edits never ran") as caught, suppress(model, "attn"):
        run_blocks(model, 2)
    assert "model.layers.2.self_attn" in str(caught.value)
    nowhere = torch.zeros_like(ids, dtype=torch.bool)
    with pytest.raises(HookError, match="left every activation as it was"), suppress(model, "attn", positions=nowhere):
        logits(model, ids)
    handle = suppress(model, "attn")
    with pytest.raises(HookError, match="never ran"):
        handle.remove()
    with pytest.raises(RuntimeError, match="of another kind"), suppress(model, "attn"):
        raise RuntimeError("of another kind")
    assert not any(module._forward_hooks for module in model.modules())


def run_blocks(model, n):
    stream = torch.randn(1, 3, 48, generator=torch.Generator().manual_seed(0)).double()
    rotary = model.model.rotary_emb(stream, torch.arange(3)[None])
    for block in model.model.layers[:n]:
        stream = block(stream, position_embeddings=rotary)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(site="attention"), SiteError, "choose one of attn, mlp, block, value, value_excl_self"),
        (dict(site="mlp_carrier"), SiteError, "with TransformerLens lg.scale has it"),
        (dict(site="attn", layers=4), SiteError, "layers 0 to 3"),
        (dict(site="value", heads=6), SiteError, "heads 0 to 5"),
        (dict(site="attn", heads=1), SiteError, "no heads to select"),
        (dict(site="mlp", parallel=float("nan")), GeometryError, "not finite"),
    ],
)
def test_what_cannot_be_is_refused_with_a_cure(arguments, error, words):
    model = plain("llama_gqa")
    with pytest.raises(error) as caught:
        suppress(model, **arguments)
    assert words in str(caught.value)
    assert "Cure:" in str(caught.value)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_models_of_the_other_kind_are_sent_to_the_other_function():
    model, bridge = plain("llama_gqa"), zoo.build("llama_gqa")
    for wrapped in (bridge, bridge.original_model):
        with pytest.raises(ModelError, match=r"lg\.scale"):
            suppress(wrapped, "attn")
    with pytest.raises(ModelError, match=r"lg\.suppress"):
        scale(model, "attn")
    with pytest.raises(ModelError, match=r"lg\.suppress"):
        lg.models.require_model(model)
    with pytest.raises(ModelError, match="OPTDecoderLayer"):
        suppress(zoo.hugging_face("opt"), "attn")
    with pytest.raises(ModelError, match="from_pretrained"):
        suppress("smollm2-135m", "attn")


@pytest.mark.slow
@pytest.mark.parametrize("site", ["mlp", "value", "value_excl_self"])
def test_a_compiled_model_is_edited_in_one_graph_and_is_itself_again_afterwards(site):
    model, ids = plain("llama_gqa", torch.float32), zoo.tokens()
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    base = logits(model, ids)
    with suppress(model, site, parallel=0.25):
        expected = logits(model, ids)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with suppress(compiled, site, parallel=0.5) as handle:
        logits(compiled, ids)
        handle.set_parallel(0.25)
        assert torch.allclose(logits(compiled, ids), expected, atol=1e-5)
    assert torch.allclose(logits(compiled, ids), base, atol=1e-5)
    if site == "value":  # nothing tells compiled code of new hooks; never silently
        with pytest.raises(HookError, match="one compiled before"), suppress(compiled, site):
            logits(compiled, ids)
    torch.compiler.reset()
