"""Loading by name and path, what a loaded model is, and one clear error for everything that goes wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import torch
import transformers
import zoo

from lens_geometry import cache, models
from lens_geometry.bundled import bundled_directory
from lens_geometry.errors import ModelError

BUNDLED = ("tiny-random-llama", "tiny-random-gpt2", "tiny-random-neox")
BACKENDS = ("bridge", "hooked") if zoo.MAJOR < 4 else ("bridge",)
TOKENS = torch.arange(20, 60)[None]


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv("LENS_GEOMETRY_CACHE", str(path))
        yield path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A copy of a bundled model's directory, to be damaged."""
    models.load_model("tiny-random-llama")
    directory = next(cache.models_directory().glob("tiny-random-llama-*[0-9a-f]"))
    return Path(shutil.copytree(directory, tmp_path / "saved"))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() < 5e-5 * b.abs().max())


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ---- what is loaded --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_models_compute_what_hugging_face_computes(name: str) -> None:
    model = models.load_model(name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(models.describe(model)["path"])
    with torch.no_grad():
        assert close(model(TOKENS), reference(TOKENS).logits)
    assert not model.training


@pytest.mark.skipif(zoo.MAJOR > 3, reason="TransformerLens 4 has no HookedTransformer")
def test_hooked_llama_computes_what_hugging_face_computes() -> None:
    model = models.load_model("tiny-random-llama", backend="hooked")
    assert type(model).__name__ == "HookedTransformer"
    reference = transformers.AutoModelForCausalLM.from_pretrained(models.describe(model)["path"])
    with torch.no_grad():
        assert close(model(TOKENS), reference(TOKENS).logits)
    assert not model.training


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_models_are_not_degenerate(name: str) -> None:
    model = models.load_model(name)
    with torch.no_grad():
        _, seen = model.run_with_cache(TOKENS)
    for layer in range(model.cfg.n_layers):
        pattern = seen[f"blocks.{layer}.attn.hook_pattern"][0, :, -1]  # of the last token, per head
        assert pattern.max(dim=-1).values.median() > 2 / TOKENS.shape[1]  # far from uniform
        for update in ("hook_attn_out", "hook_mlp_out"):
            size = seen[f"blocks.{layer}.{update}"].norm(dim=-1) / seen[f"blocks.{layer}.hook_resid_pre"].norm(dim=-1)
            assert 0.05 < size.median() < 5


def test_bundled_models_are_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = models.fingerprint(models.load_model("tiny-random-neox"))
    monkeypatch.setenv("LENS_GEOMETRY_CACHE", str(tmp_path))
    torch.manual_seed(123)
    assert models.fingerprint(models.load_model("tiny-random-neox")) == here


@pytest.mark.parametrize("backend", BACKENDS)
def test_loading_leaves_the_random_state_alone(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LENS_GEOMETRY_CACHE", str(tmp_path))
    before = torch.random.get_rng_state()
    models.load_model("tiny-random-llama", backend=backend)
    assert torch.equal(before, torch.random.get_rng_state())


def test_byte_tokenizer_knows_every_text() -> None:
    tokenizer = models.load_model("tiny-random-gpt2").tokenizer
    text = "Añ\t 1234 日本\n\x00end"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtype_is_that_of_weights_and_logits(dtype: str, backend: str) -> None:
    model = models.load_model("tiny-random-llama", backend=backend, dtype=dtype)
    assert models.describe(model)["dtype"] == dtype
    assert model(TOKENS).dtype == models.DTYPES[dtype]


def test_a_gguf_is_loaded_with_its_own_policy_on_bos(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "small.gguf")
    model = models.load_model(str(path))
    about = models.describe(model)
    assert (about["name"], about["source"], about["n_layers"]) == (str(path), str(path), 2)
    assert about["source_sha256"] == cache.sha256_of(path)
    assert about["default_prepend_bos"] is False
    assert model.to_tokens("te").tolist() == [[3 + 256 + 4]]
    listed = models.known_models(timeout=0.1).set_index("name")
    assert listed["kind"].str.match("cached").any()


def test_a_directory_without_tokenizer_loads_without(saved: Path) -> None:
    for file in saved.glob("token*"):
        file.unlink()
    model = models.load_model(str(saved))
    assert model.tokenizer is None
    assert models.describe(model)["tokenizer"] is None
    with torch.no_grad():
        assert torch.equal(model(TOKENS), models.load_model("tiny-random-llama")(TOKENS))


def test_a_directory_whose_name_misleads_transformer_lens_loads(saved: Path) -> None:
    """TransformerLens 3 takes any path with "gemma" in it for a Gemma."""
    misleading = saved.rename(saved.with_name("gemma-2-llama"))
    for backend in BACKENDS:
        assert models.describe(models.load_model(str(misleading), backend=backend))["n_key_value_heads"] == 2


# ---- what goes wrong -------------------------------------------------------------------------------------


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated weights": (truncate, "weights file is damaged"),
    "empty weights": (lambda d: (d / "model.safetensors").write_bytes(b""), "weights file is damaged"),
    "garbage": (lambda d: (d / "model.safetensors").write_bytes(os.urandom(999)), "weights file is damaged"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "incomplete or damaged"),
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "bad config": (lambda d: (d / "config.json").write_text('{"a":'), "incomplete or damaged"),
    "unknown architecture": (lambda d: edit_config(d, model_type="frob"), "architecture is not supported"),
    "another width": (lambda d: edit_config(d, hidden_size=32), "do not fit config.json"),
    "too few layers": (lambda d: edit_config(d, num_hidden_layers=5), "the weights lack 9 tensors"),
    "bad tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_directory_is_one_clear_error(kind: str, saved: Path) -> None:
    damage, message = DAMAGE[kind]
    damage(saved)
    with pytest.raises(ModelError, match=rf"{message}.*\[{saved}\]\. Cure: ") as caught:
        models.load_model(str(saved))
    assert "\n" not in str(caught.value)


def test_weights_that_the_configuration_leaves_out_are_warned_of(saved: Path) -> None:
    edit_config(saved, num_hidden_layers=3)
    with pytest.warns(UserWarning, match="no place for 9 tensors"):
        models.load_model(str(saved))


def test_an_architecture_without_adapter_is_one_clear_error(tmp_path: Path) -> None:
    config = transformers.CTRLConfig(n_layer=1, n_embd=16, n_head=2, dff=16, vocab_size=20)
    transformers.CTRLLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"not supported .*CTRLLMHeadModel.*list_supported_models"):
        models.load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["", "./nowhere", "/nowhere/x.gguf", "nowhere.gguf", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        models.load_model(name)


def test_other_unusable_requests_name_the_cure(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    (tmp_path / "x.gguf").write_bytes(b"x")
    for settings, message in (
        ({"name": str(tmp_path / "model.bin")}, "this file is no model"),
        ({"name": str(tmp_path)}, r"no config\.json.*Cure: give the file .*x\.gguf"),
        ({"name": "tiny-random-llama", "backend": "jax"}, "unknown backend"),
        ({"name": "tiny-random-llama", "dtype": "int8"}, "unknown dtype.*bfloat16"),
        ({"name": "tiny-random-llama", "revision": "main"}, "has no revisions"),
        ({"name": "tiny-random-gpt2", "backend": "hooked"}, 'Cure: backend="bridge"'),
    ):
        with pytest.raises(ModelError, match=message):
            models.load_model(**settings)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_cuda_device_is_said() -> None:
    with pytest.raises(ModelError, match="no CUDA device"):
        models.load_model("tiny-random-llama", device="cuda")


def test_require_model_says_how_to_make_one() -> None:
    for backend in BACKENDS:
        models.require_model(models.load_model("tiny-random-llama", backend=backend))
    hf_model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=8, num_attention_heads=1, num_hidden_layers=1, intermediate_size=8, vocab_size=8
        )
    )
    for thing, message in (
        (hf_model, r"boot_transformers\(name, hf_model=model"),
        ("gpt2", r'load_model\("gpt2"\)'),
        (None, "NoneType is no TransformerLens model"),
        (torch.nn.Linear(2, 2), "Linear is no TransformerLens model"),
    ):
        with pytest.raises(ModelError, match=message):
            models.require_model(thing)


@pytest.mark.parametrize("thing", [None, 7, torch.nn.Linear(1, 1)])
def test_what_is_no_name_is_refused_with_the_way_to_use_a_model_that_is_there(thing: object) -> None:
    with pytest.raises(ModelError, match="takes a name or a path"):
        models.load_model(thing)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["twin-layernorm", "twin-rmsnorm"])
def test_a_twin_knows_english_and_is_what_its_record_says(name: str) -> None:
    model = models.load_model(name)
    loss = model(
        "The whale was seen from the deck, and the captain ordered the boats to be lowered into the sea.",
        return_type="loss",
        prepend_bos=False,
    )
    assert loss.item() < 5.0  # guessing is ln 2048 = 7.6
    about = models.describe(model)
    assert about["normalization_type"].startswith("LN" if name == "twin-layernorm" else "RMS")
    assert about["source_sha256"] is not None
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) < 2_900_000
    size = sum(file.stat().st_size for file in bundled_directory(name).iterdir())
    assert size < 12_000_000


def test_the_twins_differ_in_their_norm_alone() -> None:
    places = [bundled_directory(name) for name in ("twin-layernorm", "twin-rmsnorm")]
    one, other = (json.loads((place / "training.json").read_text()) for place in places)
    assert one["config"].pop("shape") == {**other["config"].pop("shape"), "norm": "LN"}
    for record in (one, other):
        record["config"].pop("out")
    assert one["config"] == other["config"]
    assert one["tokens_sha256"] == other["tokens_sha256"]
    assert (places[0] / "tokenizer.json").read_bytes() == (places[1] / "tokenizer.json").read_bytes()
