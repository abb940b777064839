"""The diagonal view: the same logits as the edit of z, exact against plain loops, and refused where it would lie."""

import math

import pytest
import reference
import torch
import zoo

from lens_geometry.anatomy import inspect
from lens_geometry.edits import applied, diagonal, observe_diagonal, remove_diagonal, scale
from lens_geometry.edits.reach import require_map
from lens_geometry.errors import GeometryError, HookError, SiteError
from lens_geometry.gradients import WithoutDiagonal, without_diagonal
from lens_geometry.sites import HOOKS
from lens_geometry.weights import attention_output

VALUE = ("value", "value_excl_self")
RESIDUAL = ("attn", "attn_per_head")
SHOWN = ("opt", "opt_post_norm")  # bridges that show their pattern and do not use it
POST_NORM = ("gemma2", "gemma3", "olmo2")


def edits_nothing(name, backend):
    return (name in SHOWN and backend == "bridge") or (backend == "native" and zoo.MAJOR < 4)


EDITABLE = [case for case in zoo.cases() if not edits_nothing(*case)]
PLAIN = [case for case in EDITABLE if case[0] not in POST_NORM]


def logits(model, ids, hooks=(), **more):
    with torch.no_grad(), model.hooks(fwd_hooks=list(hooks)):
        return model(ids, return_type="logits", **more)


def seen(model, ids, hooks=(), **more):
    """Every activation that a site knows, as its hook point leaves it under hooks."""
    kept = {}
    names = [template.format(layer) for layer in range(4) for template in HOOKS.values()]
    keep = [(n, lambda t, hook, n=n: kept.update({n: t.clone()})) for n in names if n in model.hook_dict]
    logits(model, ids, [*hooks, *keep], **more)
    return kept


def shown(model, ids, site, **more):
    """{layer: (A_tt, change of A_tt)} of a clean pass."""
    found = {}
    logits(model, ids, observe_diagonal(model, site, lambda *x: found.update({x[0]: x[1:]}), **more))
    return found


def gap(one, other):
    return float((one - other).abs().max() / (other.max() - other.min()))


@pytest.mark.parametrize("site", VALUE)
@pytest.mark.parametrize(("name", "backend"), EDITABLE)
def test_the_diagonal_form_gives_the_logits_of_the_edit_of_z(name, backend, site):
    ids = zoo.tokens(2, 12)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        model = zoo.build(name, backend, dtype)
        expected = logits(model, ids, scale(model, site, parallel=-0.5))
        assert gap(logits(model, ids, diagonal(model, site, parallel=-0.5)), expected) < tolerance
        assert gap(logits(model, ids), expected) > 1e-2


@pytest.mark.parametrize("site", VALUE)
@pytest.mark.parametrize("grouping", ["each", "kv_group", "merged"])
def test_the_diagonal_form_gives_the_same_z_in_float64(site, grouping):
    """z of the edited layer itself, which no float32 norm has touched since."""
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(2, 12)
    more = {"parallel": 0.3, "layers": 2, "grouping": grouping}
    by_map, by_hook = (seen(model, ids, edit(model, site, **more)) for edit in (diagonal, scale))
    torch.testing.assert_close(by_map["blocks.2.attn.hook_z"], by_hook["blocks.2.attn.hook_z"], rtol=0, atol=1e-14)
    off = ~torch.eye(12, dtype=torch.bool)
    clean = seen(model, ids)["blocks.2.attn.hook_pattern"]
    assert torch.equal(by_map["blocks.2.attn.hook_pattern"][..., off], clean[..., off])


@pytest.mark.parametrize("site", VALUE)
@pytest.mark.parametrize(
    "more",
    [
        {"heads": [0, 5]},
        {"heads": 1, "grouping": "kv_group"},
        {"positions": [3, -1]},
        {"positions": slice(1, None), "layers": [0, 3]},
        {"positions": torch.arange(24).reshape(2, 12) % 3 == 1},
    ],
)
def test_chosen_layers_heads_and_positions_are_those_of_scale(site, more):
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(2, 12)
    by_map, by_hook = (logits(model, ids, edit(model, site, parallel=0.0, **more)) for edit in (diagonal, scale))
    assert gap(by_map, by_hook) < 1e-12
    assert gap(by_map, logits(model, ids)) > 1e-3


def test_scales_per_layer_head_and_token_and_callables_are_those_of_scale():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(2, 12)
    random = torch.Generator().manual_seed(0)
    per_head, per_token = torch.rand(4, 6, generator=random), torch.rand(1, 2, 12, generator=random)
    for parallel in (per_head, per_token, lambda h: h[..., 0].sigmoid()):
        by_map, by_hook = (logits(model, ids, edit(model, "value", parallel=parallel)) for edit in (diagonal, scale))
        assert gap(by_map, by_hook) < 1e-12
    with pytest.raises(GeometryError, match="not finite"):
        diagonal(model, "value", parallel=float("nan"))


@pytest.mark.parametrize(("name", "backend"), [("llama_gqa", "bridge"), ("neox", "bridge"), ("gpt2", "bridge")])
def test_the_numbers_are_those_of_plain_loops(name, backend):
    model, ids, layer = zoo.build(name, backend, torch.float64), zoo.tokens(2, 7), 2
    cache = seen(model, ids)
    for site in VALUE:
        weight, change = shown(model, ids, site, parallel=-0.4)[layer]
        for (b, t, head), (u, r) in reference.vectors(cache, site, layer).items():
            alpha = reference.split(u, r)[0]
            assert change[b, t, head].item() == pytest.approx(-1.4 * alpha, rel=1e-12, abs=1e-14)
            assert weight[b, t, head] == cache[f"blocks.{layer}.attn.hook_pattern"][b, head, t, t]
    z, v, h, y = (
        cache[f"blocks.{layer}.{n}"].tolist() for n in ("attn.hook_z", "attn.hook_v", "hook_resid_pre", "hook_attn_out")
    )
    w_o = attention_output(model, layer)[0].tolist()
    dot = lambda a, b: math.fsum(p * q for p, q in zip(a, b, strict=True))  # noqa: E731
    output = lambda head, x: [math.fsum(x[d] * w_o[head][d][m] for d in range(len(x))) for m in range(48)]  # noqa: E731
    n_heads, n_kv = len(z[0][0]), len(v[0][0])
    (_, layer_level), (_, per_head) = (shown(model, ids, site, parallel=0.25)[layer] for site in RESIDUAL)
    assert layer_level.shape == (2, 7, 1)
    for b in range(2):
        for t in range(7):
            own = [output(head, v[b][t][head // (n_heads // n_kv)]) for head in range(n_heads)]
            message = [math.fsum(column) for column in zip(*own, strict=True)]
            expected = -0.75 * dot(y[b][t], h[b][t]) / dot(message, h[b][t])
            assert layer_level[b, t, 0].item() == pytest.approx(expected, rel=1e-9)
            for head in range(n_heads):
                made = output(head, z[b][t][head])
                expected = -0.75 * dot(made, h[b][t]) / dot(own[head], h[b][t])
                assert per_head[b, t, head].item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("name", "backend"), PLAIN)
def test_at_attn_the_scalar_constraint_is_met_on_the_live_activations(name, backend):
    model, ids, s = zoo.build(name, backend, torch.float64), zoo.tokens(2, 12), 0.3
    before = seen(model, ids)
    after = seen(model, ids, diagonal(model, "attn", parallel=s, layers=2))
    h, y, edited = (
        acts[f"blocks.2.{n}"]
        for acts, n in ((before, "hook_resid_pre"), (before, "hook_attn_out"), (after, "hook_attn_out"))
    )
    size = edited.norm(dim=-1) * h.norm(dim=-1)
    product, found = (y * h).sum(-1), (edited * h).sum(-1)
    assert ((found - s * product).abs() <= 1e-9 * size).all()
    assert ((found - product).abs() > 1e-6 * size).all()
    # one number for all heads, and only on the diagonal
    moved = after["blocks.2.attn.hook_pattern"] - before["blocks.2.attn.hook_pattern"]
    diagonals = moved.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(diagonals, diagonals[:, :1].expand_as(diagonals), rtol=1e-9, atol=1e-12)
    assert not (moved - torch.diag_embed(diagonals)).any()


@pytest.mark.parametrize(("name", "backend"), PLAIN)
def test_the_scalar_constraint_is_met_to_one_in_a_million_in_float32(name, backend):
    model, ids = zoo.build(name, backend), zoo.tokens(2, 12)
    before = seen(model, ids)
    after = seen(model, ids, diagonal(model, "attn", parallel=0.0, layers=2))["blocks.2.hook_attn_out"].double()
    h = before["blocks.2.hook_resid_pre"].double()
    assert ((after * h).sum(-1).abs() <= 1e-6 * after.norm(dim=-1) * h.norm(dim=-1)).all()


def test_per_head_each_heads_own_contribution_is_scaled():
    model, ids, s = zoo.build("llama_bias", dtype=torch.float64), zoo.tokens(2, 12), 0.3
    hooks = diagonal(model, "attn_per_head", parallel=s, layers=2, heads=[1, 4])
    before, after = seen(model, ids), seen(model, ids, hooks)
    w_o, b_o = attention_output(model, 2)
    assert b_o is not None
    h = before["blocks.2.hook_resid_pre"]
    products = [torch.einsum("bphd,hdm,bpm->bph", acts["blocks.2.attn.hook_z"], w_o, h) for acts in (before, after)]
    expected = products[0].clone()
    expected[..., [1, 4]] *= s
    assert torch.allclose(products[1], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("site", [*VALUE, *RESIDUAL])
def test_a_scale_of_one_changes_no_bit(site):
    for dtype in (torch.float32, torch.bfloat16):
        model, ids = zoo.build("llama_gqa", dtype=dtype), zoo.tokens()
        base = logits(model, ids)
        assert torch.equal(logits(model, ids, diagonal(model, site)), base)
        assert torch.equal(logits(model, ids, diagonal(model, site, parallel=torch.ones(4))), base)


def test_watching_changes_no_bit_and_edits_keep_the_dtype():
    model, ids = zoo.build("llama_gqa", dtype=torch.bfloat16), zoo.tokens()
    watch = observe_diagonal(model, "value", lambda layer, weight, change: None)
    assert torch.equal(logits(model, ids, watch), logits(model, ids))
    after = seen(model, ids, diagonal(model, "value", parallel=0.0))
    assert after["blocks.3.hook_resid_post"].dtype == torch.bfloat16
    hook = logits(model, ids, scale(model, "value", parallel=0.0)).float()
    assert gap(logits(model, ids, diagonal(model, "value", parallel=0.0)).float(), hook) < 0.05


def test_later_layers_see_what_earlier_layers_edits_have_done():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens()
    whole = logits(model, ids, diagonal(model, "value", parallel=0.0))
    piece_by_piece = [hook for layer in range(4) for hook in diagonal(model, "value", parallel=0.0, layers=layer)]
    assert torch.equal(logits(model, ids, piece_by_piece), whole)
    alone = shown(model, ids, "value")[3][1]
    under = {}
    earlier = diagonal(model, "value", parallel=0.0, layers=slice(0, 3))
    logits(model, ids, [*earlier, *observe_diagonal(model, "value", lambda *x: under.update({x[0]: x[2]}), layers=3)])
    assert not torch.allclose(alone, under[3], atol=1e-3)


@pytest.mark.parametrize(("name", "backend"), [case for case in zoo.cases() if edits_nothing(*case)])
def test_a_map_that_is_shown_but_not_used_is_refused(name, backend):
    model = zoo.build(name, backend)
    for make in (lambda: diagonal(model, "value", parallel=0.0), lambda: remove_diagonal(model, renormalise=True)):
        with pytest.raises(SiteError, match=r"attention map cannot be edited .*shown, not used"):
            make()


def test_a_map_that_is_shown_in_time_and_not_used_is_refused():
    """As above, where the order of firing does not give it away: the point itself drops every edit."""
    model = zoo.build("llama_gqa", fresh=True)
    point = model.hook_dict["blocks.1.attn.hook_pattern"]

    class Deaf(type(point)):
        def __call__(self, tensor):
            super().__call__(tensor)
            return tensor

    point.__class__ = Deaf
    require_map(model, 0)
    with pytest.raises(SiteError, match=r"layer 1.*without a change of z"):
        diagonal(model, "value", parallel=0.0)


@pytest.mark.parametrize("name", POST_NORM)
@pytest.mark.parametrize("site", RESIDUAL)
def test_attn_is_refused_where_a_norm_follows_w_o(name, site):
    with pytest.raises(SiteError, match="a norm follows"):
        diagonal(zoo.build(name), site, parallel=0.0)


def test_user_hooks_do_not_mislead_the_check():
    model = zoo.build("gpt2", fresh=True)
    model.add_hook("blocks.1.attn.hook_z", lambda tensor, hook: 0.5 * tensor)
    inspect(model)
    assert len(diagonal(model, "value", parallel=0.0)) == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"site": "mlp"}, "no diagonal form"),
        ({"site": "attn", "heads": 0}, "one number for all heads"),
        ({"site": "attn_per_head", "grouping": "kv_group"}, "no head groups"),
        ({"site": "value", "heads": 6}, "no head 6"),
        ({"site": "value", "layers": 4}, "no layer 4"),
        ({"site": "value", "grouping": "pairs"}, "no head grouping"),
        ({"site": "value", "positions": 1.5}, "no position"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(SiteError, match=words):
        diagonal(zoo.build("llama_gqa"), **{"parallel": 0.0, **arguments})


def test_a_message_without_a_part_along_the_stream_is_not_passed_over():
    model, ids = zoo.build("gpt2", dtype=torch.float64), zoo.tokens(1, 6)
    zero_v = [("blocks.1.attn.hook_v", lambda tensor, hook: torch.zeros_like(tensor))]  # y is b_O then
    found = {}
    hooks = observe_diagonal(model, "attn", lambda *x: found.update({x[0]: x[2]}), layers=1)
    logits(model, ids, [*zero_v, *hooks])
    assert found[1].isinf().all()
    with pytest.raises(HookError, match="no finite change of A_tt does it for 6 tokens"):
        logits(model, ids, [*zero_v, *diagonal(model, "attn", parallel=0.0, layers=1)])


def test_a_cached_step_is_refused_by_the_diagonal_and_served_by_scale():
    model = zoo.build("llama_gqa", tokenizer=True)
    settings = dict(max_new_tokens=4, do_sample=False, verbose=False, stop_at_eos=False, return_type="tokens")
    ids = zoo.tokens(1, 6)
    with pytest.raises(HookError, match=r"KV cache.*use `scale`"), applied(model, diagonal(model, "value", parallel=0)):
        model.generate(ids, use_past_kv_cache=True, **settings)
    with applied(model, diagonal(model, "value", parallel=0.0)):
        uncached = model.generate(ids, use_past_kv_cache=False, **settings)
    with applied(model, scale(model, "value", parallel=0.0)):
        assert torch.equal(model.generate(ids, use_past_kv_cache=True, **settings), uncached)


def left_padded(length=12, pad=4):
    ids, mask = zoo.tokens(2, length), torch.ones(2, length, dtype=torch.int64)
    ids[0, :pad], mask[0, :pad] = 1, 0
    return ids, mask


@pytest.mark.parametrize(("name", "backend"), [("llama_gqa", "bridge"), ("gpt2", "bridge"), *zoo.cases("hooked")[:1]])
def test_padding_on_the_left_changes_nothing_for_real_tokens(name, backend):
    model, (ids, mask) = zoo.build(name, backend), left_padded()
    for hooks in (
        diagonal(model, "value", parallel=0.0),
        diagonal(model, "value_excl_self", parallel=0.0),
        remove_diagonal(model, renormalise=True),
        remove_diagonal(model, renormalise=False),
    ):
        padded = logits(model, ids, hooks, attention_mask=mask)
        assert padded.isfinite().all()
        assert gap(padded[0, 4:], logits(model, ids[:1, 4:], hooks)[0]) < 1e-5


@pytest.mark.parametrize(("name", "backend"), EDITABLE)
def test_removal_takes_the_diagonal_and_renormalised_rows_sum_to_one(name, backend):
    model, ids = zoo.build(name, backend), zoo.tokens(2, 12)
    clean = seen(model, ids)["blocks.1.attn.hook_pattern"].double()
    expected = clean - torch.diag_embed(clean.diagonal(dim1=-2, dim2=-1))
    for renormalise in (False, True):
        hooks = remove_diagonal(model, layers=1, renormalise=renormalise)
        with applied(model, hooks):
            after = seen(model, ids)["blocks.1.attn.hook_pattern"].double()
        rows = expected[..., 1:, :] / (expected[..., 1:, :].sum(-1, keepdim=True) if renormalise else 1.0)
        assert torch.allclose(after[..., 1:, :], rows, atol=1e-6)
        assert torch.equal(after[..., 0, :], clean[..., 0, :])  # token 0 keeps its only entry
        if renormalise:
            assert torch.allclose(after.sum(-1), torch.ones_like(after[..., 0]), atol=1e-6)


def test_without_keep_first_a_row_of_one_entry_is_zero_or_refused():
    model, (ids, mask) = zoo.build("llama_gqa"), left_padded()
    hooks = remove_diagonal(model, layers=1, renormalise=False, keep_first=False)
    z = seen(model, ids, hooks, attention_mask=mask)["blocks.1.attn.hook_z"]
    assert not z[0, 4].any()
    assert not z[1, 0].any()
    assert z[1, 1].any()
    kept = seen(model, ids, remove_diagonal(model, layers=1, renormalise=False), attention_mask=mask)
    assert kept["blocks.1.attn.hook_z"][0, 4].any()
    with pytest.raises(SiteError, match="nothing left to renormalise"):
        remove_diagonal(model, renormalise=True, keep_first=False)


def test_removal_without_renormalising_is_what_removing_the_self_message_is():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(2, 12)
    clean = seen(model, ids)
    z, v, pattern = (clean[f"blocks.2.attn.hook_{n}"] for n in ("z", "v", "pattern"))
    own = pattern.diagonal(dim1=-2, dim2=-1).transpose(1, 2).unsqueeze(-1) * v.repeat_interleave(3, 2)
    found = seen(model, ids, remove_diagonal(model, layers=2, renormalise=False))["blocks.2.attn.hook_z"]
    assert torch.allclose(found[:, 1:], (z - own)[:, 1:], atol=1e-13)


def test_removal_reaches_only_the_chosen_heads_and_positions():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 12)
    clean = seen(model, ids)["blocks.1.attn.hook_pattern"]
    hooks = remove_diagonal(model, layers=1, heads=[2], positions=[3, -1], renormalise=True)
    moved = (seen(model, ids, hooks)["blocks.1.attn.hook_pattern"] != clean).any(-1)
    assert moved.nonzero().tolist() == [[b, 2, t] for b in range(2) for t in (3, 11)]


def test_removal_under_a_cache_is_removal_without_one():
    model = zoo.build("llama_gqa", tokenizer=True)
    settings = dict(max_new_tokens=6, do_sample=False, verbose=False, stop_at_eos=False, return_type="tokens")
    texts = []
    for cached in (True, False):
        with applied(model, remove_diagonal(model, renormalise=True)):
            texts.append(model.generate(zoo.tokens(1, 6), use_past_kv_cache=cached, **settings))
    assert torch.equal(*texts)
    hooks = remove_diagonal(model, renormalise=True, positions=[1])
    with pytest.raises(HookError, match="positions are not known"), applied(model, hooks):
        model.generate(zoo.tokens(1, 6), use_past_kv_cache=True, **settings)


def test_gradients_flow_through_the_map_as_through_z():
    ids, gradients = zoo.tokens(), []
    for edit in (diagonal, scale):
        model = zoo.build("gpt2", dtype=torch.float64, fresh=True)
        with model.hooks(fwd_hooks=edit(model, "value", parallel=0.3)):
            model(ids, return_type="loss").backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], rtol=1e-8, atol=1e-12)


def removed(maps, chosen, renormalise, keep_first):
    """The removal in whole steps, for bits and for autograd."""
    own = torch.eye(maps.shape[-1], dtype=torch.bool)[maps.shape[-1] - maps.shape[-2] :]
    rows = maps.masked_fill(own, 0.0)
    rest = rows.sum(-1, keepdim=True)
    if renormalise:
        rows = rows / rest.masked_fill(rest == 0, 1.0)
    taken = torch.ones_like(rest, dtype=torch.bool) if chosen is None else chosen
    return torch.where(taken & (rest != 0) if keep_first else taken, rows, maps)


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("how", [(True, True), (False, True), (False, False)])
def test_removal_and_its_gradients_are_those_of_whole_steps(how, some):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64)
    maps = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    chosen = torch.rand(2, 3, 6, 1, generator=generator) < 0.6 if some else None
    g = torch.randn(maps.shape, generator=generator, dtype=torch.float64)
    for part in (maps, maps[:, :, 2:], maps.float()):
        rows = None if chosen is None else chosen[:, :, -part.shape[2] :]
        g_part, found = g[:, :, -part.shape[2] :].to(part.dtype), []
        for remove in (WithoutDiagonal.apply, removed):
            leaf = part.clone().requires_grad_()
            out = remove(leaf, rows, *how)
            plain = torch.autograd.grad(out, leaf, g_part, retain_graph=True)
            first = torch.autograd.grad(out, leaf, g_part, create_graph=True)
            second = torch.autograd.grad((first[0] ** 2).sum(), leaf) if how[0] else ()
            found.append((out, *plain, *first, *second))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][0], without_diagonal(part, rows, *how)[0])
        for ours, by_autograd in zip(*found, strict=True):
            torch.testing.assert_close(ours, by_autograd)
