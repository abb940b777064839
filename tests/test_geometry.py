"""The algebra: identities in float64, honest zeros, and one rounding in low precision."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lens_geometry.errors import GeometryError
from lens_geometry.geometry import (
    METRICS,
    component_change,
    decompose,
    diagonal_change,
    lengths,
    matched_direction,
    measure,
    message_change,
    scale_components,
    smallest_operator,
)


def vectors():
    """Pairs (update, reference) of float64 tensors [3, d], zeros and very different sizes among them."""
    size = st.one_of(st.just(0.0), st.floats(1e-3, 1e3), st.floats(1e-60, 1e-3))
    element = st.builds(lambda sign, x: sign * x, st.sampled_from([-1.0, 1.0]), size)
    return st.integers(1, 9).flatmap(
        lambda d: st.tuples(*(hnp.arrays("float64", (3, d), elements=element).map(torch.from_numpy),) * 2)
    )


@given(vectors())
@settings(max_examples=200, deadline=None)
def test_the_parts_add_up_and_the_perpendicular_part_is_orthogonal(pair):
    update, reference = pair
    alpha, parallel, perpendicular = decompose(update, reference)
    size = update.norm(dim=-1)
    assert ((parallel + perpendicular - update).norm(dim=-1) <= 1e-15 * size).all()
    unit = reference / reference.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    assert ((perpendicular * unit).sum(-1).abs() <= 1e-13 * size).all()
    gap = (alpha.unsqueeze(-1) * reference - parallel).norm(dim=-1)
    assert (gap <= 1e-14 * parallel.norm(dim=-1)).all()


@given(vectors())
@settings(max_examples=100, deadline=None)
def test_a_zero_reference_leaves_everything_perpendicular(pair):
    update, _ = pair
    alpha, parallel, perpendicular = decompose(update, torch.zeros_like(update))
    assert torch.equal(perpendicular, update)
    assert not parallel.any()
    assert not alpha.any()


@given(vectors(), st.floats(-3, 3), st.floats(-3, 3))
@settings(max_examples=200, deadline=None)
def test_scaling_is_the_weighted_sum_of_the_parts(pair, s_par, s_perp):
    update, reference = pair
    _, parallel, perpendicular = decompose(update, reference)
    expected = s_par * parallel + s_perp * perpendicular
    size = update.norm(dim=-1) * (1 + abs(s_par) + abs(s_perp))
    assert ((scale_components(update, reference, s_par, s_perp) - expected).norm(dim=-1) <= 1e-14 * size).all()


@given(vectors(), st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2))
@settings(max_examples=100, deadline=None)
def test_two_scalings_compose_to_the_product_of_their_scales(pair, a, b, c, d):
    update, reference = pair
    twice = scale_components(scale_components(update, reference, a, b), reference, c, d)
    once = scale_components(update, reference, a * c, b * d)
    assert ((twice - once).norm(dim=-1) <= 1e-13 * (update.norm(dim=-1) + 1e-300)).all()


@given(vectors())
@settings(max_examples=100, deadline=None)
def test_the_no_op_returns_every_bit_for_numbers_and_for_tensors(pair):
    update, reference = pair
    assert torch.equal(scale_components(update, reference), update)
    ones = torch.ones(3, dtype=torch.float64)
    assert torch.equal(scale_components(update, reference, ones, ones), update)
    assert not component_change(update, reference, ones, ones).any()


@given(vectors())
@settings(max_examples=200, deadline=None)
def test_the_named_numbers_follow_their_definitions(pair):
    update, reference = pair
    found = measure(update, reference)
    assert tuple(found) == METRICS
    for row in range(len(update)):
        u, r = update[row].tolist(), reference[row].tolist()
        uu, rr = (math.sqrt(math.fsum(x * x for x in v)) for v in (u, r))
        if min(uu, rr) < 1e-100:
            continue
        dot = math.fsum(x * y for x, y in zip(u, r, strict=True))
        alpha = dot / rr**2
        perpendicular = math.sqrt(math.fsum((x - alpha * y) ** 2 for x, y in zip(u, r, strict=True)))
        parallel = abs(alpha) * rr
        expected = {
            "alpha": alpha,
            "cosine": dot / (uu * rr),
            "parallel_fraction": parallel / uu,
            "perpendicular_fraction": perpendicular / uu,
            "update_over_reference": uu / rr,
        }
        for name, value in expected.items():
            assert found[name][row].item() == pytest.approx(value, rel=1e-9, abs=1e-12), name
        if perpendicular > 1e-9 * uu:
            assert found["parallel_ratio"][row].item() == pytest.approx(parallel / perpendicular, rel=1e-5)
        energies = found["parallel_energy"][row] + found["perpendicular_energy"][row]
        assert energies.item() == pytest.approx(1.0, abs=1e-12)


def test_infinite_and_undefined_numbers_are_what_they_are():
    update = torch.tensor([[2.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    reference = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    found = measure(update, reference)
    assert found["parallel_ratio"][0] == math.inf
    assert [bool(found[name][1].isnan()) for name in METRICS] == [
        False,
        True,
        True,
        True,
        True,
        True,
        True,
        False,
    ]
    assert found["alpha"][1] == 0
    assert found["update_over_reference"][1] == 0
    assert found["cosine"][2] == 0
    assert found["perpendicular_fraction"][2] == 1
    assert found["update_over_reference"][2] == math.inf


@pytest.mark.parametrize("size", [1e-8, 1e-15, 1e-19, 1e-25, 1e-37, 1e15, 1e30])
def test_no_epsilon_biases_a_reference_of_any_size(size):
    generator = torch.Generator().manual_seed(0)
    update, direction = torch.randn(2, 5, 64, generator=generator)
    reference = direction / direction.norm(dim=-1, keepdim=True) * size
    alpha, parallel, _ = decompose(update, reference)
    exact_alpha, exact, _ = decompose(update.double(), reference.double())
    assert torch.allclose(parallel.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.allclose(alpha.double() * size, exact_alpha * size, rtol=1e-5, atol=1e-6)
    assert torch.allclose(lengths(update, reference).reference, torch.full((5,), size), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_comes_back_in_its_own_dtype_with_one_rounding_of_residue(dtype):
    generator = torch.Generator().manual_seed(0)
    update, reference = torch.randn(2, 512, 1024, generator=generator)
    update = (update + 2 * reference).to(dtype)  # a large parallel part, as removal meets it
    reference = reference.to(dtype)
    removed = scale_components(update, reference, parallel=0.0)
    assert removed.dtype == dtype
    residue = measure(removed, reference)["cosine"].abs()
    assert residue.mean() < 2e-4
    too_early = update - decompose(update, reference).parallel  # the projection rounded before it is subtracted
    assert measure(too_early, reference)["cosine"].abs().mean() > 1.5 * residue.mean()


def test_the_perpendicular_norm_keeps_its_digits_when_the_update_is_nearly_parallel():
    reference = torch.tensor([1000.0, 0.0, 0.0])
    update = torch.tensor([1000.0, 1e-3, 0.0])
    assert lengths(update, reference).perpendicular.item() == pytest.approx(1e-3, rel=1e-6)


def test_gradients_match_finite_differences():
    generator = torch.Generator().manual_seed(0)
    update, reference = torch.randn(2, 3, 5, dtype=torch.float64, generator=generator)
    update.requires_grad_(), reference.requires_grad_()
    assert torch.autograd.gradcheck(lambda u, r: scale_components(u, r, 0.3, 0.9), (update, reference))


def test_tensor_scales_apply_to_their_own_tokens():
    generator = torch.Generator().manual_seed(0)
    update, reference = torch.randn(2, 4, 3, 8, generator=generator)
    scales = torch.rand(4, 3, generator=generator)
    whole = scale_components(update, reference, scales)
    for i in range(4):
        for j in range(3):
            alone = scale_components(update[i, j], reference[i, j], float(scales[i, j]))
            assert torch.allclose(whole[i, j], alone, atol=1e-6)


@pytest.mark.parametrize(
    ("update", "reference", "words"),
    [
        (torch.ones(2, 3), torch.ones(3), "differ in shape"),
        (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3), "floating point"),
        (torch.ones(2, 0), torch.ones(2, 0), "at least one component"),
    ],
)
def test_tensors_that_cannot_be_decomposed_are_refused(update, reference, words):
    with pytest.raises(GeometryError, match=words):
        decompose(update, reference)


@given(vectors(), st.floats(-3, 3))
@settings(max_examples=100, deadline=None)
def test_the_diagonal_change_is_how_much_of_the_reference_scaling_adds(pair, s_par):
    update, reference = pair
    added = diagonal_change(update, reference, s_par).unsqueeze(-1) * reference
    expected = component_change(update, reference, s_par)
    assert ((added - expected).norm(dim=-1) <= 1e-13 * update.norm(dim=-1)).all()
    scales = torch.full((3,), s_par, dtype=torch.float64)
    assert torch.equal(diagonal_change(update, reference, scales), diagonal_change(update, reference, s_par))
    assert not diagonal_change(update, torch.zeros_like(update), s_par).any()


@given(vectors(), st.floats(-3, 3), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_a_change_of_the_message_meets_the_scalar_constraint(pair, s_par, seed):
    update, reference = pair
    message = torch.randn(update.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    change = message_change(update, reference, message, s_par)
    edited = update + change.unsqueeze(-1) * message
    unit = reference / reference.abs().amax(-1, keepdim=True).clamp_min(1e-300)
    size = (update.norm(dim=-1) + (change.unsqueeze(-1) * message).norm(dim=-1)) * unit.norm(dim=-1)
    gap = (edited * unit).sum(-1) - s_par * (update * unit).sum(-1)
    assert (gap.abs() <= 1e-12 * size)[change.isfinite()].all()
    same = message_change(update, reference, reference, s_par)
    assert torch.allclose(same, diagonal_change(update, reference, s_par), rtol=1e-12, atol=0)


def test_a_message_without_a_part_along_the_reference_needs_an_infinite_weight_or_none():
    update, reference = torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    message = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    assert message_change(update, reference, message, 0.5).tolist() == [-math.inf, 0.0]
    assert message_change(update, reference, message, 1.0).tolist() == [0.0, 0.0]


@given(vectors(), st.floats(-3, 3), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_no_operator_of_the_same_action_is_smaller_than_the_smallest_one(pair, s_par, seed):
    update, reference = pair
    generator = torch.Generator().manual_seed(seed)
    message, other = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 5), (3, 4, 5)))
    operator = smallest_operator(update, reference, message, s_par)
    change = component_change(update, reference, s_par)
    d = update.shape[-1]
    assert operator.shape == (3, d, 5)
    act = lambda b: torch.einsum("bij,bj->bi", b, message)  # noqa: E731
    assert ((act(operator) - change).norm(dim=-1) <= 1e-13 * change.norm(dim=-1) + 1e-300).all()
    size = torch.linalg.matrix_norm(operator)
    assert torch.allclose(size, change.norm(dim=-1) / message.norm(dim=-1), rtol=1e-12, atol=1e-300)
    beside = torch.zeros(3, d, 5, dtype=torch.float64)  # anything that does nothing to the message
    beside[:, : min(d, 4)] = other[:, : min(d, 4)]
    unit = message / message.norm(dim=-1, keepdim=True)
    beside -= torch.einsum("bij,bj,bk->bik", beside, unit, unit)
    assert (act(beside).abs() <= 1e-13).all()
    assert (torch.linalg.matrix_norm(operator + beside) > size).all()


def test_no_operator_makes_a_change_of_a_message_that_is_zero():
    update, reference, nothing = torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0, 0.0]]), torch.zeros(1, 5)
    with pytest.raises(GeometryError, match="message is zero"):
        smallest_operator(update, reference, nothing, 0.0)
    assert not smallest_operator(update, reference, nothing, 1.0).any()
    assert smallest_operator(update, reference, torch.full((1, 5), 1e-25), 0.0).isfinite().all()
    with pytest.raises(GeometryError, match="batch axes"):
        smallest_operator(update, reference, torch.ones(2, 5), 0.0)


@given(vectors(), st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_against_a_matched_direction_the_parts_are_as_long_as_against_the_reference(pair, seed):
    update, reference = pair
    noise = torch.randn(update.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    direction = matched_direction(update, reference, noise)
    if update.shape[-1] == 1:
        return  # no direction is left to turn to
    expected, found = lengths(update, reference), lengths(update, direction)
    for name in ("parallel", "perpendicular"):
        assert ((getattr(found, name) - getattr(expected, name)).abs() <= 1e-12 * expected.update).all()
    moving = expected.update > 0
    assert torch.allclose(direction.norm(dim=-1), moving.double(), atol=1e-12)


def test_a_matched_direction_goes_round_the_update_with_the_noise():
    generator = torch.Generator().manual_seed(0)
    update, reference, noise = (torch.randn(1000, 48, generator=generator, dtype=torch.float64) for _ in range(3))
    direction = matched_direction(update, reference, noise)
    aside = decompose(direction, update).perpendicular
    expected = decompose(noise, update).perpendicular
    assert torch.cosine_similarity(aside, expected, dim=-1).min() > 1 - 1e-12


def written_out(u, r, s_par, s_perp):
    """The change by the definition, for autograd."""
    column = lambda s: s.unsqueeze(-1) if isinstance(s, torch.Tensor) else s  # noqa: E731
    parallel = (u * r).sum(-1, keepdim=True) / (r * r).sum(-1, keepdim=True) * r
    return (column(s_perp) - 1) * (u - parallel) + (column(s_par) - 1) * parallel


@pytest.mark.parametrize("learned", ["", "parallel", "perpendicular", "both"])
@pytest.mark.parametrize("s_perp", [1.0, 0.6])
def test_gradients_of_a_change_are_those_of_its_definition(learned, s_perp):
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    u, r, g = make(2, 5, 3, 7), 1e3 * make(2, 5, 3, 7), make(2, 5, 3, 7)
    s_par = make(5, 3) if learned in ("parallel", "both") else 0.3
    s_perp = make(2, 5, 1) if learned in ("perpendicular", "both") else s_perp
    found = []
    for change in (component_change, written_out):
        inputs = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in (u, r, s_par, s_perp)]
        leaves = [x for x in inputs if isinstance(x, torch.Tensor)]
        first = torch.autograd.grad(change(*inputs), leaves, g, create_graph=True)
        second = torch.autograd.grad(sum((x**2).sum() for x in first), leaves, allow_unused=True)
        plain = torch.autograd.grad(change(*inputs), leaves, g)
        found.append([*first, *plain, *second])
    for ours, by_autograd in zip(*found, strict=True):
        torch.testing.assert_close(ours, by_autograd, rtol=1e-10, atol=1e-12)
    assert found[0][0].norm() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_is_the_same_to_the_last_bit_with_gradients_and_without(dtype):
    generator = torch.Generator().manual_seed(0)
    u, r = (torch.randn(4, 9, generator=generator).to(dtype) for _ in range(2))
    r[0], u[1] = 0.0, 0.0
    for scales in ((0.0, 1.0), (0.5, 0.25), (torch.rand(4, generator=generator), 1.0)):
        plain = component_change(u, r, *scales)
        leaves = [x.clone().requires_grad_() for x in (u, r)]
        change = component_change(*leaves, *scales)
        assert torch.equal(change, plain)
        change.sum().backward()
        assert [leaf.grad.dtype for leaf in leaves] == [dtype, dtype]


Z, X = [0.0, 0.0, 0.0, 0.0], [1.0, -2.0, 0.5, 3.0]


@pytest.mark.parametrize("size", [1.0, 1e-15, 1e15])
@pytest.mark.parametrize(("u", "r"), [(Z, X), (X, Z), (Z, Z), (X, X), (X, [-x for x in X])])
def test_gradients_are_finite_where_something_is_zero_or_all_parallel(u, r, size):
    noise = torch.tensor([0.3, 1.0, -0.2, 0.7])
    for against in (lambda u, r: r, lambda u, r: matched_direction(u, r, noise)):
        leaves = [(size * torch.tensor(x)).requires_grad_() for x in (u, r)]
        scale = torch.tensor(0.3, requires_grad=True)
        scale_components(leaves[0], against(*leaves), scale).sum().backward()
        assert all(torch.isfinite(leaf.grad).all() for leaf in (*leaves, scale) if leaf.grad is not None)
        assert leaves[0].grad is not None


def test_autocast_changes_no_digit_of_the_float32_arithmetic():
    generator = torch.Generator().manual_seed(0)
    u, r = torch.randn(2, 5, 64, generator=generator)
    expected = scale_components(u, r, 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scale_components(u, r, 0.0), expected)
        assert torch.equal(scale_components(u.bfloat16(), r, 0.0), scale_components(u.bfloat16(), r, 0.0).bfloat16())


def turned_about(u, r, noise):
    """A matched direction by its definition, for autograd."""
    size = lambda x: x.norm(dim=-1, keepdim=True)  # noqa: E731
    cosine = (u * r).sum(-1, keepdim=True) / (size(u) * size(r))
    aside = noise - (noise * u).sum(-1, keepdim=True) / size(u) ** 2 * u
    return cosine * u / size(u) + (1 - cosine**2).sqrt() * aside / size(aside)


@pytest.mark.parametrize("learned", ["update", "reference", "both"])
def test_gradients_of_a_matched_direction_are_those_of_its_definition(learned):
    generator = torch.Generator().manual_seed(0)
    u, r, noise, g = (torch.randn(4, 3, 7, generator=generator, dtype=torch.float64) for _ in range(4))
    r = -30 * r
    found = []
    for direction in (matched_direction, turned_about):
        pair = [x.clone().requires_grad_(learned in (name, "both")) for x, name in ((u, "update"), (r, "reference"))]
        leaves = [x for x in pair if x.requires_grad]
        first = torch.autograd.grad(direction(*pair, noise), leaves, g, create_graph=True)
        second = torch.autograd.grad(sum((x**2).sum() for x in first), leaves)
        found.append([*first, *torch.autograd.grad(direction(*pair, noise), leaves, g), *second])
    for ours, by_autograd in zip(*found, strict=True):
        torch.testing.assert_close(ours, by_autograd, rtol=1e-9, atol=1e-11)
    assert found[0][0].norm() > 1e-3


def test_a_matched_direction_is_the_same_to_the_last_bit_with_gradients_and_without():
    generator = torch.Generator().manual_seed(0)
    u, r, noise = (torch.randn(6, 9, generator=generator) for _ in range(3))
    u[0], r[1], r[2], noise[3] = 0.0, 0.0, u[2], u[3]
    leaves = [x.clone().requires_grad_() for x in (u, r)]
    assert torch.equal(matched_direction(*leaves, noise), matched_direction(u, r, noise))
