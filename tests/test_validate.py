"""`validate` passes on sound models, and finds what is wrong with others."""

import pytest
import torch
import zoo

from lens_geometry.errors import ModelError
from lens_geometry.experiments import site_table, validate


@pytest.mark.parametrize(("name", "backend"), zoo.cases(exclude=("opt_post_norm",)))
def test_every_architecture_passes(name, backend):
    model = zoo.build(name, backend, tokenizer=True)
    table = validate(model, zoo.tokens(2, 10)).table
    failed = table[table["status"] == "fail"]
    assert failed.empty, failed.to_string()
    refused = set(table[table["status"] == "refused"]["site"])
    assert refused - {"value_excl_self", "model"} == zoo.lacks(name, backend)
    assert {
        "the no-op is bit-equal",
        "layers before the edit are bit-equal",
        "cached generation equals uncached",
    } <= set(table["check"])
    editable = set(table[table["check"] == "the no-op is bit-equal"]["site"])
    assert len(editable) >= 5
    for check in ("layers before the edit are bit-equal", "the edit reaches the logits"):
        assert set(table[table["check"] == check]["site"]) == editable  # no check got lost on the way


def test_a_post_norm_model_is_refused_at_its_branches_and_sound_elsewhere():
    table = validate(zoo.build("opt_post_norm"), zoo.tokens()).table
    assert {"attn", "mlp"} <= set(table[table["status"] == "refused"]["site"])
    assert set(table[table["site"] == "block"]["status"]) == {"pass"}


def test_a_cache_that_changes_the_continuation_fails(monkeypatch):
    model = zoo.build("llama_gqa", fresh=True, tokenizer=True)
    real = type(model).generate

    def broken(self, ids, *, use_past_kv_cache, **kwargs):
        out = real(self, ids, use_past_kv_cache=use_past_kv_cache, **kwargs)
        return out if use_past_kv_cache else (out + 1) % 258

    monkeypatch.setattr(type(model), "generate", broken)
    table = validate(model, zoo.tokens()).table
    assert table[table["status"] == "fail"]["check"].tolist() == ["cached generation equals uncached"]


def test_a_forward_pass_that_is_not_repeatable_fails():
    model = zoo.build("llama_gqa", fresh=True)
    generator = torch.Generator().manual_seed(0)

    def jitter(tensor, hook):
        return tensor + 1e-3 * torch.randn(tensor.shape, generator=generator)

    model.add_hook("blocks.3.hook_resid_post", jitter)
    failed = validate(model, zoo.tokens()).table.query("status == 'fail'")
    assert "a second forward pass is bit-equal" in set(failed["check"])


def test_the_sites_table_names_hooks_shapes_and_reasons():
    table = site_table(zoo.build("opt_post_norm")).set_index("site")
    assert table.loc["attn", "usable"] == "no"
    assert "does not hold" in table.loc["attn", "reason"]
    late = site_table(zoo.build("opt", dtype=torch.bfloat16)).set_index("site")
    assert late.loc["value_excl_self", "usable"] == "to measure"
    assert "fires after" in late.loc["value_excl_self", "reason"]
    assert table.loc["block", "usable"] == "yes"
    gqa = site_table(zoo.build("llama_gqa")).set_index("site")
    assert "blocks.L.attn.hook_v blocks.L.attn.hook_pattern" in gqa.loc["value_excl_self", "reads"]
    assert "v [2, 6, 2, " in gqa.loc["value", "shapes"]
    assert (gqa["usable"] == "yes").all()


def test_what_is_no_model_is_refused():
    with pytest.raises(ModelError):
        validate("gpt2")
    with pytest.raises(ModelError):
        site_table(None)
