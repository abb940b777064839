"""What this project relies on in TransformerLens, one test per fact, on every model of the zoo.

When an upgrade breaks something here, the name of the test says which assumption of the sites, the edits or
the runner no longer holds. A fact that is a defect (a silent failure that we guard against) is pinned too: if
it is mended upstream, the guard can go.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch import Tensor
from torch.testing import assert_close

Hook = Callable[..., Any]
BLOCK = "blocks.1."
BRANCHES = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post")
VALUES = ("attn.hook_v", "attn.hook_pattern", "attn.hook_z")


def on(cases: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "backend"), cases, ids=["-".join(case) for case in cases])


everywhere = on(zoo.cases())
on_additive = on(zoo.cases(exclude=zoo.NOT_ADDITIVE))
on_each_class = on([case for case in zoo.cases() if case[0] in ("gpt2", "llama_gqa")])


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterable[None]:
    with torch.no_grad():
        yield


def attention_is_opaque(name: str, backend: str) -> bool:
    """Whether attention runs inside the wrapped module, so that its pattern is only shown afterwards."""
    return zoo.MAJOR < 4 if backend == "native" else backend == "bridge" and name.startswith("opt")


def edited(model: Any, hooks: list[tuple[str, Hook]], tokens: Tensor | None = None, **kwargs: Any) -> Tensor:
    with model.hooks(fwd_hooks=hooks):
        logits: Tensor = model(zoo.tokens() if tokens is None else tokens, return_type="logits", **kwargs)
    return logits


def read(
    model: Any,
    points: Iterable[str],
    tokens: Tensor | None = None,
    edit: list[tuple[str, Hook]] | None = None,
    block: str = BLOCK,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """The activations at hooks of one block, in the order in which they fired, under an `edit`."""
    seen: dict[str, Tensor] = {}

    def keep(point: str) -> Hook:
        return lambda activation, hook: seen.__setitem__(point, activation.clone())

    edited(model, [*(edit or []), *((block + point, keep(point)) for point in points)], tokens, **kwargs)
    return seen


def zero(activation: Tensor, hook: Any) -> Tensor:
    return torch.zeros_like(activation)


# The same model in every class


@on(zoo.cases("bridge", "hooked"))
def test_logits_are_those_of_hugging_face(name: str, backend: str) -> None:
    ours = zoo.build(name, backend)(zoo.tokens(), return_type="logits")
    assert_close(ours, zoo.hugging_face(name)(zoo.tokens()).logits, atol=3e-5, rtol=0)


@everywhere
def test_a_hook_that_returns_an_equal_tensor_changes_no_bit(name: str, backend: str) -> None:
    model = zoo.build(name, backend)
    points = [
        point for point in (*BRANCHES, *VALUES) if not (point == VALUES[1] and attention_is_opaque(name, backend))
    ]
    copies: list[tuple[str, Hook]] = [(BLOCK + point, lambda x, hook: x.clone()) for point in points]
    assert torch.equal(edited(model, copies), model(zoo.tokens(), return_type="logits"))


# Shapes and order


@everywhere
def test_value_heads_reach_query_heads_by_repeat_interleave(name: str, backend: str) -> None:
    seen = read(zoo.build(name, backend), VALUES)
    v, pattern, z = (seen[point] for point in VALUES)
    (batch, position, heads, d_head), kv_heads = z.shape, v.shape[2]
    assert v.shape == (batch, position, kv_heads, d_head)
    assert pattern.shape == (batch, heads, position, position)
    mixed = torch.einsum("bhqk,bkhd->bqhd", pattern, v.repeat_interleave(heads // kv_heads, dim=2))
    assert_close(mixed, z, atol=1e-5, rtol=0)
    if 1 < kv_heads < heads:
        tiled = torch.einsum("bhqk,bkhd->bqhd", pattern, v.repeat(1, 1, heads // kv_heads, 1))
        assert (tiled - z).abs().max() > 0.1


@everywhere
def test_attention_sums_to_one_and_position_zero_sees_only_itself(name: str, backend: str) -> None:
    seen = read(zoo.build(name, backend), VALUES)
    v, pattern, z = (seen[point] for point in VALUES)
    assert_close(pattern.sum(-1), torch.ones_like(pattern[..., 0]), atol=1e-5, rtol=0)
    assert pattern.triu(1).abs().max() == 0
    assert_close(z[:, 0], v[:, 0].repeat_interleave(z.shape[2] // v.shape[2], dim=1), atol=1e-6, rtol=0)


@everywhere
def test_firing_order_within_a_block(name: str, backend: str) -> None:
    model = zoo.build(name, backend)
    order = list(read(model, ["hook_resid_post", "hook_mlp_out", "hook_attn_out", *VALUES, "hook_resid_pre"]))
    middle = ["attn.hook_v", "attn.hook_pattern", "attn.hook_z", "hook_attn_out"]
    if attention_is_opaque(name, backend):  # an edit of z can't know this forward's pattern there
        middle = ["attn.hook_v", "attn.hook_z", "hook_attn_out", "attn.hook_pattern"]
    assert order == ["hook_resid_pre", *middle, "hook_mlp_out", "hook_resid_post"]


@everywhere
def test_the_stream_after_a_block_is_the_stream_before_the_next(name: str, backend: str) -> None:
    model = zoo.build(name, backend)
    before = read(model, ["hook_resid_pre"], block="blocks.2.")["hook_resid_pre"]
    assert torch.equal(read(model, ["hook_resid_post"])["hook_resid_post"], before)


# What is added to the stream


@on_additive
def test_attn_out_and_mlp_out_are_what_is_added_to_the_stream(name: str, backend: str) -> None:
    seen = read(zoo.build(name, backend), BRANCHES)
    pre, attn, mlp, post = (seen[point] for point in BRANCHES)
    if name in zoo.PARALLEL:
        assert_close(pre + attn + mlp, post, atol=2e-6, rtol=2e-7)
    else:
        assert torch.equal(pre + attn + mlp, post)


@on_additive
def test_resid_mid_exists_where_the_mlp_reads_it_and_not_in_parallel_models(name: str, backend: str) -> None:
    model = zoo.build(name, backend)
    assert (BLOCK + "hook_resid_mid" in model.hook_dict) == (name not in zoo.PARALLEL)
    if name not in zoo.PARALLEL:
        seen = read(model, [*BRANCHES, "hook_resid_mid"])
        assert list(seen).index("hook_attn_out") < list(seen).index("hook_resid_mid") < list(seen).index("hook_mlp_out")
        assert torch.equal(seen["hook_resid_pre"] + seen["hook_attn_out"], seen["hook_resid_mid"])


@on([(name, "bridge") for name in zoo.NOT_ADDITIVE])
def test_post_norm_opt_adds_neither_attn_out_nor_mlp_out(name: str, backend: str) -> None:
    seen = read(zoo.build(name, backend), [*BRANCHES, "hook_resid_mid"])
    pre, attn, mlp, post = (seen[point] for point in BRANCHES)
    for wrong, right in ((pre + attn, seen["hook_resid_mid"].view_as(pre)), (pre + attn + mlp, post)):
        assert (wrong - right).norm() > 0.5 * right.norm()
    assert list(seen).index("hook_resid_mid") > list(seen).index("hook_mlp_out")


@on([("gemma2", "bridge"), ("gemma3", "bridge"), ("olmo2", "bridge"), ("granite", "bridge")])
def test_attn_out_is_taken_after_post_norm_and_multiplier(name: str, backend: str) -> None:
    seen = read(zoo.build(name, backend), ["hook_attn_out", "attn.hook_out"])
    assert (seen["attn.hook_out"] - seen["hook_attn_out"]).norm() > 0.1 * seen["hook_attn_out"].norm()


@on([("moe", "bridge")])
def test_the_post_hook_of_a_bridged_moe_is_its_output_and_no_carrier(name: str, backend: str) -> None:
    seen = read(zoo.build(name, backend), ["mlp.hook_post", "hook_mlp_out"])
    assert torch.equal(seen["mlp.hook_post"], seen["hook_mlp_out"])


# What an edit does


@everywhere
def test_zeroing_a_hook_changes_the_logits(name: str, backend: str) -> None:
    model = zoo.build(name, backend)
    base = model(zoo.tokens(), return_type="logits")
    for point in (*BRANCHES, "attn.hook_v", "attn.hook_z"):
        assert (edited(model, [(BLOCK + point, zero)]) - base).abs().max() > 0.1, point


@everywhere
def test_pattern_edits_act_except_where_attention_is_opaque(name: str, backend: str) -> None:
    model = zoo.build(name, backend)
    change = edited(model, [(BLOCK + "attn.hook_pattern", zero)]) - model(zoo.tokens(), return_type="logits")
    assert (change.abs().max() == 0) == attention_is_opaque(name, backend)


@on_additive
def test_an_edit_of_attn_out_moves_the_stream_that_the_mlp_reads(name: str, backend: str) -> None:
    model = zoo.build(name, backend)
    plain = read(model, BRANCHES)
    moved = read(model, BRANCHES, edit=[(BLOCK + "hook_attn_out", zero)])
    assert torch.equal(moved["hook_attn_out"], torch.zeros_like(moved["hook_attn_out"]))
    assert_close(moved["hook_resid_pre"] + moved["hook_mlp_out"], moved["hook_resid_post"], atol=2e-6, rtol=2e-7)
    assert torch.equal(plain["hook_mlp_out"], moved["hook_mlp_out"]) == (name in zoo.PARALLEL)


@on(zoo.cases(exclude=(*zoo.PARALLEL, *zoo.NOT_ADDITIVE)))
def test_an_edit_of_resid_mid_reaches_only_the_mlp_on_a_bridge(name: str, backend: str) -> None:
    model = zoo.build(name, backend)
    mid = read(model, ["hook_resid_mid"])["hook_resid_mid"]
    seen = read(model, BRANCHES, edit=[(BLOCK + "hook_resid_mid", zero)])
    kept = torch.zeros_like(mid) if backend == "hooked" else mid
    assert torch.equal(kept + seen["hook_mlp_out"], seen["hook_resid_post"])


@everywhere
def test_layers_before_an_edit_are_bit_equal(name: str, backend: str) -> None:
    model = zoo.build(name, backend)
    after = read(model, ["hook_resid_post"], edit=[("blocks.2.attn.hook_z", zero)])
    assert torch.equal(after["hook_resid_post"], read(model, ["hook_resid_post"])["hook_resid_post"])


@on_each_class
def test_a_wrong_shape_that_broadcasts_is_accepted_silently(name: str, backend: str) -> None:
    assert edited(zoo.build(name, backend), [(BLOCK + "hook_attn_out", lambda x, hook: x[:, :1])]).isfinite().all()


@on_each_class
def test_a_float32_return_breaks_or_upcasts_a_bfloat16_model(name: str, backend: str) -> None:
    model = zoo.build(name, backend, torch.bfloat16)
    upcast: list[tuple[str, Hook]] = [(BLOCK + "hook_attn_out", lambda x, hook: x.float())]
    if backend == "hooked":
        assert read(model, ["hook_resid_pre"], edit=upcast, block="blocks.2.")["hook_resid_pre"].dtype == torch.float32
    else:
        with pytest.raises(RuntimeError, match="dtype|scalar type"):
            edited(model, upcast)


@on([("llama_gqa", "bridge")])
def test_in_place_edits_of_a_norm_hook_are_lost_on_a_bridge(name: str, backend: str) -> None:
    model, point = zoo.build(name, backend), BLOCK + "ln1.hook_normalized"
    base = model(zoo.tokens(), return_type="logits")
    assert torch.equal(edited(model, [(point, lambda x, hook: x.zero_())]), base)
    assert not torch.equal(edited(model, [(point, zero)]), base)


# Names and calls


@everywhere
def test_hooks_are_called_with_the_activation_and_the_keyword_hook(name: str, backend: str) -> None:
    calls: list[tuple[int, list[str]]] = []
    edited(zoo.build(name, backend), [(BLOCK + "attn.hook_z", lambda *a, **k: calls.append((len(a), list(k))))])
    assert calls == [(1, ["hook"])]


@everywhere
def test_the_hook_that_is_passed_is_the_point_that_the_name_stands_for(name: str, backend: str) -> None:
    model, point = zoo.build(name, backend), BLOCK + "attn.hook_z"
    passed: list[Any] = []
    edited(model, [(point, lambda x, hook: passed.append(hook))])
    assert passed[0] is model.hook_dict[point] is model.hook_dict[passed[0].name]
    assert (passed[0].name == point) == (backend == "hooked")  # on bridges: another alias of the same point


@everywhere
def test_hooks_at_one_name_run_in_list_order_each_on_the_result_of_the_last(name: str, backend: str) -> None:
    seen: list[float] = []
    chain: list[tuple[str, Hook]] = [
        (BLOCK + "attn.hook_z", lambda x, hook: seen.append(0)),
        (BLOCK + "attn.hook_z", lambda x, hook: torch.full_like(x, 3)),
        (BLOCK + "attn.hook_z", lambda x, hook: seen.append(x.mean().item())),
    ]
    edited(zoo.build(name, backend), chain)
    assert seen == [0, 3]


@on_each_class
def test_an_unknown_hook_name_is_silent_on_a_bridge_of_3_and_a_key_error_elsewhere(name: str, backend: str) -> None:
    model = zoo.build(name, backend)
    silent = zoo.MAJOR < 4 and backend != "hooked"
    assert "blocks.9.hook_resid_post" not in model.hook_dict
    with contextlib.nullcontext() if silent else pytest.raises(KeyError):
        edited(model, [("blocks.9.hook_resid_post", zero)])


@on_each_class
@pytest.mark.parametrize("point", ["attn.hook_result", "hook_attn_in", "hook_mlp_in"])
def test_a_gated_hook_is_listed_but_refused_by_bridges_and_silent_elsewhere(
    name: str, backend: str, point: str
) -> None:
    model, fired = zoo.build(name, backend), []
    assert BLOCK + point in model.hook_dict
    with contextlib.nullcontext() if backend == "hooked" else pytest.raises(ValueError, match="is False"):
        edited(model, [(BLOCK + point, lambda x, hook: fired.append(point))])
    assert not fired


@everywhere
def test_return_types(name: str, backend: str) -> None:
    model, tokens = zoo.build(name, backend), zoo.tokens()
    logits = model(tokens, return_type="logits")
    assert model(tokens, return_type=None) is None
    assert logits.shape == (*tokens.shape, zoo.VOCAB)
    assert torch.equal(model(tokens), logits)
    per_token = torch.nn.functional.cross_entropy(logits[:, :-1].mT, tokens[:, 1:], reduction="none")
    assert_close(model(tokens, return_type="loss", loss_per_token=True), per_token, atol=1e-5, rtol=0)
    assert_close(model(tokens, return_type="loss"), per_token.mean(), atol=1e-5, rtol=0)


@everywhere
def test_stop_at_layer_returns_the_stream_before_that_block_and_runs_no_later_one(name: str, backend: str) -> None:
    model, fired = zoo.build(name, backend), set()
    expected = read(model, ["hook_resid_pre"], block="blocks.2.")["hook_resid_pre"]
    watch = [(f"blocks.{layer}.attn.hook_z", lambda x, hook, layer=layer: fired.add(layer)) for layer in range(4)]
    with model.hooks(fwd_hooks=watch):
        assert torch.equal(model(zoo.tokens(), stop_at_layer=2), expected)
    assert fired == {0, 1}


# Contexts


@on_each_class
@pytest.mark.parametrize("failure", ["none", "in the body", "in a hook"])
def test_a_hooks_context_removes_its_own_hooks_and_keeps_the_user_s(name: str, backend: str, failure: str) -> None:
    model, point, calls = zoo.build(name, backend, fresh=True), BLOCK + "attn.hook_z", []
    base = model(zoo.tokens(), return_type="logits")
    model.add_hook(point, lambda x, hook: calls.append("user"))

    def fail(x: Tensor, hook: Any) -> Tensor:
        if failure == "in a hook":
            raise RuntimeError("on purpose")
        return torch.zeros_like(x)

    with (
        contextlib.suppress(RuntimeError),
        model.hooks(fwd_hooks=[(point, lambda x, hook: calls.append("ours")), ("blocks.2.attn.hook_z", fail)]),
    ):
        model(zoo.tokens(), return_type="logits")
        if failure == "in the body":
            raise RuntimeError("on purpose")
    assert calls == ["user", "ours"]
    calls.clear()
    assert torch.equal(model(zoo.tokens(), return_type="logits"), base)
    assert calls == ["user"]


@everywhere
def test_hooks_contexts_nest(name: str, backend: str) -> None:
    model, point, calls = zoo.build(name, backend), BLOCK + "attn.hook_z", []
    with model.hooks(fwd_hooks=[(point, lambda x, hook: calls.append("outer"))]):
        edited(model, [(point, lambda x, hook: calls.append("inner"))])
        model.run_with_hooks(zoo.tokens(), return_type=None, fwd_hooks=[(point, lambda x, hook: calls.append("run"))])
        model.run_with_cache(zoo.tokens(), return_type=None, names_filter=[point])
        model(zoo.tokens(), return_type=None)
    model(zoo.tokens(), return_type=None)
    assert calls == ["outer", "inner", "outer", "run", "outer", "outer"]


# Padding


@everywhere
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_with_a_mask_leaves_real_tokens_as_they_were(name: str, backend: str, side: str) -> None:
    model, tokens = zoo.build(name, backend), zoo.tokens(1)
    left, right = (3, 0) if side == "left" else (0, 3)
    padded = torch.nn.functional.pad(tokens, (left, right), value=1)
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (left, right))
    real = slice(left, left + tokens.shape[1])
    logits = edited(model, [], padded, attention_mask=mask)
    assert_close(logits[:, real], model(tokens, return_type="logits"), atol=2e-5, rtol=0)
    seen = read(model, VALUES, padded, attention_mask=mask)
    pattern = seen["attn.hook_pattern"]
    assert pattern[:, :, real][..., mask[0] == 0].abs().max() == 0
    assert_close(pattern[:, :, real, real], read(model, VALUES, tokens)["attn.hook_pattern"], atol=1e-5, rtol=0)
    if side == "left":  # a padding token's own row: uniform over all keys, future ones too, or nothing
        anything = torch.full_like(pattern[:, :, :left], 1 / padded.shape[1] if backend == "bridge" else 0)
        assert_close(pattern[:, :, :left], anything, atol=1e-6, rtol=0)
        assert seen["attn.hook_z"].isfinite().all()


# Generation with a cache


@on(zoo.cases("bridge", "hooked"))
def test_cached_generation_shows_only_the_new_token_at_v_and_z(name: str, backend: str) -> None:
    model, prompt = zoo.build(name, backend, tokenizer=True), zoo.tokens(2, 5)
    shapes: dict[str, list[tuple[int, ...]]] = {point: [] for point in VALUES}
    settings = {
        "max_new_tokens": 3,
        "do_sample": False,
        "verbose": False,
        "prepend_bos": False,
        "stop_at_eos": False,
    }
    watch = [(BLOCK + point, lambda x, hook, point=point: shapes[point].append(tuple(x.shape))) for point in VALUES]
    with model.hooks(fwd_hooks=watch):
        cached = model.generate(prompt, use_past_kv_cache=True, **settings)
    v, pattern, z = shapes.values()
    assert [shape[1] for shape in v] == [shape[1] for shape in z] == [5, 1, 1]
    assert [shape[2:] for shape in pattern] == [(5, 5), (1, 6), (1, 7)]
    assert torch.equal(cached, model.generate(prompt, use_past_kv_cache=False, **settings))


# The zoo itself


@pytest.mark.parametrize("backend", sorted({backend for _, backend in zoo.cases()}))
def test_building_leaves_the_global_random_state_alone(backend: str) -> None:
    before = torch.get_rng_state(), str(np.random.get_state()), random.getstate()  # noqa: NPY002
    zoo.build("gpt2", backend, fresh=True)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (str(np.random.get_state()), random.getstate()) == before[1:]  # noqa: NPY002


@on_each_class
def test_a_fresh_copy_has_the_same_weights_and_another_seed_others(name: str, backend: str) -> None:
    shared = zoo.build(name, backend)
    assert zoo.build(name, backend) is shared
    logits = shared(zoo.tokens(), return_type="logits")
    own = zoo.build(name, backend, fresh=True)
    assert own is not shared
    assert torch.equal(own(zoo.tokens(), return_type="logits"), logits)
    assert not torch.equal(zoo.build(name, backend, seed=1)(zoo.tokens(), return_type="logits"), logits)


@everywhere
def test_in_float64_z_is_the_pattern_times_v_exactly(name: str, backend: str) -> None:
    seen = read(zoo.build(name, backend, torch.float64), [*VALUES, *BRANCHES])
    assert {activation.dtype for activation in seen.values()} == {torch.float64}
    v, pattern, z = (seen[point] for point in VALUES)
    mixed = torch.einsum("bhqk,bkhd->bqhd", pattern, v.repeat_interleave(z.shape[2] // v.shape[2], dim=2))
    assert_close(mixed, z, atol=1e-13, rtol=0)  # exact, though Hugging Face's softmax and norms compute in float32


@on([case for case in zoo.cases() if case[0] in ("gpt2", "llama_gqa", "olmo2", "moe")])
def test_bfloat16_models_show_bfloat16_but_for_the_pattern_of_olmo2(name: str, backend: str) -> None:
    seen = read(zoo.build(name, backend, torch.bfloat16), [*VALUES, *BRANCHES])
    assert (seen.pop("attn.hook_pattern").dtype == torch.float32) == (name == "olmo2")
    assert {activation.dtype for activation in seen.values()} == {torch.bfloat16}


@everywhere
def test_attention_is_far_from_uniform_and_norms_are_comparable(name: str, backend: str) -> None:
    seen = read(zoo.build(name, backend), ["attn.hook_pattern", *BRANCHES])
    assert seen["attn.hook_pattern"][:, :, -1].max(-1).values.mean() > 2 / zoo.tokens().shape[1]
    norms = {point: seen[point].norm(dim=-1).mean().item() for point in BRANCHES}
    assert max(norms.values()) < 5 * min(norms.values())


def test_the_tokenizer_round_trips_any_text() -> None:
    text = "Häns said: 'no'.\n\t<b>"
    ids = zoo.tokenizer().encode(text, add_special_tokens=False)
    assert zoo.tokenizer().decode(ids) == text
    assert len(ids) == len(text.encode())
    model = zoo.build("llama_gqa", tokenizer=True)
    assert model.to_tokens(text, prepend_bos=False)[0].tolist() == ids
