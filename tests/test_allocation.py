"""Allocations under a budget: the solver against every allocation there is, the even one, the shuffled ones."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lens_geometry.allocation import allocate, check_budget, even, shuffled, total
from lens_geometry.errors import DataError


def by_trying_all(costs, sizes, budget):
    """The least cost within the budget, by trying every allocation."""
    layers, choices = costs.shape
    found = [
        sum(costs[layer, c] for layer, c in enumerate(one))
        for one in itertools.product(range(choices), repeat=layers)
        if sum(sizes[layer, c] for layer, c in enumerate(one)) <= budget
    ]
    return min(found) if found else None


@given(data=st.data(), layers=st.integers(1, 5), choices=st.integers(1, 4))
@settings(deadline=None, max_examples=80)
def test_no_allocation_within_the_budget_costs_less(data, layers, choices):
    numbers = st.floats(-1, 1, allow_nan=False) | st.floats(1e-9, 1e-6) | st.just(0.0)
    costs = np.array([[data.draw(numbers) for _ in range(choices)] for _ in range(layers)])
    sizes = np.array([[data.draw(st.integers(1, 10**6)) for _ in range(choices)] for _ in range(layers)])
    budget = data.draw(st.integers(int(sizes.min(1).sum()), int(sizes.max(1).sum())))
    chosen = allocate(costs, sizes, budget)
    assert total(sizes, chosen) <= budget
    found = sum(costs[layer, c] for layer, c in enumerate(chosen))
    assert found == pytest.approx(by_trying_all(costs, sizes, budget), rel=1e-9, abs=1e-11)


def test_layers_that_are_alike_get_the_same_where_the_budget_allows_it():
    costs = np.tile([1.0, 0.25, 0.06, 0.01], (12, 1))  # each step helps less than the one before
    sizes = np.tile([2, 3, 4, 8], (12, 1)) * 331776
    assert allocate(costs, sizes, int(sizes[:, 2].sum())) == (2,) * 12
    assert even(sizes, int(sizes[:, 2].sum())) == (2,) * 12


def test_the_layers_that_gain_most_get_the_room():
    costs = np.array([[1.0, 0.0], [5.0, 0.0], [3.0, 0.0]])
    sizes = np.array([[1, 2]] * 3)
    assert allocate(costs, sizes, 5) == (0, 1, 1)
    assert allocate(costs, sizes, 4) == (0, 1, 0)


def test_a_cost_that_is_not_finite_is_never_chosen():
    costs = np.array([[np.nan, 1.0], [2.0, np.inf]])
    sizes = np.array([[1, 5], [1, 2]])
    assert allocate(costs, sizes, 6) == (1, 0)
    with pytest.raises(DataError, match="cannot be met"):
        allocate(costs, sizes, 5)  # only the choice that is not finite would fit
    with pytest.raises(DataError, match="layer 1 has no choice"):
        allocate([[1.0], [np.nan]], [[1], [1]], 5)


def test_a_budget_that_cannot_be_met_is_an_error_and_one_with_room_for_everything_is_said():
    sizes = np.array([[2, 4], [2, 4]])
    with pytest.raises(DataError, match="the budget of 3 cannot be met: .* takes 4"):
        allocate(np.zeros((2, 2)), sizes, 3)
    assert not check_budget(sizes, 8)
    assert check_budget(sizes, 7)
    assert allocate(np.array([[1.0, 0.0]] * 2), sizes, 100) == (1, 1)


def test_an_even_allocation_between_two_choices_spreads_the_larger_one_over_depth():
    sizes = np.tile([3, 4], (10, 1))
    for budget in range(30, 41):
        chosen = even(sizes, budget)
        assert total(sizes, chosen) == budget
        places = [layer for layer, c in enumerate(chosen) if c]
        gaps = np.diff(places)
        assert not len(gaps) or gaps.max() - gaps.min() <= 1
    with pytest.raises(DataError, match="cannot be met"):
        even(sizes, 29)


def test_a_shuffle_keeps_the_mix_and_the_budget():
    sizes = np.array([[1, 2], [1, 2], [1, 2], [1, 9]])
    found = {shuffled((1, 1, 0, 0), sizes, 6, np.random.default_rng(seed)) for seed in range(20)}
    assert found == {(1, 0, 1, 0), (0, 1, 1, 0)}  # the last layer's larger choice does not fit
    assert shuffled((1, 1), np.ones((2, 2)), 5, np.random.default_rng(0)) is None


def test_thirty_layers_are_allocated_as_by_dynamic_programming():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        costs, sizes = rng.exponential(size=(30, 5)), rng.integers(1, 40, size=(30, 5))
        budget = int(0.4 * sizes.sum(1).mean() * 30 / 2.5)
        least = np.zeros(budget + 1)  # by room, for no layer yet
        for cost, size in zip(costs, sizes, strict=True):
            options = np.full((5, budget + 1), np.inf)
            for choice in range(5):
                options[choice, size[choice] :] = cost[choice] + least[: budget + 1 - size[choice]]
            least = options.min(0)
        chosen = allocate(costs, sizes, budget)
        assert total(sizes, chosen) <= budget
        assert sum(costs[layer, c] for layer, c in enumerate(chosen)) == pytest.approx(least[budget], rel=1e-9)
