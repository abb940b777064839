"""Calibrated compression: inputs that are really the inputs, optima that are optima, texts that are known again."""

import pytest
import torch
import zoo

import lens_geometry as lg
from lens_geometry import compress
from lens_geometry.compress.calibrating import Listening, calibration_of, window_hashes
from lens_geometry.compress.factors import truncate
from lens_geometry.compress.matrices import matrices
from lens_geometry.compress.plain import fresh_copy
from lens_geometry.errors import CompressionError, DataError, ModelError
from lens_geometry.provenance import describe, fingerprint

CASES = [
    case for case in zoo.cases(exclude=("opt_post_norm",)) if case[0] in ("gpt2", "neox", "llama_gqa", "opt", "moe")
]


QUICK = [("gpt2", "bridge"), ("llama_gqa", "hooked"), ("moe", "bridge")]


def some_quick(cases):
    """Every case, those that say nothing new of their class in the slow suite."""
    return [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("name", "backend"), some_quick(case for case in CASES if case[0] != "moe"))
def test_what_a_matrix_is_given_is_what_the_hooks_show(name, backend):
    model, ids = zoo.build(name, backend), zoo.tokens(5, 20)
    copied = fresh_copy(model)
    found = matrices(copied)
    heard = Listening(copied, found, calibration_of(model, ids), products=False)
    _, cache = model.run_with_cache(ids, names_filter=lambda name: name.endswith(("hook_z", "mlp.hook_post")))
    for layer in range(zoo.LAYERS):
        z, post = cache[f"blocks.{layer}.attn.hook_z"].flatten(2), cache[f"blocks.{layer}.mlp.hook_post"]
        for role, inputs in (("o", z), ("out", post)):
            key = f"{layer}.{role}"
            expected = inputs.detach().double().flatten(0, 1).square().sum(0)
            torch.testing.assert_close(heard.squares[key], expected, rtol=1e-4, atol=1e-6)
            assert heard.counts[key] == 100


@pytest.mark.parametrize(("name", "backend"), some_quick(CASES))
def test_wanda_prunes_every_row_by_weight_times_input(name, backend):
    model, ids = zoo.build(name, backend), zoo.tokens(8, 24)
    mark = fingerprint(model)
    if (name, backend) == ("moe", "bridge"):
        with pytest.raises(ModelError, match="expert"):
            compress.wanda(model, ids)
        return
    small = compress.wanda(model, ids, sparsity=0.25)
    assert fingerprint(model) == mark
    copied = fresh_copy(model)
    heard = Listening(copied, matrices(copied), calibration_of(model, ids), products=False)
    for before, after in zip(matrices(copied), matrices(fresh_copy(small)), strict=True):
        scores = before.read().double().abs() * heard.squares[before.key].sqrt()
        for row, kept, old in zip(scores, after.read(), before.read(), strict=True):
            away = set(row.argsort()[: len(row) // 4].tolist())
            assert set((kept == 0).nonzero().flatten().tolist()) == away
            assert all(kept[i] == old[i] for i in range(len(row)) if i not in away)
    about = describe(small)["compression"]
    assert about["calibration"]["tokens"] == 8 * 24
    assert about["sparsity"] == 0.25


@pytest.mark.parametrize("backend", sorted({backend for name, backend in CASES if name == "llama_gqa"}))
def test_wanda_with_a_pattern_leaves_n_of_m(backend):
    small = compress.compress(zoo.build("llama_gqa", backend), "wanda:pattern=2:4", zoo.tokens(8, 24))
    for matrix in matrices(fresh_copy(small)):
        groups = matrix.read().reshape(matrix.read().shape[0], -1, 4)
        assert bool(((groups != 0).sum(-1) == 2).all())


def test_low_rank_with_calibration_is_the_truncated_svd_of_the_whitened_matrix():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(10, 14, generator=generator, dtype=torch.float64)
    inputs = torch.randn(60, 14, generator=generator, dtype=torch.float64) @ torch.randn(
        14, 14, generator=generator, dtype=torch.float64
    )
    products = inputs.T @ inputs
    root = torch.linalg.cholesky(products)
    left, values, right = torch.linalg.svd(weight @ root, full_matrices=False)
    expected = left[:, :4] @ torch.diag(values[:4]) @ right[:4] @ torch.linalg.inv(root)
    given = truncate(weight, 4, products)
    torch.testing.assert_close(given, expected, rtol=1e-8, atol=1e-8)
    assert int(torch.linalg.matrix_rank(given)) == 4
    plain = truncate(weight, 4)
    left, values, right = torch.linalg.svd(weight)
    torch.testing.assert_close(plain, left[:, :4] @ torch.diag(values[:4]) @ right[:4], rtol=1e-8, atol=1e-8)

    def output_error(found):
        return float((inputs @ (found - weight).T).norm())

    assert output_error(given) < 0.9 * output_error(plain)
    assert output_error(given) == pytest.approx(float((torch.linalg.svdvals(weight @ root)[4:] ** 2).sum().sqrt()))
    few = inputs[:3]  # fewer inputs than the rank: their outputs are kept exactly
    kept = truncate(weight, 4, few.T @ few)
    torch.testing.assert_close(few @ kept.T, few @ weight.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "backend"), some_quick(case for case in CASES if case[0] != "moe"))
def test_every_matrix_of_low_rank_errs_less_in_its_output_with_calibration_than_without(name, backend):
    model, ids = zoo.build(name, backend), zoo.tokens(8, 40)
    copied = fresh_copy(model)
    found = matrices(copied)
    heard = Listening(copied, found, calibration_of(model, ids), products=True)
    small = [compress.low_rank(model, share=0.4, calibration=given) for given in (ids, None)]
    for before, calibrated, plain in zip(found, *(matrices(fresh_copy(m)) for m in small), strict=True):
        assert torch.linalg.matrix_rank(calibrated.read(), rtol=1e-4) == round(0.4 * min(before.read().shape))
        errors = [(m.read() - before.read()).double() for m in (calibrated, plain)]
        output = [float((e @ heard.products[before.key] * e).sum()) for e in errors]
        assert output[0] < output[1], before.name
        assert errors[0].norm() > errors[1].norm()


def test_windows_are_hashed_one_by_one():
    ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5])
    whole = window_hashes([ids], 4)
    assert len(whole) == 6
    assert [int(h) for h in whole] == [int(window_hashes([ids[i : i + 4]], 4)[0]) for i in range(6)]
    assert len(set(whole.tolist())) == 6
    assert len(window_hashes([ids[:3]], 4)) == 0
    assert window_hashes([torch.tensor([0, 0, 0, 1])], 4)[0] != window_hashes([torch.tensor([0, 0, 1, 0])], 4)[0]


def test_calibration_text_is_known_again_wherever_it_begins():
    model = lg.load_model("twin-rmsnorm")
    prose, other = lg.load_text("moby-dick", max_characters=9_000), lg.load_text("austen", max_characters=9_000)
    text = compress.calibration_tokens(model, prose, sequences=6, sequence_length=80)
    small = compress.wanda(model, text)
    shifted = lg.tokenize(model, text.ids[:, 7:60])
    assert compress.calibration_overlap(small, shifted) == {"known": True, "windows": 6 * 22, "shared": 6 * 22}
    elsewhere = lg.tokenize(model, other, sequence_length=64, max_sequences=8)
    assert compress.calibration_overlap(small, elsewhere) == {"known": True, "windows": 8 * 33, "shared": 0}
    mixed = torch.cat([elsewhere.ids[:1], text.ids[:1, :64]])
    assert compress.calibration_overlap(small, lg.tokenize(model, mixed))["shared"] == 33
    short = lg.tokenize(model, text.ids[:, :20])
    assert compress.calibration_overlap(small, short)["known"] is False
    assert compress.calibration_overlap(compress.magnitude(model), shifted) == {
        "known": True,
        "windows": 0,
        "shared": 0,
    }
    assert compress.calibration_overlap(model, shifted)["known"] is False
    stacked = compress.round_to_nearest(small, bits=4)
    assert compress.calibration_overlap(stacked, shifted)["shared"] == 6 * 22


def test_padding_is_no_calibration():
    model = lg.load_model("twin-rmsnorm")
    texts = [
        "Call me Ishmael. Some years ago, never mind how long precisely.",
        "It is a truth universally acknowledged, that",
    ]
    tokens = compress.calibration_tokens(model, texts, sequence_length=64)
    assert not bool(tokens.mask.all())
    small = compress.wanda(model, tokens)
    about = describe(small)["compression"]["calibration"]
    assert about["tokens"] == int(tokens.mask.sum())
    rows = [tokens.ids[i, tokens.mask[i]][None] for i in range(2)]
    apart = [
        Listening(c, matrices(c), calibration_of(model, row), products=False)
        for row in rows
        for c in [fresh_copy(model)]
    ]
    copied = fresh_copy(model)
    together = Listening(copied, matrices(copied), calibration_of(model, tokens), products=False)
    for key, value in together.squares.items():
        torch.testing.assert_close(value, apart[0].squares[key] + apart[1].squares[key], rtol=1e-4, atol=1e-6)


def test_a_calibration_that_cannot_be_trusted_is_refused():
    model = zoo.build("llama_gqa", fresh=True)
    with pytest.raises(DataError, match="no tokenizer"):
        compress.wanda(model, "some text")
    for text, words in (("", "empty"), ("x", "fewer than two tokens")):
        with pytest.raises(DataError, match=words):
            compress.wanda(zoo.build("llama_gqa", tokenizer=True), text)
    with pytest.raises(DataError, match="vocabulary"):
        compress.wanda(model, zoo.tokens() + 500)
    with torch.no_grad():
        model.original_model.model.embed_tokens.weight[7] = float("inf")
    with pytest.raises((CompressionError, ModelError), match="not finite|differ by nan"):
        compress.wanda(model, torch.full((2, 8), 7))
    with pytest.raises(CompressionError, match="needs a calibration text"):
        compress.wanda(zoo.build("llama_gqa"), None)
