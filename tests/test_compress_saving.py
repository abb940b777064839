"""A compressed model on disk, under the edit that it was trained with, and the command that makes one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
import zoo

import lens_geometry as lg
from lens_geometry import cli, compress, loaders
from lens_geometry.edits.suppressing import Suppression
from lens_geometry.errors import CompressionError, ModelError, ResultError
from lens_geometry.provenance import describe
from lens_geometry.suppressed import write_suppression

BACKENDS = ["bridge"] if loaders.hooked_class() is None else ["bridge", "hooked"]
IDS = torch.arange(2, 26).reshape(2, 12)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("twin-rmsnorm", BACKENDS[-1]),
        pytest.param("twin-rmsnorm", "bridge", marks=pytest.mark.slow),
        *(pytest.param("twin-layernorm", backend, marks=pytest.mark.slow) for backend in BACKENDS),
    ],
)
def test_what_is_saved_is_loaded_again_in_either_class_and_by_plain_transformers(name, backend, tmp_path):
    model = lg.load_model(name, backend=backend)
    small = compress.wanda(model, torch.arange(400).reshape(4, 100), pattern="2:4")
    where = compress.save_compressed(small, tmp_path / "small")
    expected = small(IDS).detach()
    plain = transformers.AutoModelForCausalLM.from_pretrained(where)
    torch.testing.assert_close(plain(IDS).logits.detach(), expected, rtol=1e-4, atol=1e-4)
    for other in BACKENDS:
        again = lg.load_model(str(where), backend=other)
        torch.testing.assert_close(again(IDS).detach(), expected, rtol=1e-4, atol=1e-4)
        assert describe(again)["compression"] == describe(small)["compression"]
        assert again.cfg.default_prepend_bos == model.cfg.default_prepend_bos
        assert compress.calibration_overlap(again, lg.tokenize(again, torch.arange(50, 90)[None]))["shared"] == 9
        both = describe(compress.round_to_nearest(again, bits=4, group_size=64))["compression"]
        assert both["bits_per_weight"] == pytest.approx(0.5 * 4 + 1 + 0.5)
    same = lg.load_model(str(where), backend=backend)
    assert torch.equal(same(IDS), expected)
    compress.save_compressed(small, where)  # replaces what it wrote


def test_a_shorter_model_is_saved_too(tmp_path):
    small = compress.drop_layers(lg.load_model("tiny-random-gpt2"), [1])
    again = lg.load_model(str(compress.save_compressed(small, tmp_path / "short")))
    assert again.cfg.n_layers == 3
    assert torch.equal(again(IDS), small(IDS))


def test_what_cannot_be_saved_or_read_is_said(tmp_path):
    model = lg.load_model("tiny-random-llama")
    with pytest.raises(CompressionError, match="was not compressed"):
        compress.save_compressed(model, tmp_path / "a")
    small = compress.magnitude(model)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    with pytest.raises(ResultError, match="something else"):
        compress.save_compressed(small, tmp_path / "full")
    assert (tmp_path / "full" / "thesis.txt").exists()
    with pytest.raises(ModelError, match="no Hugging Face form"):
        compress.save_compressed(compress.magnitude(zoo.build("gpt2", "native")), tmp_path / "b")
    where = compress.save_compressed(small, tmp_path / "c")
    (where / "compression.json").write_text('{"format": 1}')
    with pytest.raises(ModelError, match="compressed cannot be read"):
        lg.load_model(str(where))
    if "hooked" in BACKENDS:
        with pytest.raises(ModelError, match="no Llama"):
            compress.save_compressed(compress.magnitude(zoo.build("gpt2", "hooked")), tmp_path / "d")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_was_trained_under_a_suppression_stays_under_it(backend, tmp_path):
    source = Path(describe(lg.load_model("tiny-random-llama"))["path"])
    shutil.copytree(source, tmp_path / "trained")
    write_suppression(tmp_path / "trained", Suppression(site="value", parallel=0.5), 0.5)
    model = lg.load_model(str(tmp_path / "trained"), backend=backend)
    bare = lg.load_model(str(tmp_path / "trained"), backend=backend, without_suppression=True)
    small, naked = compress.round_to_nearest(model, bits=8), compress.round_to_nearest(bare, bits=8)
    assert describe(small)["suppression"]["status"] == "attached"
    assert describe(naked)["suppression"]["status"] == "left out"
    with torch.no_grad():
        change, difference = small(IDS) - model(IDS), small(IDS) - naked(IDS)
    assert float(change.norm()) < 0.2 * float(difference.norm())
    with pytest.raises(CompressionError, match="suppression"):
        compress.wanda(model, IDS)
    again = lg.load_model(str(compress.save_compressed(small, tmp_path / "small")), backend=backend)
    assert describe(again)["suppression"]["status"] == "attached"
    torch.testing.assert_close(again(IDS), small(IDS), rtol=1e-5, atol=1e-5)


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_command_saves_a_model_and_says_what_changed(capsys, tmp_path):
    tiny = ["compress", "--model", "tiny-random-llama", "--out", tmp_path / "small"]
    code, out, _ = run(capsys, *tiny, "--variant", "rtn:bits=4,group_size=32")
    assert code == 0
    assert "bits per weight of the blocks: 5.00 (16 dense)" in out
    assert "of their norm" in out
    record = json.loads((tmp_path / "small" / "compression.json").read_text())["record"]
    assert record["settings"] == {"bits": 4, "group_size": 32, "symmetric": False}
    few = ["--calibration", "moby-dick", "--calibration-sequences", 4, "--calibration-length", 64]
    code, out, _ = run(capsys, *tiny, "--variant", "wanda:pattern=2:4", *few)
    assert code == 0
    assert "calibrated on 256 tokens of moby-dick" in out
    for arguments, words in (
        (["--variant", "wanda"], "needs a calibration text"),
        (["--variant", "rtn", "--calibration", "austen"], "does without"),
        (["--variant", "rnt"], "no method"),
        (["--variant", "drop:layers=77"], "layers 0 to 3"),
    ):
        code, _, err = run(capsys, *tiny, *arguments)
        assert code == 2
        assert words in err
        assert "Traceback" not in err
