"""A pass from a stored stream is the whole pass, to the last bit."""

import numpy as np
import pytest
import torch
import zoo

from lens_geometry.anatomy import attached
from lens_geometry.data import tokenize
from lens_geometry.edits import scale
from lens_geometry.prefix import Streams, can_start_inside, starting_at
from lens_geometry.runner import Condition, RunSettings, run_conditions
from lens_geometry.sites import HOOKS


@pytest.mark.parametrize(("name", "backend"), zoo.cases())
def test_every_layer_can_be_started_at_on_every_class(name, backend):
    model, ids, streams = zoo.build(name, backend), zoo.tokens(2, 9), []
    keep = [(HOOKS["resid_pre"].format(layer), lambda x, hook: streams.append(x.clone())) for layer in range(4)]
    with torch.no_grad(), attached(model, keep):
        base = model(ids, return_type="logits")
    for layer in range(4):
        fired = []
        seen = [(HOOKS["resid_pre"].format(i), lambda x, hook, i=i, fired=fired: fired.append(i)) for i in range(4)]
        with torch.no_grad(), attached(model, seen), starting_at(model, layer) as shortcut:
            shortcut.stream = streams[layer]
            assert torch.equal(model(ids, return_type="logits"), base)
        assert fired == [*range(layer, 4)]
    assert can_start_inside(model)
    with torch.no_grad():
        assert torch.equal(model(ids, return_type="logits"), base)  # and nothing of it stays


def test_another_stream_gives_other_logits_and_an_error_inside_restores_the_blocks():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 9)
    with torch.no_grad():
        base = model(ids, return_type="logits")
        with starting_at(model, 3) as shortcut:
            shortcut.stream = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(0))
            assert not torch.allclose(model(ids, return_type="logits"), base, atol=0.1)
        with pytest.raises(ZeroDivisionError), starting_at(model, 2):
            1 / 0  # noqa: B018
        assert torch.equal(model(ids, return_type="logits"), base)


def losses_of(conditions, **changes):
    model = zoo.build("llama_gqa")
    settings = RunSettings(**{"batch_size": 3, "progress": False, **changes})
    return run_conditions(model, tokenize(model, zoo.tokens(5, 11)), conditions, settings)


def edit(layer, heads=None):
    return lambda batch: scale(zoo.build("llama_gqa"), "value", parallel=0.0, layers=layer, heads=heads)


def test_conditions_that_reuse_the_prefix_have_the_same_losses_to_the_last_bit():
    plain = losses_of([Condition(f"layer {i}", edit(i)) for i in range(4)])
    reused = losses_of([Condition(f"layer {i}", edit(i), first_layer=i) for i in range(4)])
    assert plain.keys() == reused.keys()
    for key in plain:
        assert np.array_equal(plain[key].sums, reused[key].sums), key
    assert len({tuple(found.sums) for found in plain.values()}) == 5


def test_edits_run_side_by_side_have_the_losses_of_each_by_itself():
    def one_head_per_copy(batch):
        def keep(stream):
            scales = torch.ones(len(stream), stream.shape[1], 6)
            for copy, rows in enumerate(torch.arange(len(stream)).chunk(2)):
                scales[rows, :, (1, 4)[copy]] = 0.0
            return scales

        return scale(zoo.build("llama_gqa"), "value", parallel=keep, layers=2)

    alone = losses_of([Condition("head 1", edit(2, 1)), Condition("head 4", edit(2, 4))])
    together = losses_of([Condition(("head 1", "head 4"), one_head_per_copy, first_layer=2)], batch_size=4)
    for key in ("base", "head 1", "head 4"):
        np.testing.assert_allclose(together[key].sums, alone[key].sums, rtol=1e-5)
        assert np.array_equal(together[key].counts, alone[key].counts)
    assert abs(together["head 1"].sums - together["head 4"].sums).max() > 1e-2


def test_where_not_every_stream_can_be_kept_an_earlier_one_serves():
    model = zoo.build("llama_gqa")
    tokens = tokenize(model, zoo.tokens(5, 11))
    size = 5 * 11 * 48 * 4
    assert [*Streams(model, tokens, [0, 1, 2, 3]).kept] == [1, 2, 3]
    few = Streams(model, tokens, [0, 1, 2, 3], most_bytes=2 * size)
    assert [*few.kept] == [1, 3]
    assert [few.nearest(layer) for layer in range(4)] == [0, 1, 1, 3]
    assert not Streams(model, tokens, [3], most_bytes=size - 1).kept


def test_a_hook_that_the_user_left_on_the_model_acts_once():
    model = zoo.build("llama_gqa", fresh=True)
    tokens, settings = tokenize(model, zoo.tokens(3, 9)), RunSettings(progress=False)

    def losses(first_layer):
        cut = [Condition("edit", lambda batch: scale(model, "value", parallel=0.0, layers=2), first_layer=first_layer)]
        return run_conditions(model, tokens, cut, settings)["edit"].sums

    model.hook_dict["blocks.2.hook_resid_pre"].add_hook(lambda tensor, hook: 1.5 * tensor)
    assert np.array_equal(losses(2), losses(0))


def test_a_plain_hook_and_a_forward_of_ones_own_on_a_block_are_respected():
    model = zoo.build("llama_gqa", fresh=True)
    tokens, settings = tokenize(model, zoo.tokens(3, 9)), RunSettings(progress=False)

    def losses(first_layer):
        cut = [Condition("edit", lambda batch: scale(model, "value", parallel=0.0, layers=2), first_layer=first_layer)]
        return run_conditions(model, tokens, cut, settings)["edit"].sums

    before = losses(0)
    mine = model.blocks[0].forward
    object.__setattr__(model.blocks[0], "forward", mine)
    assert np.array_equal(losses(2), before)
    assert model.blocks[0].__dict__["forward"] is mine
    handle = model.blocks[1].register_forward_hook(lambda module, args, out: 1.5 * out)
    assert np.array_equal(losses(2), losses(0))
    assert not np.allclose(losses(2), before, atol=1e-3)
    handle.remove()
