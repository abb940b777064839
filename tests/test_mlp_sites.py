"""Inside the MLP: carrier and contributions, against plain loops, on every class of model."""

import numpy as np
import pandas as pd
import pytest
import reference
import torch
import zoo

from lens_geometry.anatomy import inspect, require
from lens_geometry.edits import Batch, applied, observe, scale
from lens_geometry.errors import GeometryError, SiteError
from lens_geometry.experiments import profile
from lens_geometry.mlp_anatomy import mlp_vectors
from lens_geometry.sites import HOOKS, SITES
from lens_geometry.slices import contributions, join_slices, split_carrier
from lens_geometry.weights import mlp_output

INSIDE = ("mlp_carrier", "mlp_carrier_stream", "mlp_contribution")
CARRIERS = INSIDE[:2]
UNEVEN = 100  # d_mlp: two slices of 48, and one of 4 that is padded
LOW = [case for case in zoo.cases() if case[0] in ("llama_gqa", "gpt2", "olmo2")]
SHAPES = [("llama_gqa", 96), ("llama_gqa", UNEVEN), ("gpt2", 72), ("neox", UNEVEN), ("gemma2", UNEVEN), ("granite", 30)]


def logits(model, ids, hooks=()):
    with torch.no_grad():
        return model.run_with_hooks(ids, return_type="logits", fwd_hooks=list(hooks))


def activations(model, ids, hooks=(), layer=2):
    """Every activation of a layer that inspection saw, by its hook's name, as it is under hooks."""
    kept = {}

    def keeper(name):
        return lambda tensor, hook: kept.update({name: tensor.clone()})

    names = [HOOKS[short].format(layer) for short in inspect(model).layers[layer].shapes]
    with torch.no_grad(), model.hooks(fwd_hooks=[*hooks, *((name, keeper(name)) for name in names)]):
        model(ids, return_type="logits")
    return kept


def vectors(model, site, acts, layer=2):
    facts = inspect(model).layers[layer]
    short = {name: acts[HOOKS[name].format(layer)] for name in facts.shapes}
    with torch.no_grad():
        return SITES[site].vectors({**short, **mlp_vectors(model, layer, facts.mlp, short)})


@pytest.mark.parametrize("d_mlp", [30, 48, 96, 100])
def test_slices_cover_the_carrier_and_their_contributions_add_up_to_the_output(d_mlp):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(2, 3, d_mlp, generator=generator, dtype=torch.float64)
    w_out = torch.randn(d_mlp, 48, generator=generator, dtype=torch.float64)
    slices = split_carrier(h, 48)
    assert slices.shape == (2, 3, -(-d_mlp // 48), 48)
    assert torch.equal(join_slices(slices, d_mlp), h)
    assert slices.flatten(2)[..., d_mlp:].abs().sum() == 0
    y = contributions(h, w_out)
    for g in range(y.shape[2]):
        rows = slice(48 * g, 48 * (g + 1))
        torch.testing.assert_close(y[:, :, g], h[..., rows] @ w_out[rows], rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(y.sum(2), h @ w_out, rtol=1e-13, atol=1e-13)
    assert contributions(h.bfloat16(), w_out.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize(("name", "d_mlp"), SHAPES)
@pytest.mark.parametrize("site", INSIDE)
def test_edits_inside_the_mlp_equal_plain_loops_in_float64(name, d_mlp, site):
    model, ids = zoo.build(name, dtype=torch.float64, d_mlp=d_mlp), zoo.tokens(2, 5)
    cache = activations(model, ids)
    w_out, b_out = mlp_output(model, 2)
    bias = None if b_out is None else b_out.tolist()
    for chosen in (None, [0]):
        hooks = scale(model, site, parallel=-0.4, perpendicular=0.7, layers=2, heads=chosen)
        found = activations(model, ids, hooks)[hooks[-1][0]]
        expected = reference.edited_mlp(cache, site, 2, -0.4, 0.7, w_out.tolist(), bias, chosen)
        np.testing.assert_allclose(found.numpy(), np.array(expected), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("name", "d_mlp"), SHAPES)
def test_measurements_inside_the_mlp_equal_plain_loops_in_float64(name, d_mlp):
    model, ids = zoo.build(name, dtype=torch.float64, d_mlp=d_mlp), zoo.tokens(2, 5)
    table = profile(model, ids, sites=INSIDE, progress=False).table
    assert set(table["head"].dropna()) == set(range(-(-d_mlp // 48)))
    cache, w_out = activations(model, ids), mlp_output(model, 2)[0].tolist()
    for site, rows in table[table["layer"] == 2].groupby("site"):
        found = reference.vectors(cache, site, 2, w_out=w_out)
        tokens = {key: reference.numbers(u, r) for key, (u, r) in found.items() if key[1] > 0}
        for row in rows.itertuples():
            values = [n[row.metric] for key, n in tokens.items() if pd.isna(row.head) or key[2] == row.head]
            assert row.n_tokens == len(values)
            assert row.mean == pytest.approx(np.mean(values), rel=1e-10), (site, row.metric, row.head)


@pytest.mark.parametrize(("name", "backend"), zoo.cases(exclude=("moe",)))
@pytest.mark.parametrize("d_mlp", [96, UNEVEN])
def test_the_no_op_is_bit_equal_removal_removes_and_the_edit_reaches_the_logits(name, backend, d_mlp):
    model, ids = zoo.build(name, backend, d_mlp=d_mlp), zoo.tokens()
    base = logits(model, ids)
    for site in (site for site in INSIDE if site not in zoo.lacks(name, backend)):
        assert torch.equal(logits(model, ids, scale(model, site)), base)
        assert torch.equal(logits(model, ids, scale(model, site, perpendicular=torch.ones(4))), base)
        with applied(model, scale(model, site, parallel=0.0)), torch.no_grad():
            assert not torch.allclose(model(ids, return_type="logits"), base, atol=1e-3)
        with applied(model, scale(model, site, perpendicular=0.0)), torch.no_grad():
            assert not torch.allclose(model(ids, return_type="logits"), base, atol=1e-3)


@pytest.mark.parametrize(("name", "backend"), zoo.cases("bridge", "native", exclude=("moe",)))
def test_the_slices_contributions_and_the_bias_are_the_output(name, backend):
    model = zoo.build(name, backend, torch.float64, d_mlp=UNEVEN)
    acts = activations(model, zoo.tokens())
    y, h = vectors(model, "mlp_contribution", acts)
    bias = mlp_output(model, 2)[1]
    total = y.sum(2) + (0 if bias is None else bias.detach())
    output = acts[inspect(model).where(SITES["mlp_contribution"], 2)]
    torch.testing.assert_close(total, output, rtol=1e-12, atol=1e-12)
    assert y.shape == h.shape == (*output.shape[:2], 3, 48)


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "gemma2", "granite", "olmo2"])
def test_the_gain_of_all_contributions_scales_the_output_but_not_the_bias(name):
    model, ids = zoo.build(name, dtype=torch.float64, d_mlp=UNEVEN), zoo.tokens()
    hooks = scale(model, "mlp_contribution", parallel=0.3, layers=2, control="gain")
    where, bias = hooks[-1][0], mlp_output(model, 2)[1]
    bias = 0 if bias is None else bias.detach()
    before, after = activations(model, ids)[where], activations(model, ids, hooks)[where]
    torch.testing.assert_close(after, bias + 0.3 * (before - bias), rtol=1e-12, atol=1e-12)
    carrier = activations(model, ids, scale(model, "mlp_carrier", parallel=0.3, layers=2, control="gain"))[where]
    torch.testing.assert_close(carrier, after, rtol=1e-12, atol=1e-12)  # the same thing before W_out


@pytest.mark.skipif(zoo.MAJOR > 3, reason="TransformerLens 4 has no HookedTransformer to compare with")
@pytest.mark.parametrize("name", [name for name, _ in zoo.cases("hooked", exclude=("moe",))])
def test_both_classes_have_the_same_input_carrier_and_edited_logits(name):
    ids, found, edited = zoo.tokens(), {}, {}
    for backend in ("bridge", "hooked"):
        model = zoo.build(name, backend, d_mlp=UNEVEN)
        acts = activations(model, ids)
        for site in (site for site in INSIDE if site not in zoo.lacks(name, "hooked")):
            found.setdefault(site, []).append(vectors(model, site, acts))
            edited.setdefault(site, []).append(logits(model, ids, scale(model, site, parallel=-1.0)))
    for site, ((u, r), (u_hooked, r_hooked)) in found.items():
        torch.testing.assert_close(u, u_hooked, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(r, r_hooked, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(*edited[site], rtol=1e-3, atol=1e-3)


def test_the_stream_is_the_one_that_the_mlp_reads():
    for name, hook in (("neox", "hook_resid_pre"), ("llama_gqa", "hook_resid_mid"), ("granite", "hook_resid_mid")):
        model = zoo.build(name)
        acts = activations(model, zoo.tokens())
        reference_vectors = vectors(model, "mlp_carrier_stream", acts)[1]
        assert torch.equal(reference_vectors[:, :, 0], acts[f"blocks.2.{hook}"])
        assert torch.equal(reference_vectors[:, :, 1], acts[f"blocks.2.{hook}"])


def test_without_a_pre_norm_both_references_are_the_stream():
    model = zoo.build("olmo2")
    acts = activations(model, zoo.tokens())
    assert torch.equal(vectors(model, "mlp_carrier", acts)[1], vectors(model, "mlp_carrier_stream", acts)[1])


@pytest.mark.skipif(zoo.MAJOR > 3, reason="TransformerLens 4 has no HookedTransformer")
@pytest.mark.parametrize(
    ("norm", "source"), [(None, "resid_mid"), ("LN", "ln2_normalized"), ("LNPre", "ln2_normalized")]
)
def test_a_hooked_transformers_input_is_found_whatever_its_norm(norm, source):
    import transformer_lens

    config = transformer_lens.HookedTransformerConfig(
        n_layers=2, d_model=24, d_head=8, n_heads=3, d_mlp=50, d_vocab=99, n_ctx=16, act_fn="gelu",
        normalization_type=norm, device="cpu", seed=0,
    )  # fmt: skip
    model = transformer_lens.HookedTransformer(config)
    zoo.fill(model)
    facts = require(model, "mlp_carrier", editing=True)[0].layers[1]
    assert facts.mlp.input == source
    assert facts.n_slices == 3


def test_only_the_chosen_slices_and_positions_change():
    model, ids = zoo.build("llama_gqa", d_mlp=UNEVEN), zoo.tokens()
    for site in CARRIERS:
        before = activations(model, ids)["blocks.2.mlp.hook_post"]
        hooks = scale(model, site, parallel=0.0, layers=2, heads=[-1], positions=[3])
        changed = (activations(model, ids, hooks)["blocks.2.mlp.hook_post"] != before).nonzero()
        assert set(changed[:, 1].tolist()) == {3}
        assert set(changed[:, 2].tolist()) == {96, 97, 98, 99}
    hooks = [hook for g in range(3) for hook in scale(model, "mlp_contribution", perpendicular=0.5, layers=2, heads=g)]
    whole = logits(model, ids, scale(model, "mlp_contribution", perpendicular=0.5, layers=2))
    torch.testing.assert_close(logits(model, ids, hooks), whole, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(model, ids, hooks[:2]), whole, atol=1e-3)


def test_tensor_scales_reach_their_slice():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64, d_mlp=UNEVEN), zoo.tokens()
    by_slice = torch.tensor([[0.2, 1.0, 0.5]], dtype=torch.float64).expand(4, 3)
    for site in INSIDE:
        one_by_one = [h for g in (0, 2) for h in scale(model, site, parallel=float(by_slice[0, g]), layers=2, heads=g)]
        only = torch.ones(4, 3, dtype=torch.float64)
        only[2] = by_slice[2]
        torch.testing.assert_close(
            logits(model, ids, scale(model, site, parallel=only)), logits(model, ids, one_by_one), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("site", INSIDE)
def test_an_isotropic_control_is_as_large_as_the_edit_in_what_the_target_really_has(site):
    model, ids = zoo.build("llama_gqa", dtype=torch.float64, d_mlp=UNEVEN), zoo.tokens()
    where = "blocks.2.mlp.hook_post" if site in CARRIERS else "blocks.2.hook_mlp_out"
    clean, changes = activations(model, ids)[where], {}
    for control in ("none", "isotropic"):
        slices = []
        for g in range(3):
            hooks = scale(model, site, perpendicular=0.25, layers=2, heads=g, control=control, batch=Batch())
            slices.append((activations(model, ids, hooks)[where] - clean).norm(dim=-1))
        changes[control] = torch.stack(slices)
    assert (changes["none"] > 0.01).any(-1).any(-1).all()
    torch.testing.assert_close(changes["isotropic"], changes["none"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("site", INSIDE)
@pytest.mark.parametrize(
    ("name", "backend"), [case for case in zoo.cases() if case[0] in ("llama_gqa", "gpt2", "olmo2")]
)
def test_bfloat16_stays_bfloat16_and_removal_is_felt(site, name, backend):
    model, ids = zoo.build(name, backend, torch.bfloat16, d_mlp=UNEVEN), zoo.tokens()
    hooks = scale(model, site, parallel=0.0)
    after = activations(model, ids, hooks)
    assert {after[f"blocks.2.{hook}"].dtype for hook in ("mlp.hook_post", "hook_mlp_out", "hook_resid_post")} == {
        torch.bfloat16
    }
    assert torch.equal(logits(model, ids, scale(model, site)), logits(model, ids))
    assert not torch.equal(logits(model, ids, hooks), logits(model, ids))


def test_weights_are_read_live():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64, d_mlp=UNEVEN, fresh=True), zoo.tokens()
    hooks = scale(model, "mlp_contribution", parallel=0.0, perpendicular=0.0, layers=2)
    with torch.no_grad():
        mlp_output(model, 2)[0].mul_(3.0)  # as training does
        out = activations(model, ids, hooks)["blocks.2.hook_mlp_out"]
    assert out.abs().max() < 1e-10


def test_gradients_flow_through_a_contribution_into_w_out_as_by_hand():
    model, ids = zoo.build("gpt2", dtype=torch.float64, d_mlp=72, fresh=True), zoo.tokens()

    def by_hand(tensor, hook):
        h, w = kept["h"], mlp_output(model, 1)[0]
        for start in (0, 48):
            piece = torch.nn.functional.pad(h[..., start : start + 48], (0, 48 - h[..., start : start + 48].shape[-1]))
            y = h[..., start : start + 48] @ w[start : start + 48]
            tensor = tensor - (y * piece).sum(-1, keepdim=True) / (piece * piece).sum(-1, keepdim=True) * piece
        return tensor

    kept = {}
    hand = [
        ("blocks.1.mlp.hook_post", lambda tensor, hook: kept.update(h=tensor)),
        ("blocks.1.hook_mlp_out", by_hand),
    ]
    gradients = []
    for hooks in (hand, scale(model, "mlp_contribution", parallel=0.0, layers=1)):
        model.zero_grad()
        with model.hooks(fwd_hooks=hooks):
            model(ids, return_type="loss").backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) > 10
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("site", INSIDE)
@pytest.mark.parametrize("backend", [backend for name, backend in zoo.cases() if name == "moe"])
def test_a_mixture_of_experts_is_refused_since_it_has_no_single_carrier(site, backend):
    model = zoo.build("moe", backend)
    for refused in (lambda: scale(model, site, parallel=0.0), lambda: observe(model, [site], print)):
        with pytest.raises(SiteError, match="mixture of experts, which has no single carrier"):
            refused()


@pytest.mark.skipif(zoo.MAJOR > 3, reason="TransformerLens 4 has no HookedTransformer")
def test_a_contribution_behind_a_norm_is_refused_where_no_hook_shows_it():
    with pytest.raises(SiteError, match=r"no hook shows what W_out gives \(blocks\.0\.hook_mlp_out is after a norm"):
        scale(zoo.build("gemma2", "hooked"), "mlp_contribution", parallel=0.0)
    assert inspect(zoo.build("gemma2")).layers[0].mlp.output == "mlp_raw"


def test_an_input_that_is_not_what_the_weights_see_is_refused():
    model = zoo.build("llama_gqa", fresh=True)
    point = model.hook_dict["blocks.1.mlp.hook_pre"]
    point.forward = lambda tensor: type(point).forward(point, tensor + 1.0)  # an input that nobody shows
    with pytest.raises(SiteError, match=r"x @ W_in .* does not hold .* no hook shows the MLP's input"):
        require(model, "mlp_carrier")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"heads": 3}, SiteError, "there is no slice 3"),
        ({"heads": []}, SiteError, "slices [] select no slice"),
        ({"heads": "0"}, SiteError, "there is no slice"),
        ({"grouping": "merged"}, SiteError, "slices, which cannot be grouped"),
        ({"parallel": torch.ones(3)}, GeometryError, "[layer] axis"),
    ],
)
def test_what_makes_no_sense_inside_the_mlp_is_refused(arguments, error, words):
    for site in INSIDE:
        with pytest.raises(error) as caught:
            scale(zoo.build("llama_gqa", d_mlp=UNEVEN), site, **{"parallel": 0.0, **arguments})
        assert words in str(caught.value)
        assert "Cure:" in str(caught.value)
