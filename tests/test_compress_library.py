"""GPTQ, AWQ and SparseGPT: what llmcompressor does to a copy, as an ordinary dense model, and nothing left behind."""

import os
import sys

import pytest
import torch
import zoo

import lens_geometry as lg
from lens_geometry import compress
from lens_geometry.compress.matrices import matrices
from lens_geometry.compress.plain import fresh_copy
from lens_geometry.errors import CompressionError, ModelError
from lens_geometry.provenance import describe, fingerprint

IDS = zoo.tokens(8, 40, seed=1)
NAMES = ["gpt2", "neox", "llama_gqa", "gemma2", "qwen3"]


def test_without_the_library_the_cure_is_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llmcompressor", None)
    with pytest.raises(CompressionError, match=r"lens-geometry\[compression\]"):
        compress.gptq(zoo.build("llama_gqa"), IDS)


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("llmcompressor")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gptq:group_size=8", "awq:group_size=8", "sparsegpt:pattern=2:4"])
@pytest.mark.parametrize("name", NAMES)
def test_each_method_ends_in_an_ordinary_dense_model_of_the_same_class(library, name, variant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = zoo.build(name)
    mark, state = fingerprint(model), torch.random.get_rng_state()
    small = compress.compress(model, variant, IDS)
    assert fingerprint(model) == mark
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not list(tmp_path.iterdir())
    plain = fresh_copy(small)
    assert type(plain) is type(zoo.hugging_face(name))
    assert {n: p.shape for n, p in plain.named_parameters()} == {
        n: p.shape for n, p in zoo.hugging_face(name).named_parameters()
    }
    for module in plain.modules():
        assert not hasattr(module, "quantization_scheme")
        assert not type(module).__module__.startswith(("compressed_tensors", "llmcompressor"))
    assert not hasattr(plain.config, "quantization_config")
    for (n, before), (_, after) in zip(fresh_copy(model).named_parameters(), plain.named_parameters(), strict=True):
        if before.ndim == 1:
            assert torch.equal(before, after), n  # norms too, which AWQ scales on its way
    for before, after in zip(matrices(fresh_copy(model)), matrices(plain), strict=True):
        relative = float((after.read() - before.read()).norm() / before.read().norm())
        assert 0.01 < relative < (0.8 if "sparse" in variant else 0.3), before.name
        if "sparse" in variant:
            groups = (after.read() != 0).reshape(len(after.read()), -1, 4).sum(-1)
            assert bool((groups <= 2).all())
    about = describe(small)["compression"]
    assert about["bits_per_weight"] == pytest.approx(9.0 if "sparse" in variant else 4 + 32 / 8)
    assert about["calibration"]["tokens"] == 320


@pytest.mark.slow
def test_loguru_and_the_environment_are_left_as_they_were(library, capfd):
    from loguru import logger
    from tqdm import tqdm

    heard = []
    number = logger.add(heard.append, level="DEBUG", format="{message}")
    handlers, environment, init = dict(logger._core.handlers), dict(os.environ), tqdm.__init__
    try:
        compress.gptq(zoo.build("llama_gqa"), IDS, group_size=8)
        assert dict(logger._core.handlers) == handlers
    finally:
        logger.remove(number)
    assert not heard
    assert dict(os.environ) == environment
    assert tqdm.__init__ is init
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


@pytest.mark.slow
def test_gptq_rounds_the_twin_better_than_to_nearest_and_the_same_again(library):
    model = lg.load_model("twin-rmsnorm")
    judged = lg.tokenize(model, lg.load_text("austen"), sequence_length=64, max_sequences=6).ids
    text = compress.calibration_tokens(model, lg.load_text("moby-dick"), sequences=16, sequence_length=128)
    with torch.no_grad():
        nearest = float(compress.round_to_nearest(model, bits=3, group_size=64)(judged, return_type="loss"))
        first = compress.gptq(model, text, bits=3)
        assert float(first(judged, return_type="loss")) < nearest
    assert fingerprint(compress.gptq(model, text, bits=3)) == fingerprint(first)


@pytest.mark.slow
def test_layers_have_bits_of_their_own_and_others_stay(library):
    model = zoo.build("llama_gqa")
    small = compress.compress(model, "gptq:bits=0=8+2=2,group_size=8", IDS)
    errors = {}
    for before, after in zip(matrices(fresh_copy(model)), matrices(fresh_copy(small)), strict=True):
        errors.setdefault(before.layer, []).append(float((after.read() - before.read()).norm() / before.read().norm()))
    assert max(errors[1] + errors[3]) == 0
    assert 0 < max(errors[0]) < 0.02 < 0.2 < min(errors[2])


@pytest.mark.slow
def test_a_hooked_llama_gets_the_weights_that_its_bridge_gets(library):
    if ("llama_gqa", "hooked") not in zoo.cases():
        pytest.skip("no HookedTransformer")
    for variant in ("gptq:group_size=8", "sparsegpt:sparsity=0.5"):
        logits = [
            compress.compress(zoo.build("llama_gqa", b), variant, IDS)(zoo.tokens()) for b in ("bridge", "hooked")
        ]
        torch.testing.assert_close(*logits, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_what_the_library_cannot_take_is_refused_by_name(library):
    for name, backend, words in (
        ("moe", "bridge", "experts"),
        ("gpt2", "native", "native"),
        *((("gpt2", "hooked", "no Llama"),) if ("gpt2", "hooked") in zoo.cases() else ()),
    ):
        with pytest.raises(ModelError, match=words):
            compress.gptq(zoo.build(name, backend), IDS, group_size=8)
    with pytest.raises(ModelError, match="not known"):
        compress.awq(zoo.build("olmo2"), IDS, group_size=8)
    with pytest.raises(CompressionError, match="do not divide"):
        compress.gptq(zoo.build("llama_gqa"), IDS, group_size=64)
    with pytest.raises(CompressionError, match="do not divide"):
        compress.sparse_gpt(zoo.build("llama_gqa"), IDS, pattern="2:5")
