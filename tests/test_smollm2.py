"""The real model, SmolLM2-135M, as it comes out of its package; the first run downloads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import zoo

from lens_geometry import fetch, models
from lens_geometry.data import load_text, tokenize
from lens_geometry.edits import Batch, applied, diagonal, scale
from lens_geometry.errors import ModelError
from lens_geometry.experiments import continuations, mlp_sweep, profile, scaling_sweep
from lens_geometry.metrics import sequence_losses

pytestmark = pytest.mark.slow
BACKENDS = ("bridge", "hooked") if zoo.MAJOR < 4 else ("bridge",)
PROSE = (
    "It was the best of times, and the village had gathered early in the morning to see the old bridge "
    "opened again. The river had risen twice during the winter, and each time the stones at the far end had "
    "moved a little. Nobody in the council wanted to spend the money, until the schoolmaster's cart went "
    "into the water with all of its books. After that the vote was quick."
)


@pytest.fixture(scope="module")
def directory() -> Path:
    """From the user's own cache, or from the index; skipped, with the reason, where neither has it."""
    try:
        return fetch.smollm2_directory()
    except ModelError as error:
        pytest.skip(f"SmolLM2-135M is neither cached nor can it be fetched: {error}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_smollm2_computes_what_hugging_face_computes(backend: str, directory: Path) -> None:
    model = models.load_model("smollm2-135m", backend=backend)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        tokens = model.to_tokens(PROSE)
        logits, loss = model(tokens, return_type="both")
        expected = reference(tokens).logits
    assert (logits - expected).abs().max() < 5e-5 * expected.abs().max()
    assert tokens[0, 0] != model.tokenizer.bos_token_id
    assert 3 < loss < 4.2


@pytest.mark.parametrize("backend", BACKENDS)
def test_removing_the_perpendicular_part_is_far_worse_at_every_site(backend: str, directory: Path) -> None:
    model = models.load_model("smollm2-135m", backend=backend)
    grid = {"parallel": (0.0,), "perpendicular": (0.0,), "controls": (), "progress": False}
    table = scaling_sweep(model, load_text("austen"), max_sequences=2, sequence_length=64, **grid).table
    change = table.set_index(["site", "component", "scale"])["loss_change"]
    for site in ("attn", "mlp", "value", "value_excl_self"):
        assert change[site, "parallel", 1.0] == 0.0
        assert change[site, "perpendicular", 0.0] > 4 * change[site, "parallel", 0.0] > 0.5
    assert change["value", "parallel", 0.0] > change["value_excl_self", "parallel", 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_inside_the_mlp_the_last_slice_is_padded_and_directions_matter_too(backend: str, directory: Path) -> None:
    model = models.load_model("smollm2-135m", backend=backend)
    grid = {"parallel": (0.0,), "perpendicular": (0.0,), "controls": (), "progress": False}
    sizes = {"max_sequences": 2, "sequence_length": 64, "references": ("normalised", "stream")}
    result = mlp_sweep(model, load_text("austen"), **sizes, **grid)
    assert result.meta["slices"] == {"d_mlp": 1536, "width": 576, "count": 3, "last_width": 384}
    change = result.table.set_index(["site", "component", "scale"])["loss_change"]
    for site in ("mlp", "mlp_carrier", "mlp_carrier_stream", "mlp_contribution"):
        assert change[site, "parallel", 1.0] == 0.0
        assert change[site, "perpendicular", 0.0] > 4 * abs(change[site, "parallel", 0.0])


@pytest.mark.skipif(zoo.MAJOR > 3, reason="TransformerLens 4 has no HookedTransformer")
def test_both_classes_give_the_same_profile_and_the_same_edited_loss(directory: Path) -> None:
    ids = None
    profiles, losses = [], []
    for backend in BACKENDS:
        model = models.load_model("smollm2-135m", backend=backend)
        ids = tokenize(model, load_text("austen"), max_sequences=2, sequence_length=64).ids if ids is None else ids
        profiles.append(profile(model, ids, progress=False).table)
        with torch.no_grad(), applied(model, scale(model, "value_excl_self", parallel=0.0)):
            losses.append(float(model(ids, return_type="loss")))
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    assert np.allclose(profiles[0]["mean"], profiles[1]["mean"], rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_edited_generation_is_the_same_with_and_without_the_cache(backend: str, directory: Path) -> None:
    model = models.load_model("smollm2-135m", backend=backend)
    tables = [
        continuations(
            model,
            ["The capital of France is", "Call me Ishmael. Some years ago,"],
            sites=("value_excl_self", "attn"),
            parallel=(0.0,),
            when=("always", "prompt", "new"),
            max_new_tokens=12,
            use_past_kv_cache=cached,
            progress=False,
        )
        for cached in (True, False)
    ]
    assert [result.meta["kv_cache"] for result in tables] == [True, False]
    cached, whole = (result.table for result in tables)
    assert cached["token_ids"].tolist() == whole["token_ids"].tolist()
    assert "Paris" in cached["text"].iloc[0]
    edited = cached[cached["site"] != "none"]
    assert (edited["n_agree"] < 12).any()
    ids = model.tokenizer("The capital of France is", return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad(), applied(model, scale(model, "attn", parallel=0.0, when="new", batch=Batch(prompt_length=3))):
        later = model(ids, return_type="logits")
    with torch.no_grad():
        assert torch.equal(later[:, :3], model(ids, return_type="logits")[:, :3])


def test_smollm2_tokenizer_is_the_real_one(directory: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    for text in (PROSE, "a  b\n\n\tc 0.5 ▁ é 日本 \u200b", "<|im_start|>user\nHi 42<|im_end|>"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert "SmolLM" in tokenizer.chat_template


def test_repeated_random_tokens_are_known_by_induction_and_shuffled_prose_is_not_known(directory: Path) -> None:
    model = models.load_model("smollm2-135m")
    loss, first_half = {}, 0.0
    for name in ("austen", "python", "shuffled:austen", "repeated-random"):
        tokens = tokenize(model, load_text(name), max_sequences=2, sequence_length=64)
        found = sequence_losses(model, tokens.ids, tokens.mask, tokens.scored)
        loss[name] = found.sums.sum() / found.counts.sum()
        if tokens.scored is not None:
            unrepeated = sequence_losses(model, tokens.ids, tokens.mask, ~tokens.scored)
            first_half = unrepeated.sums.sum() / unrepeated.counts.sum()
    assert first_half > 12, "random tokens are less likely than guessing, ln 49152 = 10.8 nats, would have them"
    assert loss["repeated-random"] < first_half - 8, "nats that the repeat is easier: 10.7 when this was written"
    assert loss["shuffled:austen"] > loss["austen"] + 2, "nats that word order is worth: 3.1 when this was written"
    assert loss["python"] < loss["austen"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_diagonal_form_gives_the_logits_of_the_edit_of_z(backend: str, directory: Path) -> None:
    model = models.load_model("smollm2-135m", backend=backend)
    ids = tokenize(model, load_text("austen"), max_sequences=2, sequence_length=64).ids
    for site in ("value", "value_excl_self"):
        found = []
        for edit in (diagonal, scale):
            with torch.no_grad(), applied(model, edit(model, site, parallel=0.5)):
                found.append(model(ids, return_type="logits"))
        by_map, by_hook = found
        assert (by_map - by_hook).abs().max() < 1e-5 * (by_hook.max() - by_hook.min())


def test_on_the_real_model_the_scalar_constraint_of_attn_is_met(directory: Path) -> None:
    model = models.load_model("smollm2-135m")
    ids = tokenize(model, load_text("austen"), max_sequences=2, sequence_length=64).ids
    kept: dict[str, torch.Tensor] = {}
    keep = [
        (name, lambda tensor, hook, name=name: kept.update({name: tensor.double()}))
        for name in ("blocks.12.hook_resid_pre", "blocks.12.hook_attn_out")
    ]
    with torch.no_grad(), applied(model, [*diagonal(model, "attn", parallel=0.0, layers=12), *keep]):
        model(ids, return_type="logits")
    before, added = kept.values()
    assert ((before * added).sum(-1).abs() <= 1e-6 * before.norm(dim=-1) * added.norm(dim=-1)).all()
