"""Component scaling on live models: against plain loops, and everything an edit must not touch."""

import pytest
import reference
import torch
import zoo

from lens_geometry.anatomy import attached, inspect
from lens_geometry.edits import CONTROLS, Batch, applied, scale
from lens_geometry.errors import GeometryError, HookError, SiteError
from lens_geometry.geometry import lengths
from lens_geometry.sites import HOOKS, SITES, group_heads

RESIDUAL = ("attn", "mlp", "block")
VALUE = ("value", "value_excl_self")


def logits(model, ids, hooks=()):
    with torch.no_grad():
        return model.run_with_hooks(ids, return_type="logits", fwd_hooks=list(hooks))


def activations(model, ids, hooks=()):
    """Every activation that a site knows, as its hook point leaves it in a forward pass under hooks."""
    kept = {}

    def keeper(name):
        return lambda tensor, hook: kept.update({name: tensor.clone()})

    names = [template.format(layer) for layer in range(4) for template in HOOKS.values()]
    wanted = [(name, keeper(name)) for name in names if name in model.hook_dict]
    with torch.no_grad(), attached(model, [*hooks, *wanted]):
        model(ids, return_type="logits")
    return kept


def can_edit(model, site):
    return not inspect(model).refusal(SITES[site], 1, editing=True)


@pytest.mark.parametrize("grouping", ["each", "kv_group", "merged"])
@pytest.mark.parametrize("site", VALUE)
def test_value_space_edits_equal_plain_loops_in_float64(site, grouping):
    check_against_loops("llama_gqa", site, grouping)


@pytest.mark.parametrize("name", ["llama_gqa", "neox", "gemma2"])
@pytest.mark.parametrize("site", RESIDUAL)
def test_residual_edits_equal_plain_loops_in_float64(name, site):
    check_against_loops(name, site, "each")


def check_against_loops(name, site, grouping):
    model, ids, layer = zoo.build(name, dtype=torch.float64), zoo.tokens(2, 7), 2
    cache = activations(model, ids)
    hooks = scale(model, site, parallel=-0.4, perpendicular=0.7, layers=layer, grouping=grouping)
    target = hooks[-1][0]
    found = activations(model, ids, hooks)[target]
    if site in VALUE:
        found = group_heads(found, grouping, inspect(model).layers[layer].n_kv_heads)
    for (b, t, g), expected in reference.edited_target(cache, site, layer, -0.4, 0.7, grouping).items():
        vector = found[b, t, g] if site in VALUE else found[b, t]
        assert vector.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("name", "backend"), zoo.cases())
def test_the_no_op_is_bit_equal_and_the_edit_is_not(name, backend):
    model, ids = zoo.build(name, backend), zoo.tokens()
    base = logits(model, ids)
    for site in (site for site in SITES if can_edit(model, site)):
        assert torch.equal(logits(model, ids, scale(model, site)), base)
        ones = torch.ones(4)
        assert torch.equal(logits(model, ids, scale(model, site, parallel=ones)), base)
        with applied(model, scale(model, site, parallel=0.5)), torch.no_grad():
            assert not torch.allclose(model(ids, return_type="logits"), base, atol=1e-3)


@pytest.mark.parametrize(("name", "backend"), zoo.cases())
def test_removal_leaves_nothing_parallel_at_the_site(name, backend):
    model, ids = zoo.build(name, backend), zoo.tokens()
    for site in (site for site in (*RESIDUAL, *VALUE) if can_edit(model, site)):
        facts = inspect(model).layers[2]

        def found(hooks, site=site, facts=facts):
            acts = activations(model, ids, hooks)
            return lengths(*SITES[site].vectors({key: acts[HOOKS[key].format(2)] for key in facts.shapes}))

        before, after = found(()), found(scale(model, site, parallel=0.0, layers=2))
        assert (after.parallel <= 1e-6 * (before.update + before.reference)).all(), site
        assert torch.allclose(after.perpendicular, before.perpendicular, rtol=1e-3, atol=1e-5), site


@pytest.mark.parametrize("site", [*RESIDUAL, *VALUE, "resid"])
def test_everything_before_the_edited_layer_is_bit_equal(site):
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    before, after = (activations(model, ids, hooks) for hooks in ((), scale(model, site, parallel=0.3, layers=2)))
    for name in before:
        if int(name.split(".")[1]) < 2:
            assert torch.equal(before[name], after[name]), name
    assert not torch.equal(before["blocks.3.hook_resid_post"], after["blocks.3.hook_resid_post"])


@pytest.mark.parametrize("site", [*RESIDUAL, *VALUE])
def test_padded_and_unpadded_batches_agree(site):
    model = zoo.build("llama_gqa", dtype=torch.float64)
    short = zoo.tokens(1, 6)
    padded = torch.cat([short, torch.zeros(1, 5, dtype=torch.int64)], 1)
    batch = torch.cat([padded, zoo.tokens(1, 11, seed=1)])
    hooks = scale(model, site, parallel=0.0)
    # the unedited model itself differs by 1e-6: its softmax is in float32
    assert torch.allclose(logits(model, batch, hooks)[0, :6], logits(model, short, hooks)[0], atol=1e-5)
    assert not torch.allclose(logits(model, short, hooks), logits(model, short), atol=1e-2)


@pytest.mark.parametrize("site", VALUE)
def test_only_the_chosen_heads_and_positions_change(site):
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    name = "blocks.1.attn.hook_z"
    before = activations(model, ids)[name]
    hooks = scale(model, site, parallel=0.0, layers=1, heads=[1, 4], positions=[3, -1])
    changed = (activations(model, ids, hooks)[name] != before).any(-1)
    expected = torch.zeros_like(changed)
    for position in (3, ids.shape[1] - 1):
        expected[:, position, [1, 4]] = True
    assert torch.equal(changed, expected)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    mask[0, 2] = True
    hooks = scale(model, site, parallel=0.0, layers=1, heads=0, positions=mask)
    changed = (activations(model, ids, hooks)[name] != before).any(-1)
    assert changed.nonzero().tolist() == [[0, 2, 0]]


def test_a_kv_group_selects_its_query_heads():
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    facts = inspect(model).layers[1]
    per_group = facts.n_heads // facts.n_kv_heads
    before = activations(model, ids)["blocks.1.attn.hook_z"]
    hooks = scale(model, "value", parallel=0.0, layers=1, heads=1, grouping="kv_group")
    changed = (activations(model, ids, hooks)["blocks.1.attn.hook_z"] != before).any(-1).any(0).any(0)
    assert changed.nonzero().flatten().tolist() == list(range(per_group, 2 * per_group))


def test_tensor_and_callable_scales_reach_their_layer_head_and_token():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens()
    n_heads = inspect(model).layers[0].n_heads
    generator = torch.Generator().manual_seed(0)
    per_head = torch.rand(4, n_heads, generator=generator, dtype=torch.float64)
    one_by_one = [
        hook
        for layer in range(4)
        for head in range(n_heads)
        for hook in scale(model, "value", parallel=float(per_head[layer, head]), layers=layer, heads=head)
    ]
    assert torch.allclose(
        logits(model, ids, scale(model, "value", parallel=per_head)),
        logits(model, ids, one_by_one),
        atol=1e-11,
    )
    per_token = torch.rand(1, *ids.shape, generator=generator, dtype=torch.float64)
    gate = lambda resid: per_token[0]  # noqa: E731
    for site in ("attn", "value"):
        by_tensor = logits(model, ids, scale(model, site, parallel=per_token))
        assert torch.equal(by_tensor, logits(model, ids, scale(model, site, parallel=gate)))
        assert not torch.allclose(by_tensor, logits(model, ids))


def test_a_callable_scale_sees_the_layers_input():
    model, ids = zoo.build("neox"), zoo.tokens()
    seen = []
    gate = lambda resid: (seen.append(resid.clone()), torch.full(resid.shape[:2], 0.5))[1]  # noqa: E731
    logits(model, ids, scale(model, "mlp", parallel=gate, layers=2))
    assert torch.equal(seen[0], activations(model, ids)["blocks.2.hook_resid_pre"])


@pytest.mark.parametrize("site", ["mlp", "value_excl_self"])
def test_low_precision_activations_stay_in_their_dtype(site):
    model, ids = zoo.build("llama_gqa", dtype=torch.bfloat16), zoo.tokens()
    after = activations(model, ids, scale(model, site, parallel=0.0))
    assert {tensor.dtype for name, tensor in after.items() if "hook_resid" in name} == {torch.bfloat16}


def test_a_pass_that_dies_leaves_nothing_to_the_next():
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    hooks = scale(model, "value_excl_self", parallel=0.0)
    clean = logits(model, ids, hooks)

    def die(tensor, hook):
        raise RuntimeError("killed on the way")

    with pytest.raises(RuntimeError, match="killed"):
        logits(model, zoo.tokens(2, 12, seed=5), [*hooks, ("blocks.2.attn.hook_pattern", die)])
    assert torch.equal(logits(model, ids, hooks), clean)
    with (
        pytest.raises(RuntimeError, match="killed"),
        applied(model, [*hooks, ("blocks.2.attn.hook_pattern", die)]),
    ):
        model(ids, return_type="logits")
    assert all(not fn.collector.seen for _, fn in hooks)


def test_nothing_is_kept_between_passes_nor_shared_between_two_edits():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens()
    first, second = (scale(model, "value", parallel=p, layers=1) for p in (0.5, 0.4))
    logits(model, ids, first)
    assert all(not fn.collector.seen for _, fn in first)
    both = logits(model, ids, [*first, *second])
    product = logits(model, ids, scale(model, "value", parallel=0.2, layers=1))
    assert torch.allclose(both, product, atol=1e-12)
    assert torch.equal(logits(model, ids, first), logits(model, ids, scale(model, "value", parallel=0.5, layers=1)))


@pytest.mark.skipif(zoo.MAJOR > 3, reason="TransformerLens 4 has no HookedTransformer to compare with")
def test_a_pattern_that_is_shown_too_late_is_made_from_q_and_k():
    ids = zoo.tokens()
    bridge, hooked = (zoo.build("opt", backend) for backend in ("bridge", "hooked"))
    assert inspect(bridge).layers[0].score_scale is not None
    assert inspect(hooked).layers[0].score_scale is None
    found, expected = (logits(m, ids, scale(m, "value_excl_self", parallel=0.0)) for m in (bridge, hooked))
    assert torch.allclose(found, expected, atol=1e-4)
    assert not torch.allclose(found, logits(bridge, ids), atol=1e-2)


def test_a_pattern_made_from_q_and_k_serves_in_float64_too():
    model, ids = zoo.build("opt", dtype=torch.float64), zoo.tokens()
    narrow = logits(zoo.build("opt"), ids, scale(zoo.build("opt"), "value_excl_self", parallel=0.0))
    wide = logits(model, ids, scale(model, "value_excl_self", parallel=0.0))
    assert torch.allclose(wide, narrow.double(), atol=1e-4)


def test_a_pattern_made_from_q_and_k_is_refused_where_it_is_not_the_models():
    model, ids = zoo.build("opt"), zoo.tokens()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padding on the left
    hooks = scale(model, "value_excl_self", parallel=0.0)
    with pytest.raises(HookError, match="left padding"), applied(model, hooks), torch.no_grad():
        model(ids, attention_mask=mask, return_type="logits")


def test_gradients_flow_through_the_edit_and_match_a_hand_written_one():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64, fresh=True), zoo.tokens()

    def by_hand(tensor, hook):
        resid = kept["resid"]
        alpha = (tensor * resid).sum(-1, keepdim=True) / (resid * resid).sum(-1, keepdim=True)
        return tensor - alpha * resid

    kept = {}
    hand = [
        ("blocks.1.hook_resid_pre", lambda tensor, hook: kept.update(resid=tensor)),
        ("blocks.1.hook_attn_out", by_hand),
    ]
    gradients = []
    for hooks in (hand, scale(model, "attn", parallel=0.0, layers=1)):
        model.zero_grad()
        with model.hooks(fwd_hooks=hooks):
            model(ids, return_type="loss").backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) > 10
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("control", [c for c in CONTROLS if c not in ("none", "gain")])
def test_the_noise_of_a_control_belongs_to_the_sequence_not_to_the_batch(control):
    model = zoo.build("llama_gqa", dtype=torch.float64)
    ids = zoo.tokens(3, 9)
    whole = logits(model, ids, scale(model, "mlp", parallel=0.0, control=control, batch=Batch(ids=[0, 1, 2])))
    for row in (2, 0):
        alone = scale(model, "mlp", parallel=0.0, control=control, batch=Batch(ids=[row]))
        assert torch.allclose(logits(model, ids[row : row + 1], alone)[0], whole[row], atol=1e-11)
    other = logits(model, ids, scale(model, "mlp", parallel=0.0, control=control, seed=1))
    assert not torch.allclose(other, whole, atol=1e-3)


def test_controls_are_what_their_names_say():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens()
    name = "blocks.1.hook_mlp_out"
    clean = activations(model, ids)
    edited = {
        control: activations(model, ids, scale(model, "mlp", parallel=0.25, layers=1, control=control))[name]
        for control in CONTROLS
    }
    change = {control: edited[control] - clean[name] for control in CONTROLS}
    assert torch.allclose(edited["gain"], 0.25 * clean[name], atol=1e-12)
    assert torch.allclose(change["isotropic"].norm(dim=-1), change["none"].norm(dim=-1), rtol=1e-10)
    cosine = torch.cosine_similarity(change["isotropic"], change["none"], dim=-1)
    assert cosine.abs().max() < 0.7  # 48 dimensions
    mid = clean["blocks.1.hook_resid_mid"]
    for row in range(len(ids)):
        for t in range(1, ids.shape[1]):
            parallel_to = torch.cosine_similarity(change["shuffled_reference"][row, t][None], mid[row], dim=-1).abs()
            assert parallel_to.argmax() < t
            assert parallel_to.max() > 1 - 1e-9


@pytest.mark.parametrize("site", ["value", "value_excl_self", "attn"])
def test_a_matched_random_reference_changes_as_much_and_leaves_as_long_along_another_direction(site):
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens()
    name, layer = HOOKS[SITES[site].target].format(1), {"layers": 1, "parallel": 0.25}
    clean, edit, matched, other = (
        activations(model, ids, hooks)
        for hooks in (
            (),
            scale(model, site, **layer),
            scale(model, site, **layer, control="matched_random_reference"),
            scale(model, site, **layer, control="matched_random_reference", seed=1),
        )
    )
    facts = inspect(model).layers[1]
    update, reference = SITES[site].vectors({key: clean[HOOKS[key].format(1)] for key in facts.shapes})
    by_edit, by_control = edit[name] - clean[name], matched[name] - clean[name]
    torch.testing.assert_close(by_control.norm(dim=-1), by_edit.norm(dim=-1), rtol=1e-9, atol=1e-12)
    left, expected = (update + change for change in (by_control, by_edit))
    torch.testing.assert_close(left.norm(dim=-1), expected.norm(dim=-1), rtol=1e-9, atol=1e-12)
    # it lies along a reference against which the update has the same parallel part, whatever its sign
    moved = lengths(update, by_edit).update > 1e-9
    found = lengths(update, by_control)
    assert torch.allclose(found.parallel[moved], lengths(update, reference).parallel[moved], rtol=1e-9, atol=1e-9)
    assert torch.allclose(0.75 * found.parallel[moved], by_control.norm(dim=-1)[moved], rtol=1e-9, atol=1e-9)
    turned = torch.cosine_similarity(by_control, by_edit, dim=-1)[moved].abs()
    assert turned.mean() < 0.8
    assert not torch.allclose(matched[name], other[name], atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"site": "atn"}, SiteError, "choose one of attn"),
        ({"site": "attn", "layers": 4}, SiteError, "layers 0 to 3"),
        ({"site": "attn", "layers": []}, SiteError, "select no layer"),
        ({"site": "attn", "layers": [1, 1, -3]}, SiteError, "one twice"),
        ({"site": "attn", "layers": 1.5}, SiteError, "no layer"),
        ({"site": "attn", "heads": 0}, SiteError, "no heads"),
        ({"site": "value", "heads": 6}, SiteError, "heads 0 to 5"),
        ({"site": "value", "heads": 2, "grouping": "kv_group"}, SiteError, "heads 0 to 1"),
        ({"site": "value", "grouping": "pairs"}, SiteError, "grouping"),
        ({"site": "resid", "perpendicular": 0.0}, SiteError, "its own reference"),
        ({"site": "attn", "parallel": float("nan")}, GeometryError, "not finite"),
        ({"site": "attn", "parallel": torch.ones(3)}, GeometryError, "[layer] axis"),
        ({"site": "attn", "parallel": torch.ones(4, 6)}, GeometryError, "has heads"),
        ({"site": "attn", "parallel": torch.tensor([1.0, float("nan"), 1, 1])}, GeometryError, "not finite"),
        ({"site": "attn", "parallel": "half"}, GeometryError, "no number"),
        ({"site": "attn", "parallel": None}, GeometryError, "no number"),
        ({"site": "attn", "control": "noise"}, SiteError, "choose one of none"),
        (
            {"site": "attn", "parallel": 0.0, "perpendicular": 0.0, "control": "gain"},
            GeometryError,
            "one number",
        ),
    ],
)
def test_edits_that_make_no_sense_are_refused_with_a_cure(arguments, error, words):
    arguments = dict(arguments)
    with pytest.raises(error) as caught:
        scale(zoo.build("llama_gqa"), arguments.pop("site"), **arguments)
    assert words in str(caught.value)
    assert "Cure:" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"parallel": torch.zeros(4, 5)}, "does not fit"),
        ({"parallel": 0.0, "positions": 12}, "no position 12"),
        ({"parallel": 0.0, "positions": torch.ones(2, 11, dtype=torch.bool)}, "does not fit"),
    ],
)
def test_what_does_not_fit_the_batch_is_refused_when_it_is_run(arguments, words):
    model = zoo.build("llama_gqa")
    with pytest.raises((GeometryError, HookError), match=words):
        logits(model, zoo.tokens(2, 12), scale(model, "value", **arguments))


@pytest.mark.parametrize("gate", [lambda resid: 0.5, lambda resid: resid[:, 0, 0], lambda resid: resid[:, :2, 0]])
def test_a_callable_scale_of_the_wrong_shape_is_refused(gate):
    model = zoo.build("llama_gqa")
    with pytest.raises(GeometryError, match="the callable scale gave"):
        logits(model, zoo.tokens(), scale(model, "mlp", parallel=gate))


def test_no_control_sees_the_future():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens()
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 100
    for control in CONTROLS:
        hooks = scale(model, "value", parallel=0.0, control=control)
        assert torch.allclose(logits(model, ids, hooks)[:, :-1], logits(model, other, hooks)[:, :-1], atol=1e-5)


@pytest.mark.parametrize("arguments", [{"positions": [0]}, {"positions": slice(1, None)}, {"control": "isotropic"}])
def test_positions_and_noise_are_refused_in_a_cached_step_where_they_would_mean_something_else(arguments):
    model = zoo.build("llama_gqa", tokenizer=True)
    hooks = scale(model, "mlp", parallel=0.5, **arguments)
    with pytest.raises(HookError, match="KV cache"), applied(model, hooks):
        model.generate(zoo.tokens(1, 5), max_new_tokens=3, use_past_kv_cache=True, do_sample=False, verbose=False)


@pytest.mark.parametrize("site", [*RESIDUAL, *VALUE])
def test_edited_generation_is_the_same_with_and_without_the_cache(site):
    model = zoo.build("llama_gqa", tokenizer=True)
    texts = []
    for cached in (True, False):
        with applied(model, scale(model, site, parallel=-0.5)):
            texts.append(
                model.generate(
                    zoo.tokens(1, 6), max_new_tokens=8, use_past_kv_cache=cached, do_sample=False, verbose=False,
                    stop_at_eos=False, return_type="tokens",
                )
            )  # fmt: skip
    assert torch.equal(*texts)


def test_heads_may_come_from_a_generator():
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    hooks = scale(model, "value", parallel=0.0, heads=(head for head in (0, 1)))
    assert torch.equal(logits(model, ids, hooks), logits(model, ids, scale(model, "value", parallel=0.0, heads=[0, 1])))


def test_an_edit_built_for_another_model_is_refused():
    hooks = scale(zoo.build("llama_gqa"), "value", parallel=0.0)
    with pytest.raises(HookError, match="when it was inspected"):
        logits(zoo.build("gpt2"), zoo.tokens(), hooks)


def test_half_of_an_edit_is_refused():
    model = zoo.build("llama_gqa")
    hooks = [(name, fn) for name, fn in scale(model, "value_excl_self", parallel=0.0) if "hook_v" not in name]
    with pytest.raises(HookError, match="add the whole list"):
        logits(model, zoo.tokens(), hooks)


def test_gain_and_resid_look_at_every_layer_that_is_edited():
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    by_layer = torch.tensor([1.0, 0.5, 0.5, 0.5])
    expected = logits(model, ids, scale(model, "attn", parallel=0.5, layers=[1, 2, 3], control="gain"))
    found = logits(model, ids, scale(model, "attn", parallel=by_layer, layers=[1, 2, 3], control="gain"))
    assert torch.equal(found, expected)
    assert not torch.equal(found, logits(model, ids))
    with pytest.raises(GeometryError, match="one number"):
        scale(model, "attn", parallel=by_layer, perpendicular=by_layer, control="gain")
    with pytest.raises(SiteError, match="no perpendicular part"):
        scale(model, "resid", perpendicular=by_layer)


def test_the_matched_control_is_as_strong_as_the_edit_in_a_padded_slice_too():
    model, ids = zoo.build("llama_gqa", d_mlp=100), zoo.tokens()
    name = "blocks.1.mlp.hook_post"

    def change(**edit):
        kept = []
        with torch.no_grad():
            keep = (name, lambda tensor, hook: kept.append(tensor.clone()))
            hooks = scale(model, "mlp_carrier", parallel=0.0, layers=1, **edit)
            model.run_with_hooks(ids, return_type=None, fwd_hooks=[keep, *hooks, keep])
        return (kept[1] - kept[0]).double()

    edit, control = change(), change(control="matched_random_reference")
    for part in (slice(0, 48), slice(48, 96), slice(96, 100)):
        sizes = [x[..., part].norm(dim=-1) for x in (edit, control)]
        torch.testing.assert_close(*sizes, rtol=1e-3, atol=1e-6)
    assert not torch.allclose(edit, control, atol=1e-3)
