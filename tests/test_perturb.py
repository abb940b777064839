"""L2-matched perturbation: equal distances on live models, against plain loops; every switch does what it says."""

import math
from dataclasses import replace

import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st

from lens_geometry.anatomy import attached, inspect
from lens_geometry.edits import KINDS, PRESETS, Batch, Displacements, Perturbation, applied, perturb
from lens_geometry.edits.noise import token_noise
from lens_geometry.errors import DisplacementError, GeometryError, HookError, SiteError
from lens_geometry.geometry import rescale_by, rotate_by
from lens_geometry.sites import SITES

FRESH = PRESETS["default"]


def logits(model, ids, hooks=()):
    with torch.no_grad(), attached(model, list(hooks)):
        return model(ids, return_type="logits")


def streams(model, ids, hooks=(), layers=(1, 2)):
    """hook_resid_pre of some layers, as it enters and as it leaves the hooks."""
    before, after = {}, {}
    names = {layer: f"blocks.{layer}.hook_resid_pre" for layer in layers}
    first = [(name, lambda x, hook, i=layer: before.update({i: x.clone()})) for layer, name in names.items()]
    last = [(name, lambda x, hook, i=layer: after.update({i: x.clone()})) for layer, name in names.items()]
    logits(model, ids, [*first, *hooks, *last])
    return before, after


vectors = st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3).filter(lambda v: math.hypot(*v) > 1e-3)


@given(vectors, vectors, st.floats(0.0, 2.0))
@settings(max_examples=80, deadline=None)
def test_a_rotation_keeps_the_length_and_moves_by_the_distance(h, direction, share):
    h, direction = torch.tensor(h, dtype=torch.float64), torch.tensor(direction, dtype=torch.float64)
    aside = direction - (direction @ h) / (h @ h) * h
    if aside.norm() < 1e-6 * direction.norm():
        return
    distance = share * float(h.norm())
    turned = rotate_by(h, direction, distance)
    assert math.isclose(float(turned.norm()), float(h.norm()), rel_tol=1e-9)
    assert math.isclose(float((turned - h).norm()), distance, rel_tol=1e-9, abs_tol=1e-9)
    angle = math.acos(1 - share**2 / 2)
    by_text = h.norm() * (math.cos(angle) * h / h.norm() + math.sin(angle) * aside / aside.norm())
    assert torch.allclose(turned, by_text, rtol=1e-6, atol=1e-6 * float(h.norm()))


@given(vectors, st.floats(-3.0, 3.0))
@settings(max_examples=50, deadline=None)
def test_rescaling_moves_by_the_distance_along_the_vector(h, share):
    h = torch.tensor(h, dtype=torch.float64)
    distance = share * float(h.norm())
    assert torch.allclose(rescale_by(h, distance), (1 + share) * h, rtol=1e-9, atol=1e-9)


def test_distance_zero_changes_no_bit_and_impossible_ones_are_refused():
    h, v = torch.randn(5, 8), torch.randn(5, 8)
    assert torch.equal(rotate_by(h, v, 0.0), h)
    assert torch.equal(rescale_by(h, 0.0), h)
    assert torch.equal(rotate_by(torch.zeros(8), v[0], 0.0), torch.zeros(8))
    for call in (
        lambda: rotate_by(h, v, 2.01 * h.norm(dim=-1)),
        lambda: rotate_by(h, -2 * h, 0.1),
        lambda: rotate_by(torch.zeros(8), v[0], 0.1),
        lambda: rescale_by(torch.zeros(8), 0.1),
        lambda: rotate_by(h, v[:, :4], 0.1),
    ):
        with pytest.raises(GeometryError):
            call()


@pytest.mark.parametrize("exponent", [-36, -20, 20])
def test_lengths_near_the_ends_of_float32_are_turned_as_well(exponent):
    h, v = torch.randn(9, 16) * 10.0**exponent, torch.randn(9, 16)
    distance = 0.3 * h.double().norm(dim=-1)
    moved = (rotate_by(h, v, distance.float()).double() - h.double()).norm(dim=-1)
    assert torch.allclose(moved / distance, torch.ones(9, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize(("name", "backend"), zoo.cases())
def test_both_kinds_move_every_token_of_every_model_by_the_displacement(name, backend):
    model, ids = zoo.build(name, backend), zoo.tokens(2, 9)
    base = logits(model, ids)
    for kind in KINDS:
        for displacement, unit in ((0.3, "relative"), (0.8, "absolute")):
            seen = Displacements()
            hooks = perturb(model, kind, displacement, layers=(1, 2), unit=unit, record=seen)
            before, after = streams(model, ids, hooks)
            assert not torch.equal(logits(model, ids, hooks), base)
            for layer in (1, 2):
                h, moved = before[layer].double(), after[layer].double()
                wanted = (
                    displacement * h.norm(dim=-1) if unit == "relative" else torch.full_like(h[..., 0], displacement)
                )
                assert torch.allclose((moved - h).norm(dim=-1)[:, 1:], wanted[:, 1:], rtol=1e-5)
                assert torch.equal(moved[:, 0], h[:, 0])  # position 0 is left alone
                if kind == "angular":
                    assert torch.allclose(moved.norm(dim=-1), h.norm(dim=-1), rtol=1e-5)
                else:
                    assert torch.cosine_similarity(moved, h, dim=-1).min() > 1 - 1e-5
            found = seen.summary()
            assert found["displacement_max_error"] < 1e-5
            assert found["n_places"] == 2 * 8 * 2 * 2  # rows, positions, layers, passes
            assert found["n_clipped"] == found["n_flipped"] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", PRESETS)
def test_displacement_zero_changes_no_bit(kind, how):
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    assert torch.equal(logits(model, ids, perturb(model, kind, 0.0, how)), logits(model, ids))


@pytest.mark.parametrize("site", [site for site in SITES if site not in ("mlp_carrier_stream",)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_site_is_moved_by_the_displacement(site, kind):
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens()
    assert not inspect(model).refusal(SITES[site], 1, editing=True)
    seen = Displacements()
    with applied(model, perturb(model, kind, 0.2, site=site, layers=1, record=seen)):
        logits(model, ids)
    assert seen.summary()["displacement_max_error"] < 1e-9
    assert seen.summary()["displacement_relative"] == pytest.approx(0.2, abs=1e-9)


def test_chosen_heads_and_positions_alone_are_moved():
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    kept = {}
    name = "blocks.2.attn.hook_z"
    hooks = perturb(model, "angular", 0.5, site="value", layers=2, heads=[1, 4], positions=[3, -1])
    first = [(name, lambda x, hook: kept.update(before=x.clone()))]
    last = [(name, lambda x, hook: kept.update(after=x.clone()))]
    logits(model, ids, [*first, *hooks, *last])
    moved = (kept["after"] != kept["before"]).any(-1)
    expected = torch.zeros_like(moved)
    for position in (3, ids.shape[1] - 1):
        expected[:, position, [1, 4]] = True
    assert torch.equal(moved, expected)


@pytest.mark.parametrize(
    "how", [FRESH, replace(FRESH, noise="shared", signs="fixed"), replace(FRESH, tangent="semantic")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_noise_belongs_to_the_sequence_not_to_batch_order_or_length(kind, how):
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(3, 11)

    def run(rows, length, seed=0):
        hooks = perturb(model, kind, 0.4, how, layers=(1, 2), seed=seed, batch=Batch(ids=rows))
        return logits(model, ids[rows, :length], hooks)

    whole = run([0, 1, 2], 11)
    assert torch.allclose(run([2, 0], 11), whole[[2, 0]], atol=1e-10)
    # what follows a token changes nothing before it (Hugging Face's norms and rotations are in float32)
    assert torch.allclose(run([1], 7), whole[[1], :7], atol=1e-5)
    assert not torch.allclose(run([0, 1, 2], 11, seed=1), whole, atol=1e-3)


def test_rows_with_one_id_have_one_noise():
    noise = token_noise(torch.zeros(3, 5, 4), Batch(ids=[7, 2, 7]), "normal", seed=3, layer=1, shared=False)
    assert torch.equal(noise[0], noise[2])
    assert not torch.equal(noise[0], noise[1])


def test_the_global_random_state_is_neither_used_nor_moved():
    model, ids = zoo.build("gpt2"), zoo.tokens()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = logits(model, ids, perturb(model, "angular", 0.3))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(logits(model, ids, perturb(model, "angular", 0.3)), one)


def directions(model, ids, kind, how, layers=(1, 2), **more):
    """Unit vectors of what was added, by layer; for magnitude the sign of the change."""
    before, after = streams(model, ids, perturb(model, kind, 0.05, how, layers=layers, **more), layers)
    if kind == "magnitude":
        return {i: (after[i].norm(dim=-1) - before[i].norm(dim=-1)).sign()[:, 1:] for i in layers}
    return {i: torch.nn.functional.normalize(after[i] - before[i], dim=-1)[:, 1:] for i in layers}


def test_shared_noise_is_the_same_in_layers_and_sequences_and_fresh_noise_is_not():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(3, 12)
    fresh = directions(model, ids, "angular", FRESH)
    shared = directions(model, ids, "angular", replace(FRESH, noise="shared"))
    for found, alike in ((fresh, False), (shared, True)):
        across_layers = torch.cosine_similarity(found[1], found[2], dim=-1).mean()
        across_rows = torch.cosine_similarity(found[1][0], found[1][1], dim=-1).mean()
        assert (across_layers > 0.9) == alike
        assert (across_rows > 0.9) == alike
        positions = torch.cosine_similarity(found[1][:, 0], found[1][:, 1], dim=-1)
        assert positions.abs().mean() < 0.5  # positions always differ


def test_signs_are_redrawn_or_fixed_over_layers_or_all_alike():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(4, 40)
    redrawn, fixed, grow, shrink = (
        directions(model, ids, "magnitude", replace(FRESH, signs=signs))
        for signs in ("redrawn", "fixed", "grow", "shrink")
    )
    assert 0.3 < (redrawn[1] == redrawn[2]).double().mean() < 0.7
    assert torch.equal(fixed[1], fixed[2])
    assert 0.3 < (fixed[1] > 0).double().mean() < 0.7
    assert (grow[1] == 1).all()
    assert (shrink[2] == -1).all()


def test_the_published_run_pushes_as_published():
    """Eight layers of shared pushes add up, redrawn signs cancel like a random walk: a ratio of about sqrt(8)."""
    batch, d, layers = Batch(), 512, range(8)
    like = torch.zeros(64, 4, d)
    pushes = [token_noise(like, batch, "normal", seed=0, layer=None, shared=True) for _ in layers]
    signs = [token_noise(like[..., 0], batch, "sign", seed=0, layer=i, shared=False) for i in layers]
    angular = sum(push / push.norm(dim=-1, keepdim=True) for push in pushes).norm(dim=-1).mean()
    magnitude = sum(signs).abs().square().mean().sqrt()
    assert angular == pytest.approx(8.0, rel=1e-5)
    assert magnitude == pytest.approx(math.sqrt(8), rel=0.15)


def test_mean_matching_has_one_scale_for_a_sequence_and_the_displacement_on_average():
    model, ids = zoo.build("gpt2", dtype=torch.float64), zoo.tokens(2, 30)
    for kind in KINDS:
        how = replace(FRESH, matching="mean")
        before, after = streams(model, ids, perturb(model, kind, 0.7, how, layers=1, unit="absolute"), (1,))
        h, moved = before[1][:, 1:], after[1][:, 1:]
        distance = (moved - h).norm(dim=-1)
        assert torch.allclose(distance.mean(1), torch.full((2,), 0.7, dtype=torch.float64), rtol=0.05)
        share = distance / h.norm(dim=-1)
        assert (share.std(1) / share.mean(1)).max() < 0.02  # the same share of every norm, so not the same distance
        assert (distance.std(1) / distance.mean(1)).min() > 0.02


def test_padding_is_neither_moved_nor_counted():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 10)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, 6:] = False
    for how in (FRESH, replace(FRESH, matching="mean")):
        seen = Displacements()
        hooks = perturb(model, "magnitude", 0.4, how, layers=1, batch=Batch(real=real), record=seen)
        before, after = streams(model, ids, hooks, (1,))
        assert torch.equal((before[1] != after[1]).any(-1)[:, 1:], real[:, 1:])
        assert seen.summary()["n_places"] == 9 + 5
        alone = perturb(model, "magnitude", 0.4, how, layers=1, batch=Batch(ids=[1]))
        short = streams(model, ids[1:, :6], alone, (1,))[1]
        assert torch.allclose(after[1][1, :6], short[1][0], atol=1e-5)


@pytest.mark.parametrize("k", [2, 5])
def test_principal_tangents_stay_in_the_directions_and_semantic_ones_point_to_an_earlier_token(k):
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(2, 12)
    basis = torch.linalg.qr(torch.randn(4, 48, k, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[
        0
    ].mT
    hooks = perturb(model, "angular", 0.2, Perturbation(tangent="principal"), layers=1, directions=basis)
    before, after = streams(model, ids, hooks, (1,))
    h, change = before[1][:, 1:], (after[1] - before[1])[:, 1:]
    span = torch.cat([basis[1].expand(*h.shape[:2], k, 48), h.unsqueeze(2)], 2)
    inside = torch.linalg.lstsq(span.mT, change.unsqueeze(-1)).solution
    assert torch.allclose(span.mT @ inside, change.unsqueeze(-1), atol=1e-9)

    before, after = streams(
        model, ids, perturb(model, "angular", 0.2, Perturbation(tangent="semantic"), layers=1), (1,)
    )
    for row in range(2):
        for t in range(1, 12):
            change = after[1][row, t] - before[1][row, t]
            residues = []
            for other in range(t):
                span = torch.stack([before[1][row, t], before[1][row, other]])
                found = torch.linalg.lstsq(span.T, change.unsqueeze(-1)).solution
                residues.append(float((span.T @ found - change.unsqueeze(-1)).norm()))
            assert min(residues) < 1e-9  # in the plane of the token and one that came before


def test_impossible_displacements_are_refused_with_layer_share_and_limit_or_clipped_or_flipped_and_counted():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens()
    norms = streams(model, ids)[0][1][:, 1:].norm(dim=-1)
    with pytest.raises(
        DisplacementError, match=r"22 of 22 tokens \(100.0%\) cannot be turned.*blocks.1.hook_resid_pre"
    ):
        logits(model, ids, perturb(model, "angular", 2.5, layers=1))
    middle, shrink = float(norms.median()), Perturbation(signs="shrink")
    with pytest.raises(DisplacementError, match=f"{norms.min():.4g} \\(absolute"):
        logits(model, ids, perturb(model, "magnitude", middle, shrink, layers=1, unit="absolute"))
    seen = Displacements()
    logits(model, ids, perturb(model, "angular", 2.5, Perturbation(clip=True), layers=1, record=seen))
    assert seen.summary()["n_clipped"] == 22
    assert seen.summary()["displacement_relative"] == pytest.approx(2.0)
    seen = Displacements()
    how = Perturbation(allow_flip=True)
    logits(model, ids, perturb(model, "magnitude", 1.5, how, layers=1, record=seen))
    found = seen.summary()
    assert 0 < found["n_flipped"] < 22
    assert found["displacement_max_error"] < 1e-9
    assert found["n_clipped"] == 0


def test_bfloat16_models_keep_their_dtype_and_show_what_rounding_did():
    model, ids = zoo.build("llama_gqa", dtype=torch.bfloat16), zoo.tokens()
    seen = Displacements()
    out = logits(model, ids, perturb(model, "angular", 0.5, layers=1, record=seen))
    assert out.dtype == torch.bfloat16
    assert 1e-5 < seen.summary()["displacement_max_error"] < 0.02


def test_what_is_recorded_is_what_the_model_got_at_indirect_sites_too():
    model, ids = zoo.build("llama_gqa", dtype=torch.bfloat16), zoo.tokens()
    seen, kept = Displacements(), {}
    first = [("blocks.1.hook_resid_post", lambda x, hook: kept.update(before=x.clone()))]
    last = [("blocks.1.hook_resid_post", lambda x, hook: kept.update(after=x.clone()))]
    enter = [("blocks.1.hook_resid_pre", lambda x, hook: kept.update(start=x.clone()))]
    hooks = perturb(model, "angular", 0.05, site="block", layers=1, record=seen)
    logits(model, ids, [*enter, *first, *hooks, *last])
    block = (kept["before"].float() - kept["start"].float())[:, 1:]
    error = (
        (kept["after"].double() - kept["before"].double())[:, 1:].norm(dim=-1) / (0.05 * block.norm(dim=-1)) - 1
    ).abs()
    assert seen.summary()["displacement_max_error"] == pytest.approx(float(error.max()), rel=0.05)
    assert float(error.max()) > 1e-3


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (dict(kind="sideways"), GeometryError, "angular"),
        (dict(displacement=-0.1), GeometryError, "0 or more"),
        (dict(displacement=float("nan")), GeometryError, "0 or more"),
        (dict(displacement=torch.ones(3)), GeometryError, "4 of them"),
        (dict(displacement="much"), GeometryError, "no number"),
        (dict(how="published"), GeometryError, "as_run"),
        (dict(how=None), GeometryError, "as_run"),
        (dict(seed=-1), GeometryError, "seed"),
        (dict(how=Perturbation(tangent="principal"), directions=[1]), GeometryError, "principal_directions"),
        (dict(unit="percent"), GeometryError, "absolute"),
        (dict(layers=9), SiteError, "layer 9"),
        (dict(site="nowhere"), SiteError, "nowhere"),
        (dict(heads=1), SiteError, "heads"),
        (dict(site="mlp_carrier", grouping="merged"), SiteError, "slices, which cannot be grouped"),
        (dict(how=Perturbation(tangent="principal")), GeometryError, "principal_directions"),
        (dict(directions=torch.zeros(4, 2, 48)), GeometryError, "leave them out"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(call, error, words):
    model = zoo.build("llama_gqa")
    given = {"kind": "angular", "displacement": 0.1, **call}
    with pytest.raises(error, match=words):
        perturb(model, given.pop("kind"), given.pop("displacement"), **given)


@pytest.mark.parametrize(
    "switches", [dict(noise="loud"), dict(signs="both"), dict(tangent="semantic", noise="shared"), dict(matching="all")]
)
def test_switches_that_do_not_exist_or_do_not_go_together_are_refused(switches):
    with pytest.raises(GeometryError):
        Perturbation(**switches)


def test_one_token_passes_and_foreign_batches_are_refused():
    model, ids = zoo.build("gpt2"), zoo.tokens(2, 8)
    hooks = perturb(model, "angular", 0.1, layers=1)
    with pytest.raises(HookError, match="one token long"):
        logits(model, ids[:, :1], hooks)
    with pytest.raises(HookError, match="ids for 2 sequences"):
        logits(model, ids, perturb(model, "angular", 0.1, layers=1, batch=Batch(ids=[0])))
    with pytest.raises(HookError, match=r"Batch\.real"):
        logits(model, ids, perturb(model, "angular", 0.1, layers=1, batch=Batch(real=torch.ones(2, 5).bool())))


def test_layers_before_the_first_perturbed_one_are_bit_equal_and_gradients_flow():
    model, ids = zoo.build("llama_gqa", fresh=True), zoo.tokens()
    clean = streams(model, ids, (), (0, 1, 2))[0]
    moved = streams(model, ids, perturb(model, "angular", 0.2, layers=2), (0, 1, 2))[0]
    assert all(torch.equal(clean[i], moved[i]) for i in (0, 1, 2))
    with model.hooks(fwd_hooks=perturb(model, "magnitude", 0.2, layers=(1, 2))):
        model(ids, return_type="loss").backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
    assert sum(p.grad is not None for p in model.parameters()) > 10
