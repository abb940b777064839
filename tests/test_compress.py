"""Compression by weights alone: the input stays, the class stays, the numbers are those of plain references."""

import copy

import pytest
import torch
import zoo

from lens_geometry import compress
from lens_geometry.anatomy import carried_hooks, inspect
from lens_geometry.compress.matrices import matrices
from lens_geometry.compress.plain import fresh_copy
from lens_geometry.compress.pruning import smallest, smallest_of_groups, smallest_of_rows
from lens_geometry.compress.rounding import round_matrix
from lens_geometry.errors import CompressionError, LensGeometryError, ModelError, SiteError
from lens_geometry.provenance import describe, fingerprint
from lens_geometry.sites import SITES

CASES = zoo.cases(exclude=("opt_post_norm",))
QUICK = [("gpt2", "bridge"), ("gpt2", "native"), ("llama_gqa", "hooked")]


def some_quick(cases):
    """Every case, those that say nothing new of their class in the slow suite."""
    return [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "backend"), some_quick(CASES))
def test_every_class_comes_back_changed_and_the_given_model_stays_to_the_bit(name, backend):
    model, tokens = zoo.build(name, backend), zoo.tokens()
    with torch.no_grad():
        mark, logits, state = fingerprint(model), model(tokens), torch.random.get_rng_state()
        small = compress.round_to_nearest(model, bits=4, group_size=8)
        assert type(small) is type(model)
        assert float((small(tokens) - logits).abs().max()) > 1e-3
        assert torch.equal(torch.random.get_rng_state(), state)
        assert fingerprint(model) == mark
        assert torch.equal(model(tokens), logits)
    assert describe(model)["compression"] is None
    assert describe(small)["compression"]["bits_per_weight"] == pytest.approx(4 + 32 / 8)
    before, after = inspect(model), inspect(small)
    for site in SITES.values():
        for layer in range(zoo.LAYERS):
            assert bool(after.refusal(site, layer)) == bool(before.refusal(site, layer)), site.name


@pytest.mark.parametrize(
    "variant", ["rtn:bits=4,group_size=8", "magnitude:pattern=2:4", "blank:layers=1", "drop:layers=2"]
)
@pytest.mark.parametrize(
    "name",
    [name if name == "gpt2" else pytest.param(name, marks=pytest.mark.slow) for name, _ in zoo.cases("hooked")],
)
def test_a_bridge_and_a_hooked_transformer_of_the_same_weights_stay_the_same_model(name, variant):
    tokens = zoo.tokens()
    with torch.no_grad():
        logits = [compress.compress(zoo.build(name, backend), variant)(tokens) for backend in ("bridge", "hooked")]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_stays(dtype):
    for backend in {backend for name, backend in CASES if name == "llama_gqa"}:
        model = zoo.build("llama_gqa", backend, dtype)
        small = compress.magnitude(model, sparsity=0.25)
        assert {parameter.dtype for parameter in small.parameters()} == {dtype}
        assert small(zoo.tokens()).dtype == dtype


def test_a_plain_hugging_face_model_comes_back_as_one():
    plain = zoo.hugging_face("gpt2")
    weight = plain.transformer.h[0].mlp.c_fc.weight.clone()
    small = compress.round_to_nearest(plain, bits=3)
    assert type(small) is type(plain)
    assert torch.equal(plain.transformer.h[0].mlp.c_fc.weight, weight)
    expected = round_matrix(weight.T, 3).T
    assert torch.equal(small.transformer.h[0].mlp.c_fc.weight, expected)
    assert torch.equal(small.transformer.wte.weight, plain.transformer.wte.weight)


def by_loops(weight, bits, size, symmetric):
    """Round to nearest in plain Python, one group at a time."""
    low, high, out = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1, weight.tolist()
    for row in out:
        for start in range(0, len(row), size):
            group = row[start : start + size]
            least, most = min(0.0, *group), max(0.0, *group)
            scale = max(-least, most) / ((high - low) / 2) if symmetric else (most - least) / (high - low)
            zero = 0 if symmetric or scale == 0 else round(min(max(low - least / scale, low), high))
            for i, x in enumerate(group):
                q = round(min(max(x / scale + zero, low), high)) if scale else 0
                row[start + i] = (q - zero) * scale
    return torch.tensor(out, dtype=weight.dtype)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, 4), (3, 6), (2, 12)])
def test_rounding_is_that_of_a_plain_loop(bits, group_size, symmetric):
    weight = noise(5, 12).double()
    weight[1], weight[2], weight[3] = weight[1].abs(), -weight[2].abs(), 0
    given = round_matrix(weight, bits, group_size=group_size, symmetric=symmetric)
    torch.testing.assert_close(given, by_loops(weight, bits, group_size or 12, symmetric), rtol=1e-12, atol=1e-12)
    if not symmetric:  # whose scale is not that of its largest value
        again = round_matrix(given, bits, group_size=group_size)
        torch.testing.assert_close(again, given, rtol=1e-12, atol=1e-12)
    for row in given:
        assert len(set(row.tolist())) <= 2**bits * (12 // (group_size or 12))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(8, None), (4, 16), (3, 32), (2, None)])
def test_rounding_is_that_of_compressed_tensors_bit_for_bit(bits, group_size, symmetric):
    library = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = noise(40, 96, seed=1)
    weight[1], weight[2], weight[3] = weight[1].abs(), -weight[2].abs(), 0
    strategy = {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
    arguments = library.QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **strategy)
    groups = weight.reshape(40, -1, group_size or 96)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    expected = fake_quantize(weight, scale, zero, arguments)
    assert torch.equal(round_matrix(weight, bits, group_size=group_size, symmetric=symmetric), expected)


def test_the_smallest_weights_go_of_the_matrix_of_rows_and_of_groups():
    scores = noise(6, 16).abs()
    assert set(scores[smallest(scores, 0.25)].tolist()) == set(sorted(scores.flatten().tolist())[:24])
    for row, away in zip(scores, smallest_of_rows(scores, 0.3), strict=True):
        assert set(row[away].tolist()) == set(sorted(row.tolist())[:4])
    for row, away in zip(scores, smallest_of_groups(scores, "1:4"), strict=True):
        for start in range(0, 16, 4):
            group = row[start : start + 4].tolist()
            assert set(row[start : start + 4][away[start : start + 4]].tolist()) == set(sorted(group)[:3])
    assert int(smallest(torch.ones(4, 4), 0.5).sum()) == 8  # of equal scores no more than asked for


def test_only_the_chosen_layers_change_each_by_its_own_bits():
    model = zoo.build("llama_gqa")
    small = compress.round_to_nearest(model, bits={0: 8, 2: 3, 3: 16})
    old, new = (matrices(fresh_copy(m)) for m in (model, small))
    for before, after in zip(old, new, strict=True):
        expected = {0: 8, 2: 3}.get(before.layer)
        weight = before.read() if expected is None else round_matrix(before.read(), expected)
        assert torch.equal(after.read(), weight), before.name
    about = describe(small)["compression"]
    assert about["layers"] == [0, 2]
    assert about["settings"]["bits"] == {"0": 8, "2": 3, "3": 16}


def test_sizes_are_those_of_the_bits_the_scales_and_everything_else_at_16():
    model = zoo.build("llama_gqa")
    blocks = sum(matrix.read().numel() for matrix in matrices(fresh_copy(model)))
    everything = sum(p.numel() for p in zoo.hugging_face("llama_gqa").parameters())
    rounded = describe(compress.round_to_nearest(model, bits=4, group_size=16))["compression"]
    assert rounded["dense_bytes"] == 2 * everything
    assert rounded["size_bytes"] == 2 * (everything - blocks) + blocks * (4 + 32 / 16) / 8
    assert describe(compress.round_to_nearest(model, bits=4, group_size=16, symmetric=True))["compression"][
        "bits_per_weight"
    ] == pytest.approx(5)
    pruned = describe(compress.magnitude(model, pattern="2:4"))["compression"]
    assert (pruned["bits_per_weight"], pruned["sparsity"]) == (9.0, 0.5)
    halved = describe(compress.low_rank(model, share=0.5))["compression"]
    numbers = sum(round(0.5 * min(m.read().shape)) * sum(m.read().shape) for m in matrices(fresh_copy(model)))
    assert halved["bits_per_weight"] == pytest.approx(16 * numbers / blocks)
    error = compress.round_to_nearest(model, bits=4)
    wrong = [
        (a.read() - b.read()).square().sum()
        for a, b in zip(*(matrices(fresh_copy(m)) for m in (error, model)), strict=True)
    ]
    total = [m.read().square().sum() for m in matrices(fresh_copy(model))]
    expected = float((sum(wrong) / sum(total)).sqrt())
    assert describe(error)["compression"]["weight_error"] == pytest.approx(expected, rel=1e-5)


def test_methods_can_be_stacked_and_every_step_is_told():
    model = zoo.build("llama_gqa")
    sparse = compress.magnitude(model, sparsity=0.5)
    both = compress.round_to_nearest(sparse, bits=4, group_size=8)
    about = describe(both)["compression"]
    assert [step["method"] for step in about["steps"]] == ["magnitude", "rtn"]
    assert about["bits_per_weight"] == pytest.approx(0.5 * 4 + 1 + 32 / 8)
    assert about["dense_bytes"] == describe(sparse)["compression"]["dense_bytes"]
    assert "steps" not in describe(sparse)["compression"]
    third = describe(compress.drop_layers(both, [1, 2]))["compression"]
    assert [step["method"] for step in third["steps"]] == ["magnitude", "rtn", "drop"]
    assert third["bits_per_weight"] == pytest.approx(about["bits_per_weight"])


@pytest.mark.parametrize(
    ("name", "backend"), some_quick(c for c in CASES if c[0] in ("gpt2", "llama_gqa", "gemma2", "moe"))
)
def test_blanked_layers_write_nothing_and_the_depth_stays(name, backend):
    model = zoo.build(name, backend)
    for part, silent in (("block", ("attn", "mlp")), ("attn", ("attn",)), ("mlp", ("mlp",))):
        small = compress.blank_layers(model, [1], part=part)
        assert small.cfg.n_layers == zoo.LAYERS
        names = [f"blocks.{layer}.hook_{branch}_out" for layer in (1, 2) for branch in ("attn", "mlp")]
        _, cache = small.run_with_cache(zoo.tokens(), names_filter=lambda name, names=names: name in names)
        for branch in ("attn", "mlp"):
            assert bool((cache[f"blocks.1.hook_{branch}_out"] == 0).all()) == (branch in silent)
            assert bool(cache[f"blocks.2.hook_{branch}_out"].any())


@pytest.mark.parametrize(
    ("name", "backend"), some_quick(c for c in CASES if c[0] in ("gpt2", "neox", "llama_gqa", "gemma3", "moe"))
)
def test_a_dropped_layer_is_a_layer_that_is_passed_by(name, backend):
    model, tokens, before = zoo.build(name, backend), zoo.tokens(), {}

    def keep(tensor, hook):
        before["x"] = tensor

    hooks = [("blocks.1.hook_resid_pre", keep), ("blocks.1.hook_resid_post", lambda tensor, hook: before["x"])]
    with torch.no_grad():
        expected = model.run_with_hooks(tokens, fwd_hooks=hooks)
        small = compress.drop_layers(model, 1)
        torch.testing.assert_close(small(tokens), expected, rtol=0, atol=0)
    assert (small.cfg.n_layers, len(small.blocks)) == (3, 3)
    assert "blocks.2.hook_resid_pre" in small.hook_dict
    assert "blocks.3.hook_resid_pre" not in small.hook_dict
    if backend == "bridge":
        config = small.original_model.config
        assert config.num_hidden_layers == 3
        if name == "gemma3":
            assert config.layer_types == [model.original_model.config.layer_types[i] for i in (0, 2, 3)]


def test_a_variant_reads_back_what_it_writes():
    for text in (
        "rtn:bits=4,group_size=64",
        "rtn:bits=0=8+1=4",
        "magnitude:pattern=2:4,layers=0+2-3",
        "blank:layers=1",
    ):
        variant = compress.parse_variant(text)
        assert variant.label == text
        assert compress.parse_variant(variant) is variant
    assert (
        compress.Variant("rtn", {"bits": 4, "layers": [0, 3], "group_size": None}).label
        == "rtn:bits=4,layers=0+3,group_size=none"
    )
    assert [compress.parse_variant(name).family for name in ("gptq", "wanda", "low-rank", "drop")] == [
        "quantisation", "pruning", "low rank", "depth",
    ]  # fmt: skip
    for wrong, words in (("rtn:group_sise=4", "group_sise"), ("rnt", "no method"), ("rtn:bits=0=x", "bits by layer")):
        with pytest.raises(CompressionError, match=words):
            compress.parse_variant(wrong)


@pytest.mark.parametrize(
    ("variant", "error", "words"),
    [
        ("rtn:group_size=7", CompressionError, "do not divide 48"),
        ("rtn:bits=1", CompressionError, "1 bits"),
        ("rtn:bits=16", CompressionError, "nothing to round"),
        ("rtn:bits=9=4", CompressionError, "no layer 9"),
        ("magnitude:sparsity=1.0", CompressionError, "sparsity"),
        ("magnitude:sparsity=-0.1", CompressionError, "sparsity"),
        ("magnitude:sparsity=0", CompressionError, "nothing to prune"),
        ("magnitude:sparsity=0.00001", CompressionError, "not one weight"),
        ("magnitude:pattern=4:2", CompressionError, "no pattern"),
        ("magnitude:pattern=2:5", CompressionError, "do not divide 48"),
        ("low-rank:share=0.01", CompressionError, "rank of 0"),
        ("low-rank:share=1", CompressionError, "no share"),
        ("wanda", CompressionError, "needs a calibration text"),
        ("blank:layers=9", SiteError, "layers 0 to 3"),
        ("blank:layers=1,part=head", CompressionError, "no part"),
        ("drop:layers=all", CompressionError, "all layers"),
        ("drop:layers=9", SiteError, "layers 0 to 3"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_cure(variant, error, words):
    with pytest.raises(error, match=words) as found:
        compress.compress(zoo.build("llama_gqa"), variant)
    assert found.value.cure


def test_what_cannot_be_copied_faithfully_is_refused():
    neox = zoo.build("neox", fresh=True)
    with torch.no_grad():
        next(p for n, p in neox.named_parameters() if ".1." in n and ".q." in n and n.endswith("weight")).mul_(2)
    with pytest.raises(ModelError, match="changed after the model was wrapped"):
        compress.round_to_nearest(neox)
    folded = zoo.build("llama_gqa", fresh=True)
    with zoo.quiet():
        folded.enable_compatibility_mode()
    with pytest.raises(ModelError, match="folded"):
        compress.round_to_nearest(folded)
    with pytest.raises(ModelError, match="final_layer_norm"):
        compress.round_to_nearest(zoo.build("opt_post_norm"))
    with pytest.raises(ModelError, match="taken into a TransformerBridge"):
        compress.round_to_nearest(zoo.build("llama_gqa").original_model)
    with pytest.raises(LensGeometryError, match="cannot be compressed"):
        compress.round_to_nearest(torch.nn.Linear(2, 2))
    blanked = compress.blank_layers(zoo.build("llama_gqa"), "all")
    with pytest.raises(CompressionError, match="not one weight"):
        compress.blank_layers(blanked, 1)


def test_a_hook_that_somebody_left_on_is_neither_copied_nor_lost():
    for backend in {backend for name, backend in CASES if name == "llama_gqa"}:
        model, tokens = zoo.build("llama_gqa", backend, fresh=True), zoo.tokens()
        expected = compress.round_to_nearest(copy.deepcopy(model))(tokens)
        model.add_hook("blocks.1.hook_resid_pre", lambda tensor, hook: tensor * 0)
        edited = model(tokens)
        small = compress.round_to_nearest(model)
        assert torch.equal(small(tokens), expected)
        assert not carried_hooks(small)
        assert torch.equal(model(tokens), edited)
