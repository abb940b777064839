"""W_O and W_out are what the live model multiplies with."""

import pytest
import torch
import zoo

from lens_geometry.errors import SiteError
from lens_geometry.weights import attention_output, mlp_output

PLAIN = ("gpt2", "neox", "llama_gqa", "llama_bias", "qwen3", "opt")


@pytest.mark.parametrize(("name", "backend"), [case for case in zoo.cases() if case[0] in PLAIN])
def test_the_branches_are_what_the_weights_make_of_z_and_post(name, backend):
    model, kept = zoo.build(name, backend, torch.float64), {}
    names = [f"blocks.2.{name}" for name in ("attn.hook_z", "hook_attn_out", "mlp.hook_post", "hook_mlp_out")]
    hooks = [(name, lambda tensor, hook, name=name: kept.update({name: tensor.clone()})) for name in names]
    with torch.no_grad():
        model.run_with_hooks(zoo.tokens(2, 5), return_type=None, fwd_hooks=hooks)
    z, attn_out, post, mlp_out = (kept[name] for name in names)
    (w_o, b_o), (w_out, b_out) = attention_output(model, 2), mlp_output(model, 2)
    attention = torch.einsum("bphd,hdm->bpm", z, w_o) + (0 if b_o is None else b_o)
    torch.testing.assert_close(attention, attn_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(post @ w_out + (0 if b_out is None else b_out), mlp_out, rtol=1e-12, atol=1e-12)


def test_a_mixture_of_experts_has_no_w_out():
    with pytest.raises(SiteError, match=r"no single W_out .*blocks\.1\.mlp"):
        mlp_output(zoo.build("moe"), 1)
