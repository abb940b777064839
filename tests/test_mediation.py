"""Attention entropy, query-key alignment, growth and explained shares: against plain loops and known answers."""

import math

import numpy as np
import pytest
import torch
import zoo
from scipy import stats

from lens_geometry.attention_anatomy import found_in, query_keys
from lens_geometry.errors import GeometryError
from lens_geometry.mediation import explained, explained_beyond, explained_in_rank, growth_exponent
from lens_geometry.metrics import attention_entropy, query_key_alignment


def random_attention(seed=0, heads=6, kv=2, length=5, d=4):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, length, heads, d, generator=generator, dtype=torch.float64)
    k = torch.randn(2, length, kv, d, generator=generator, dtype=torch.float64)
    keys = k.repeat_interleave(heads // kv, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys).masked_fill(~torch.ones(length, length).tril().bool(), -math.inf)
    return q, k, scores, scores.softmax(-1)


def test_entropy_is_that_of_plain_loops_and_counts_no_zero():
    *_, pattern = random_attention()
    found = attention_entropy(pattern)
    for b in range(2):
        for h in range(6):
            for i in range(5):
                plain = -math.fsum(a * math.log(a) for a in pattern[b, h, i].tolist() if a > 0)
                assert found[b, h, i].item() == pytest.approx(plain, abs=1e-14)
    assert not found[:, :, 0].any()  # the first token has one key
    even = torch.full((1, 1, 1, 8), 1 / 8, dtype=torch.bfloat16)
    assert attention_entropy(even).dtype == torch.float32
    assert attention_entropy(even).item() == pytest.approx(math.log(8))


@pytest.mark.parametrize("by_products", [False, True])
def test_alignment_is_the_weighted_cosine_with_the_keys_of_the_heads_own_group(by_products):
    q, k, scores, pattern = random_attention()
    found = query_key_alignment(q, k, pattern, scores if by_products else None)
    for b in range(2):
        for h in range(6):
            for i in range(5):
                plain = 0.0
                for j in range(i + 1):
                    one, other = q[b, i, h].tolist(), k[b, j, h // 3].tolist()
                    sizes = math.hypot(*one) * math.hypot(*other)
                    dot = math.fsum(x * y for x, y in zip(one, other, strict=True))
                    plain += pattern[b, h, i, j].item() * dot / sizes
                assert found[b, h, i].item() == pytest.approx(plain, abs=1e-14)


def test_a_zero_query_or_key_counts_as_no_alignment_and_wrong_shapes_are_refused():
    q, k, scores, pattern = random_attention()
    q[:, 2], k[:, 0] = 0.0, 0.0
    for products in (None, scores):
        found = query_key_alignment(q, k, pattern, products)
        assert found.isfinite().all()
        assert not found[:, :, 2].any()
    for wrong in ((q, k[:, :, :1].repeat(1, 1, 4, 1), pattern, None), (q, k, pattern[:, :3], None), (q, k, pattern, k)):
        with pytest.raises(GeometryError, match="do not fit each other"):
            query_key_alignment(*wrong)


def rotated(x, turned, theta=10_000.0):
    """Rotary positions in plain loops: place i of the first half turns with place i of the second."""
    out, half = x.clone(), turned // 2
    for position in range(x.shape[1]):
        for i in range(half):
            cos, sin = (f(position * theta ** (-2 * i / turned)) for f in (math.cos, math.sin))
            a, b = x[:, position, :, i], x[:, position, :, i + half]
            out[:, position, :, i], out[:, position, :, i + half] = a * cos - b * sin, b * cos + a * sin
    return out


FAST = [("gpt2", "bridge"), ("llama_gqa", "bridge"), ("neox", "bridge"), ("opt", "bridge"), ("llama_gqa", "native")]


@pytest.mark.parametrize(
    ("name", "backend"), [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in zoo.cases()]
)
def test_queries_and_keys_are_found_where_the_scores_are_made_of_them(name, backend):
    model = zoo.build(name, backend)
    found = query_keys(model)
    rotary = name not in ("gpt2", "opt", "opt_post_norm")
    if backend == "native" and rotary:  # shows neither the rotated ones nor the scores
        assert found == (None,) * 4
        return
    shown_before_only = rotary and name.startswith("neox") and backend == "bridge"
    for layer, source in enumerate(found):
        kind = "rot_q" if rotary and not shown_before_only else "q"
        assert source.q == f"blocks.{layer}.attn.hook_{kind}"
        assert bool(source.scores) == shown_before_only
    if shown_before_only:
        assert source.scale == pytest.approx(12**-0.5, rel=1e-4)


def test_where_only_unrotated_queries_are_shown_the_scores_give_the_same_alignment():
    model = zoo.build("neox", dtype=torch.float64)
    source, acts = query_keys(model)[1], {}
    names = [*source.names, "blocks.1.attn.hook_pattern"]
    with torch.no_grad(), model.hooks(fwd_hooks=[(n, lambda t, hook, n=n: acts.update({n: t.clone()})) for n in names]):
        model(zoo.tokens(2, 9), return_type="logits")
    q, k, pattern = acts[source.q], acts[source.k], acts[names[-1]]
    found = query_key_alignment(q, k, pattern, acts[source.scores] / source.scale)
    expected = query_key_alignment(rotated(q, 6), rotated(k, 6), pattern)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)  # the model turns in float32
    assert (query_key_alignment(q, k, pattern) - expected).abs().max() > 0.1


def test_a_bias_for_distance_is_no_rotation_and_queries_of_something_else_are_not_trusted():
    q, k, scores, _ = random_attention()
    distance = torch.arange(5.0, dtype=torch.float64)
    biased = scores - 2 * (distance[:, None] - distance)
    acts = {"q": q, "k": k, "attn_scores": biased, "pattern": biased.softmax(-1)}
    assert found_in(acts, 3, 1e-6).names == ("blocks.3.attn.hook_q", "blocks.3.attn.hook_k")
    other = random_attention(1)
    assert found_in({"q": q, "k": k, "attn_scores": other[2], "pattern": other[3]}, 0, 1e-6) is None
    cap = torch.where(scores.isfinite(), 3 * torch.tanh(scores / 3), scores)
    capped = {"q": q, "k": k, "attn_scores": cap, "pattern": cap.softmax(-1)}
    assert found_in(capped, 0, 1e-6) is not None
    assert found_in({"q": q, "k": k}, 0, 1e-6) is None


def test_the_exponent_is_one_for_one_push_repeated_and_one_half_for_independent_ones():
    noise = np.random.default_rng(0)
    push = noise.normal(size=(400, 64))
    same = np.cumsum(np.repeat(push[:, None], 8, 1), 1)
    independent = np.cumsum(noise.normal(size=(400, 8, 64)), 1)
    sizes = [np.sqrt((x**2).sum(-1).mean(0)) for x in (same, independent)]
    assert growth_exponent(sizes[0]) == pytest.approx(1.0, abs=1e-12)
    assert growth_exponent(sizes[1]) == pytest.approx(0.5, abs=0.02)
    np.testing.assert_allclose(growth_exponent(np.stack(sizes)), [growth_exponent(x) for x in sizes])
    slope = stats.linregress(np.log(np.arange(1, 9)), np.log(sizes[1])).slope
    assert growth_exponent(sizes[1]) == pytest.approx(slope)
    assert math.isnan(growth_exponent([1.0]))
    assert math.isnan(growth_exponent([1.0, 0.0, 2.0]))


def test_shares_are_those_of_least_squares_and_of_spearman():
    noise = np.random.default_rng(1)
    known, other = noise.normal(size=(2, 40))
    mediator = known + 0.5 * other
    damage = 2 * known - other + noise.normal(size=40)
    residual = lambda *columns: np.linalg.lstsq(np.stack([np.ones(40), *columns], 1), damage, rcond=None)[1][0]  # noqa: E731
    total = ((damage - damage.mean()) ** 2).sum()
    assert explained(mediator, damage) == pytest.approx(1 - residual(mediator) / total)
    gain = (residual(known) - residual(known, mediator)) / total
    assert explained_beyond(mediator, damage, known) == pytest.approx(gain)
    assert gain > 0.02
    coarse = mediator.round()  # ties
    assert explained_in_rank(coarse, damage) == pytest.approx(stats.spearmanr(coarse, damage).statistic ** 2)
    assert explained_in_rank(mediator, np.exp(3 * mediator)) == pytest.approx(1.0)
    assert explained(mediator, np.exp(3 * mediator)) < 0.9


def test_weights_count_points_as_often_as_a_resample_holds_them():
    noise = np.random.default_rng(2)
    m, y, k = noise.normal(size=(3, 12)).round(1)
    drawn = noise.integers(0, 12, (5, 12))
    weights = np.stack([np.bincount(row, minlength=12) for row in drawn])
    for share, arrays in ((explained, (m, y)), (explained_in_rank, (m, y)), (explained_beyond, (m, y, k))):
        expected = [share(*(x[row] for x in arrays)) for row in drawn]
        np.testing.assert_allclose(share(*arrays, weights), expected)


def test_what_does_not_vary_explains_nothing_that_has_a_number():
    y = np.arange(6.0)
    assert math.isnan(explained(np.full(6, 0.1), y))
    assert math.isnan(explained_in_rank(np.full(6, 0.1), y))
    assert math.isnan(explained_beyond(2 * y + 1, y**2, y))
