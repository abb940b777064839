"""No silent no-op: an edit that did nothing raises, and names the hook."""

import pytest
import torch
import zoo

from lens_geometry.anatomy import hook_points
from lens_geometry.edits import applied, observe, scale
from lens_geometry.errors import HookError, SiteError
from lens_geometry.sites import SITES

HOOK = "blocks.1.hook_mlp_out"


def leave(tensor, hook):
    return None


def test_it_counts_what_fired():
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    with applied(model, scale(model, "value", parallel=0.5, layers=[0, 2])) as fired:
        model(ids)
        model(ids)
    assert fired == {f"blocks.{layer}.attn.hook_{name}": 2 for layer in (0, 2) for name in "vz"}


def test_the_result_is_that_of_run_with_hooks():
    model, ids = zoo.build("llama_gqa"), zoo.tokens()
    hooks = scale(model, "mlp", parallel=0.5)
    with applied(model, hooks), torch.no_grad():
        inside = model(ids, return_type="logits")
    assert torch.equal(inside, model.run_with_hooks(ids, return_type="logits", fwd_hooks=hooks))


def test_no_forward_pass_is_an_error():
    with pytest.raises(HookError, match="no forward pass was run"), applied(zoo.build("llama_gqa"), [(HOOK, leave)]):
        pass


def test_a_layer_that_the_pass_does_not_reach_is_an_error():
    model = zoo.build("llama_gqa")
    with (
        pytest.raises(HookError, match=r"2 of 4 hooks never fired \[blocks.3"),
        applied(model, scale(model, "mlp", parallel=0.5, layers=[1, 3])),
    ):
        model(zoo.tokens(), stop_at_layer=2)


def test_a_name_or_a_filter_that_matches_nothing_is_an_error_before_anything_runs():
    model = zoo.build("llama_gqa")
    with pytest.raises(HookError, match="no such hook"), applied(model, [("blocks.9.hook_mlp_out", leave)]):
        pytest.fail("ran")
    with pytest.raises(HookError, match="matches no hook"), applied(model, [(lambda name: "nope" in name, leave)]):
        pytest.fail("ran")


def test_a_filter_hooks_everything_that_it_matches():
    model = zoo.build("llama_gqa")
    with applied(model, [(lambda name: name in (HOOK, "blocks.2.hook_mlp_out"), leave)]) as fired:
        model(zoo.tokens())
    assert sum(fired.values()) == 2


def test_an_edit_that_changes_nothing_is_an_error():
    model = zoo.build("llama_gqa")
    one_token = zoo.tokens(1, 1)
    for hooks in (
        scale(model, "value_excl_self", parallel=0.0),  # one token attends to itself alone
        scale(model, "mlp", parallel=0.5, positions=torch.zeros(1, 1, dtype=torch.bool)),
    ):
        with pytest.raises(HookError, match="left every activation as it was"), applied(model, hooks):
            model(one_token)


def test_a_layer_whose_update_is_zero_does_not_stop_an_edit_that_reaches_others():
    model = zoo.build("llama_gqa", fresh=True)
    off = torch.ones(4)
    off[2] = 0.0
    with applied(model, scale(model, "mlp", parallel=off)):  # layers 0, 1 and 3 have nothing to do
        model(zoo.tokens())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".1." in name and ("o_proj" in name or "attn.o" in name):
                p.zero_()
    with applied(model, scale(model, "attn", parallel=0.0)):
        model(zoo.tokens())


def test_one_edit_twice_in_a_list_is_an_error():
    model = zoo.build("llama_gqa")
    hooks = scale(model, "value", parallel=0.5)
    with pytest.raises(HookError, match="twice"), applied(model, hooks + hooks):
        pytest.fail("ran")


def test_a_declared_no_op_and_a_users_own_identity_are_no_errors():
    model = zoo.build("llama_gqa")
    with applied(model, [*scale(model, "mlp"), (HOOK, lambda tensor, hook: tensor)]):
        model(zoo.tokens())


def test_an_exception_inside_is_passed_on_as_it_is_and_the_hooks_are_gone():
    model = zoo.build("llama_gqa", fresh=True)
    with pytest.raises(KeyError, match="mine"), applied(model, scale(model, "mlp", parallel=0.0)):
        raise KeyError("mine")
    assert not any(point.fwd_hooks for point in hook_points(model).values())


@pytest.mark.parametrize(("name", "backend"), zoo.cases())
def test_observing_sees_every_site_of_every_layer_once_and_changes_nothing(name, backend):
    model, ids, seen = zoo.build(name, backend), zoo.tokens(), []
    sites = [site for site in SITES if site not in zoo.lacks(name, backend)]
    with torch.no_grad():
        base = model(ids, return_type="logits")
        hooks = observe(model, sites, lambda site, layer, u, r: seen.append((site.name, layer, u.shape == r.shape)))
        with applied(model, hooks):
            assert torch.equal(model(ids, return_type="logits"), base)
    assert sorted(seen) == sorted((site, layer, True) for site in sites for layer in range(4))
    assert all(not fn.collector.seen for _, fn in hooks)


def test_observing_under_an_edit_sees_the_edited_activations():
    model, ids, seen = zoo.build("llama_gqa", dtype=torch.float64), zoo.tokens(), []

    def visit(site, layer, update, reference):
        seen.append(float((update * reference).sum(-1).abs().max()))

    edit = scale(model, "mlp", parallel=0.0, layers=2)
    with torch.no_grad(), applied(model, edit + observe(model, ["mlp"], visit, layers=2)):
        model(ids)
    with torch.no_grad(), applied(model, observe(model, ["mlp"], visit, layers=2)):
        model(ids)
    assert seen[0] < 1e-10 < 0.1 < seen[1]


def test_observing_a_site_that_is_not_there_is_refused():
    with pytest.raises(SiteError, match="does not hold"):
        observe(zoo.build("opt_post_norm"), ["attn"], print)
