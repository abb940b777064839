"""A HookedTransformer of one's own on disk: the same bits come back, and damage is named."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
import zoo

import lens_geometry as lg
from lens_geometry import hooked_files
from lens_geometry.errors import ModelError

hooked_only = pytest.mark.skipif(zoo.MAJOR > 3, reason="TransformerLens 4 has no HookedTransformer")
IDS = torch.tensor([[3, 7, 1, 19, 4, 4], [0, 2, 11, 5, 18, 6]])


def items_model(**changes):
    """Twenty items, learned positions, no tokenizer."""
    import transformer_lens

    settings = dict(n_layers=2, d_model=16, d_head=8, n_heads=2, n_ctx=12, d_vocab=20, act_fn="gelu", seed=1)
    with zoo.quiet():
        model = transformer_lens.HookedTransformer(transformer_lens.HookedTransformerConfig(**{**settings, **changes}))
    return model.eval()


KINDS = {
    "learned positions": {},
    "rotary, RMSNorm, grouped queries": dict(
        positional_embedding_type="rotary", rotary_dim=8, normalization_type="RMS", final_rms=True, gated_mlp=True,
        n_key_value_heads=1,
    ),
    "attention only, no norm, other outputs": dict(attn_only=True, normalization_type=None, d_vocab_out=9),
    "local attention, parallel": dict(use_local_attn=True, window_size=3, attn_types=["local", "global"],
                                      parallel_attn_mlp=True, attn_scores_soft_cap=30.0),
}  # fmt: skip


@hooked_only
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_comes_back_bit_for_bit_whatever_its_configuration(tmp_path, kind):
    model = items_model(**KINDS[kind])
    assert lg.save_hooked(model, tmp_path / "items") == tmp_path / "items"
    assert {path.suffix for path in (tmp_path / "items").iterdir()} == {".json", ".safetensors"}
    before = torch.random.get_rng_state()
    again = lg.load_model(str(tmp_path / "items"), backend="hooked", device="cpu")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(again(IDS), model(IDS))
    about = lg.describe(again)
    assert about["fingerprint"] == lg.describe(model)["fingerprint"]
    assert (about["name"], about["d_vocab"], about["tokenizer"]) == (str(tmp_path / "items"), 20, None)
    assert not again.training


@hooked_only
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_the_dtype_asked_for_is_that_of_every_weight(tmp_path, dtype):
    lg.save_hooked(items_model(), tmp_path)
    model = lg.load_model(str(tmp_path), backend="hooked", dtype=dtype, device="cpu")
    assert {str(weight.dtype) for weight in model.parameters()} == {f"torch.{dtype}"}
    assert lg.describe(model)["dtype"] == str(model.cfg.dtype).removeprefix("torch.") == dtype
    assert model(IDS).dtype == getattr(torch, dtype)


@hooked_only
def test_a_model_in_bfloat16_keeps_its_bits(tmp_path):
    model = items_model(dtype=torch.bfloat16)
    lg.save_hooked(model, tmp_path)
    assert safetensors.torch.load_file(tmp_path / "hooked.safetensors")["embed.W_E"].dtype == torch.bfloat16
    again = lg.load_model(str(tmp_path), backend="hooked", dtype="bfloat16", device="cpu")
    assert torch.equal(again.W_E, model.W_E)


@hooked_only
@pytest.mark.parametrize("kind", ["moe", "gemma2"])
def test_experts_and_post_norms_come_back_too(tmp_path, kind):
    model = zoo.build(kind, "hooked")
    lg.save_hooked(model, tmp_path)
    again = lg.load_model(str(tmp_path), backend="hooked", dtype="float32", device="cpu")
    ids = zoo.tokens()
    assert torch.equal(again(ids), model(ids))


@hooked_only
def test_a_tokenizer_goes_along(tmp_path):
    model = lg.load_model("tiny-random-llama", backend="hooked", device="cpu")
    lg.save_hooked(model, tmp_path)
    again = lg.load_model(str(tmp_path), backend="hooked", device="cpu")
    assert torch.equal(again("A text."), model("A text."))


@hooked_only
def test_a_trainers_model_that_unembeds_with_its_embedding_is_saved_whole(tmp_path):
    from lens_geometry.training.config import Shape
    from lens_geometry.training.model import build_model

    shape = Shape(n_layers=1, d_model=16, n_heads=2, n_key_value_heads=1, d_mlp=32, d_vocab=20, n_ctx=12, tied=True)
    model = build_model(shape, 0, backend="hooked").eval()
    lg.save_hooked(model, tmp_path)
    assert torch.equal(lg.load_model(str(tmp_path), backend="hooked", device="cpu")(IDS), model(IDS))


@pytest.fixture
def saved(tmp_path):
    lg.save_hooked(items_model(), tmp_path)
    return tmp_path


def change_config(directory, **changes):
    path = directory / "hooked_config.json"
    about = json.loads(path.read_text())
    about["config"] |= changes.pop("config", {})
    path.write_text(json.dumps(about | changes))


def change_weights(directory, **changes):
    path = directory / "hooked.safetensors"
    weights = safetensors.torch.load_file(path) | changes
    safetensors.torch.save_file({name: value for name, value in weights.items() if value is not None}, path)


DAMAGE = [
    (lambda at: change_weights(at, **{"blocks.1.mlp.W_in": None}), "lack 1 tensors, such as blocks.1.mlp.W_in"),
    (lambda at: change_weights(at, stray=torch.ones(2)), "no place for 1 tensors, such as stray"),
    (lambda at: change_weights(at, **{"embed.W_E": torch.ones(19, 16)}), "embed.W_E has the shape (19, 16)"),
    (lambda at: change_weights(at, **{"embed.W_E": torch.ones(20, 16, dtype=torch.int8)}), "no weights"),
    (lambda at: (at / "hooked.safetensors").write_bytes(b"nothing"), "weights cannot be read"),
    (lambda at: (at / "hooked.safetensors").unlink(), "weights cannot be read"),
    (lambda at: (at / "hooked_config.json").write_text("{"), "configuration cannot be read"),
    (lambda at: change_config(at, format=2), "install a newer lens-geometry"),
    (lambda at: change_config(at, config={"d_hedd": 3}), "no setting d_hedd"),
    (lambda at: change_config(at, config={"act_fn": "spiral"}), "does not take this configuration"),
    (lambda at: change_config(at, config={"n_layers": 3}), "lack"),
]  # fmt: skip


@hooked_only
@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[words for _, words in DAMAGE])
def test_damage_is_one_clear_error(saved, damage, words):
    damage(saved)
    with pytest.raises(ModelError) as raised:
        lg.load_model(str(saved), backend="hooked", device="cpu")
    assert words in str(raised.value)
    assert "Cure:" in str(raised.value)


@hooked_only
def test_another_backend_is_refused_with_the_one_that_works(saved):
    with pytest.raises(ModelError, match='backend="hooked"'):
        lg.load_model(str(saved))


def test_only_a_hooked_transformer_is_saved(tmp_path):
    with pytest.raises(ModelError, match="save_pretrained"):
        lg.save_hooked(lg.load_model("tiny-random-gpt2"), tmp_path)
    assert not list(tmp_path.iterdir())


@hooked_only
def test_a_model_under_its_edit_is_not_saved_without_it(tmp_path):
    model = items_model()
    model.__dict__[hooked_files.suppression_of.__globals__["SUPPRESSION"]] = lambda model: {"status": "attached"}
    with pytest.raises(ModelError, match="trained under"):
        lg.save_hooked(model, tmp_path)


@pytest.mark.parametrize("backend", ["bridge", "hooked"])
def test_a_transformer_lens_without_the_class_says_which_one_has_it(tmp_path, monkeypatch, backend):
    (tmp_path / "hooked_config.json").write_text("{}")
    monkeypatch.setattr(hooked_files.loaders, "hooked_class", lambda: None)
    with pytest.raises(ModelError, match=r"install transformer-lens 3\.9"):
        lg.load_model(str(tmp_path), backend=backend)


@hooked_only
def test_how_it_was_compressed_and_on_what_comes_back_and_no_record_is_left_of_another(tmp_path):
    model = items_model()
    sparse = lg.compress.wanda(model, IDS, sparsity=0.5)
    lg.save_hooked(sparse, tmp_path)
    again = lg.load_model(str(tmp_path), backend="hooked", device="cpu")
    assert lg.describe(again)["compression"] == lg.describe(sparse)["compression"]
    tokens = lg.tokenize(again, IDS)
    assert lg.compress.calibration_overlap(again, tokens) == {"known": True, "windows": 2, "shared": 2}
    lg.save_hooked(model, tmp_path)
    assert lg.describe(lg.load_model(str(tmp_path), backend="hooked", device="cpu"))["compression"] is None
