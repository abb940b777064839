"""A study of many variants on a small English model: values, what is kept on disk, what is refused, what is lost."""

import json
import math
import shutil
import sys

import pytest
import torch

from lens_geometry.compress import compress
from lens_geometry.data import load_text, tokenize
from lens_geometry.errors import CompressionError, DataError, ModelError, ResultError
from lens_geometry.experiments.compression import compression_report
from lens_geometry.experiments.compression_study import compression_study
from lens_geometry.experiments.study_variants import default_variants, scaled_writers, study_variants
from lens_geometry.models import load_model

SMALL = {"sites": ("attn", "block"), "replicates": 4, "progress": False}
TEXTS = ("rtn:bits=4,group_size=64", "rtn:bits=2")


@pytest.fixture(scope="module")
def base():
    return load_model("twin-rmsnorm")


@pytest.fixture(scope="module")
def tokens(base):
    return tokenize(base, load_text("austen", max_characters=30_000), sequence_length=32, max_sequences=4)


def broken(base):
    raise RuntimeError("no such kernel")


def with_nan(base):
    made = compress(base, "rtn:bits=8")
    with torch.no_grad():
        made.blocks[2].mlp.W_out.mul_(math.inf)
    return made


def test_each_variant_has_the_numbers_of_its_own_report(base, tokens):
    made = compression_study(base, [*TEXTS, ("mine", compress(base, "rtn:bits=3"))], tokens, **SMALL)
    table = made.table
    assert table["variant"].unique().tolist() == [*TEXTS, "mine"]
    assert table["family"].unique().tolist() == ["quantisation", "mine"]
    for label, text in (("rtn:bits=2", "rtn:bits=2"), ("mine", "rtn:bits=3")):
        report = compression_report(base, compress(base, text), tokens, **SMALL).table
        found = table[table["variant"] == label]
        for metric in ("loss_change", "kl"):
            expected = report[(report["metric"] == metric) & report["layer"].isna()].iloc[0]
            assert set(found[metric]) == {expected["mean"]}
            assert set(found[f"{metric}_high"]) == {expected["ci_high"]}
        expected = report[report["layer"].isna() & (report["metric"] == "perpendicular_error")]
        expected = expected.set_index(["mode", "site"])["mean"]
        values = found[found["predictor"] == "perpendicular_error"].set_index(["mode", "site"])["value"]
        for mode in ("local", "propagated"):
            assert values[mode, "attn"] == expected[mode, "attn"]
            assert values[mode, "pooled"] == pytest.approx((expected[mode, "attn"] + expected[mode, "block"]) / 2)
    rounded = table[table["variant"] == TEXTS[0]]
    assert rounded["bits_per_weight"].iloc[0] == pytest.approx(4.5)
    assert made.meta["counts"] == {"variants": 3, "ok_variants": 3}
    assert made.meta["variants"][0]["compression"]["method"] == "rtn"


def test_writers_made_shorter_err_along_the_update_alone(base, tokens):
    found = compression_study(
        base, [("gain:factor=0.8", lambda model: scaled_writers(model, 0.8)), "rtn:bits=2"], tokens, **SMALL
    ).table
    at = (found["mode"] == "local") & (found["site"] == "attn")
    values = found[at].set_index(["variant", "predictor"])["value"]
    assert values["gain:factor=0.8", "error"] == pytest.approx(0.2, rel=1e-4)
    assert values["gain:factor=0.8", "perpendicular_error"] < 1e-5
    assert values["rtn:bits=2", "perpendicular_error"] > 0.1


def test_a_stopped_study_goes_on_and_functions_are_known_by_the_weights_they_make(base, tokens, tmp_path, monkeypatch):
    labels = []

    def counted(name):
        def make(model):
            labels.append(name)
            return compress(model, name)

        return name + "!", make

    first = compression_study(base, [counted(TEXTS[0])], tokens, out=tmp_path, **SMALL)
    again = compression_study(base, [counted(text) for text in TEXTS], tokens, out=tmp_path, **SMALL)
    assert labels == [TEXTS[0], *TEXTS]
    same = again.table[again.table["variant"] == f"{TEXTS[0]}!"]
    assert same["value"].tolist() == first.table["value"].tolist()
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == [
        "rtn-bits=2",
        "rtn-bits=4,group_size=64",
    ]
    assert json.loads((tmp_path / "rtn-bits=2" / "meta.json").read_text())["experiment"] == "compression"
    (tmp_path / "rtn-bits=2" / "table.parquet").write_bytes(b"PAR1")  # damaged
    with pytest.warns(UserWarning, match="rtn:bits=2! is measured again"):
        repaired = compression_study(base, [counted(text) for text in TEXTS], tokens, out=tmp_path, **SMALL)
    assert repaired.table["value"].tolist() == again.table["value"].tolist()
    other = (f"{TEXTS[1]}!", lambda model: compress(model, "rtn:bits=3"))
    with pytest.raises(ResultError, match="of other weights"):
        compression_study(base, [other], tokens, out=tmp_path, **SMALL)


def test_what_a_text_says_whole_is_not_made_again(base, tokens, tmp_path, monkeypatch):
    first = compression_study(base, TEXTS, tokens, out=tmp_path, **SMALL)
    module = sys.modules["lens_geometry.experiments.study_variants"]
    monkeypatch.setattr(module, "compress", lambda *_: pytest.fail("it was made again"))
    assert compression_study(base, TEXTS, tokens, out=tmp_path, **SMALL).table.equals(first.table)


def test_a_directory_of_another_study_is_refused(base, tokens, tmp_path):
    compression_study(base, TEXTS[:1], tokens, out=tmp_path, **SMALL)
    with pytest.raises(ResultError, match=r"differs in: settings.sites"):
        compression_study(base, TEXTS, tokens, out=tmp_path, **{**SMALL, "sites": ("mlp",)})
    with pytest.raises(ResultError, match="differs in: .*tokens_sha256"):
        compression_study(base, TEXTS, tokens.ids[:2], out=tmp_path, **SMALL)
    with pytest.raises(ResultError, match="model_fingerprint"):
        compression_study(compress(base, "rtn:bits=8"), TEXTS, tokens, out=tmp_path, **SMALL)
    (tmp_path / "study.json").write_text("{")
    with pytest.raises(ResultError, match="cannot be read"):
        compression_study(base, TEXTS, tokens, out=tmp_path, **SMALL)


def test_a_model_in_memory_is_known_by_its_weights(base, tokens, tmp_path):
    compression_study(base, {"mine": compress(base, "rtn:bits=3")}, tokens, out=tmp_path, **SMALL)
    with pytest.raises(ResultError, match="other weights"):
        compression_study(base, {"mine": compress(base, "rtn:bits=4")}, tokens, out=tmp_path, **SMALL)
    shutil.copytree(tmp_path / "mine", tmp_path / "yours")
    with pytest.raises(ResultError, match="another variant than 'yours'"):
        compression_study(base, {"yours": "twin-layernorm"}, tokens, out=tmp_path, **SMALL)


def test_a_variant_that_fails_is_a_row_with_its_reason(base, tokens):
    with pytest.warns(UserWarning, match="(bad|worse) is left out"):
        made = compression_study(base, ["rtn:bits=4", ("bad", broken), ("worse", with_nan)], tokens, **SMALL)
    rows = made.table.drop_duplicates("variant").set_index("variant")
    assert rows["status"].to_dict() == {
        "rtn:bits=4": "ok",
        "bad": "failed",
        "worse": made.meta["variants"][2]["status"],
    }
    assert rows.loc["worse", "status"] in ("nonfinite", "failed")
    assert rows.loc["bad", "reason"] == "RuntimeError: no such kernel"
    assert math.isnan(rows.loc["bad", "loss_change"])
    assert made.meta["counts"]["failed_variants"] == 2
    assert any("bad is left out" in line for line in made.meta["warnings"])
    with (
        pytest.raises(ModelError, match="no variant could be measured .bad.*no such kernel"),
        pytest.warns(UserWarning, match="bad is left out"),
    ):
        compression_study(base, [("bad", broken)], tokens, **SMALL)


def test_calibration_text_is_never_the_text_that_is_evaluated(base, tokens):
    settings = {**SMALL, "sequence_length": 8}
    words = "It is a truth universally acknowledged that a single man must be in want of a wife. " * 2
    with pytest.raises(DataError, match="the calibration text is the text that is evaluated"):
        compression_study(base, TEXTS, words, calibration=words, **settings)
    with pytest.raises(DataError, match="2 passages of 32 tokens of the calibration text are in the text"):
        compression_study(base, TEXTS, tokens, calibration=tokens.ids[2:], **settings)


def test_variants_that_are_none_are_refused(base, tokens):
    with pytest.raises(CompressionError, match="no method"):
        compression_study(base, ["round:bits=4"], tokens, **SMALL)
    for wrong, words in (
        ("rtn:bits=4", "give several"),
        ([], "give several"),
        ([3], "no variant"),
        ([("mine", 3)], "is a int"),
        (["rtn:bits=4", "rtn:bits=4"], "label 'rtn:bits=4' is that of two"),
        ({"a:b": "x", "a/b": "y"}, "directory 'a-b' is that of two"),
    ):
        with pytest.raises(DataError, match=words):
            study_variants(wrong, 6)


def test_the_default_variants_are_of_many_kinds():
    found = default_variants(30)
    assert len({one.directory for one in found}) == len(found) >= 20
    assert {"quantisation", "pruning", "depth", "gain"} <= {one.family for one in found}
    assert sum(one.label.startswith("blank") for one in found) == 5
    assert len(default_variants(1)) < len(found)
