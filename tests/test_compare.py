"""The command `compare`: files, exit codes, models without a tokenizer, and models over items."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import transformers
import zoo
from compression_tables import changed

import lens_geometry as lg
from lens_geometry import cli, compare_commands, compress
from lens_geometry.bundled import bundled_directory
from lens_geometry.results import Result

SMALL = ["--sequence-length", 16, "--max-sequences", 3, "--no-progress", "--replicates", 20]
FILES = {"table.parquet", "table.csv", "meta.json", "figure.html"}
hooked_only = pytest.mark.skipif(zoo.MAJOR > 3, reason="TransformerLens 4 has no HookedTransformer")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENS_GEOMETRY_CACHE", str(tmp_path_factory.getbasetemp() / "cli-cache"))
        yield


@pytest.fixture(scope="module")
def rounded(tmp_path_factory) -> Path:
    """tiny-random-llama with weights of three bits, as a directory that anyone may have made."""
    base = bundled_directory("tiny-random-llama")
    model = compress.round_to_nearest(transformers.AutoModelForCausalLM.from_pretrained(base), bits=3)
    directory = tmp_path_factory.mktemp("models") / "rounded"
    model.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(directory)
    (directory.parent / "text.txt").write_text("It is a truth universally acknowledged, that a single man. " * 4)
    return directory


def on_text(rounded: Path) -> list[object]:
    """The options that read a short text: the bundled ones take longer to tokenise than to compare."""
    return [*SMALL, "--text", rounded.parent / "text.txt"]


def run(capsys, *arguments):
    code = cli.main(["compare", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_bound_fails_with_the_layers_named_and_every_file_written(capsys, tmp_path, rounded):
    json_path, markdown = tmp_path / "made" / "report.json", tmp_path / "summary.md"
    arguments = [
        "tiny-random-llama",
        rounded,
        *on_text(rounded),
        "--out",
        tmp_path / "out",
        "--json",
        json_path,
        "--markdown",
        markdown,
    ]
    code, out, _ = run(capsys, *arguments, "--max-perpendicular", 0.01, "--max-loss-change", 5)
    assert code == 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    result = Result.load(tmp_path / "out")
    rows = result.table.query("mode == 'local' and metric == 'perpendicular_error'")
    rows = rows[rows["layer"].notna() & rows["head"].isna()]
    assert (rows["mean"] > 0.01).all()
    assert f"{len(rows)} of {len(rows) + 1} numbers are not within" in out
    for row in rows.itertuples():
        assert f"  {row.site}, layer {row.layer} (local): |e_perp|/|u| is " in out
    assert "bound 0.01" in out
    assert "mlp, propagated" in lg.write_report([result], tmp_path / "report.html").read_text()
    document = json.loads(json_path.read_text())
    assert (document["verdict"], len(document["offending"])) == ("failed", len(rows))
    assert markdown.read_text().startswith("**❌ Compression error: failed**")
    code, out, _ = run(capsys, *arguments, "--max-perpendicular", float(rows["mean"].max()) + 1e-6)
    assert code == 0
    assert f"passed: {len(rows)} numbers within" in out
    assert json.loads(json_path.read_text())["verdict"] == "passed"
    assert markdown.read_text().startswith("**✅ Compression error: passed**")


def test_files_that_would_be_written_over_each_other_are_refused(capsys, tmp_path, rounded):
    for more in (["--json", tmp_path / "x", "--markdown", tmp_path / "x"], ["--json", tmp_path / "meta.json"]):
        code, _, error = run(capsys, "tiny-random-llama", rounded, *on_text(rounded), "--out", tmp_path, *more)
        assert code == 2
        assert "two files would be written to one path" in error


def test_without_a_bound_it_measures_and_ends_with_0(capsys, tmp_path, rounded):
    few = ["--modes", "local", "--sites", "mlp", "--out", tmp_path]
    code, out, _ = run(capsys, "tiny-random-llama", rounded, *on_text(rounded), *few)
    assert code == 0
    assert "worst layer" in out
    assert "failed" not in out
    assert "take note: whether the compressed model was calibrated on this text is not known" in out
    assert set(Result.load(tmp_path).table["site"]) == {"mlp", ""}


@pytest.mark.parametrize(
    ("where", "option"),
    [
        ({"mode": "local", "site": "mlp", "layer": 2, "metric": "perpendicular_error"}, "--max-perpendicular"),
        ({"mode": "propagated", "site": "", "layer": None, "metric": "loss_change"}, "--max-loss-change"),
    ],
)
def test_a_gated_number_that_is_not_finite_fails_after_the_files_are_written(
    capsys, tmp_path, rounded, monkeypatch, where, option
):
    real = compare_commands.compression_report

    def broken(*arguments):
        result = real(*arguments)
        return Result(result.experiment, changed(result.table, where, mean=float("nan")), result.meta)

    monkeypatch.setattr(compare_commands, "compression_report", broken)
    report = tmp_path / "report.json"
    code, out, _ = run(
        capsys,
        "tiny-random-llama",
        rounded,
        *on_text(rounded),
        "--sites",
        "mlp",
        "--out",
        tmp_path,
        option,
        9,
        "--json",
        report,
    )
    assert code == 1
    assert "is not finite" in out
    assert {path.name for path in tmp_path.iterdir()} >= FILES
    assert json.loads(report.read_text())["offending"][0]["value"] is None


def test_several_models_get_a_directory_each_and_a_table_side_by_side(capsys, tmp_path, rounded):
    few = ["--sites", "mlp", "--modes", "local", "--out", tmp_path, "--markdown", tmp_path / "all.md"]
    names = [rounded, rounded, "tiny-random-llama"]
    code, out, _ = run(capsys, "tiny-random-llama", *names, *on_text(rounded), *few, "--max-perpendicular", 0.05)
    assert code == 1
    assert {path.name for path in tmp_path.iterdir()} == {"rounded", "rounded-2", "tiny-random-llama", "all.md"}
    assert [line.split()[-1] for line in out.splitlines() if line.strip().endswith(("failed", "passed"))][-3:] == [
        "failed", "failed", "passed",
    ]  # fmt: skip
    assert f"{rounded}: failed" in out
    assert "tiny-random-llama: passed" in out
    assert "2 of 3 models are over a bound" in (tmp_path / "all.md").read_text()


def test_the_step_summary_of_github_is_added_to(capsys, tmp_path, rounded, monkeypatch):
    summary = tmp_path / "step.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    few = ["--sites", "mlp", "--modes", "local", "--out", tmp_path / "out"]
    own = tmp_path / "own.md"
    own.write_text("before\n")
    assert run(capsys, "tiny-random-llama", rounded, *on_text(rounded), *few, "--markdown", own, summary)[0] == 0
    assert summary.read_text() == "before\n" + own.read_text()
    assert own.read_text().startswith("**📏 Compression error")


BAD = [
    (["tiny-random-llama", "ROUNDED", "--modes", "local", *["--gate-mode", "propagated", "--max-perpendicular", "1"]],
     "gate nothing"),
    (["tiny-random-llama", "ROUNDED", "--gate-mode", "local", "--max-loss-change", 1], "no bound is given on it"),
    (["tiny-random-llama", "ROUNDED", "--max-perpendicular", -1], "max_perpendicular is -1"),
    (["tiny-random-llama", "ROUNDED", "--max-loss-change", "nan"], "max_loss_change is nan"),
    (["tiny-random-llama", "ROUNDED", "--text", "austen", "--tokens", "ids.npy"], "both --text and --tokens"),
    (["tiny-random-llama", "ROUNDED", "--tokens", "ids.npy"], "no such file"),
    (["tiny-random-llama", "ROUNDED", "--tokens", "ids.npy", "--prepend-bos"], "without a BOS"),
    (["tiny-random-llama", "tiny-random-gpt2"], "Cure:"),
    (["tiny-random-llama", "nowhere/at/all"], "no such file"),
    (["tiny-random-llama", "ROUNDED", "--json", "/proc/nowhere/r.json"], "cannot be written"),
    (["tiny-random-llama", "ROUNDED", "--markdown", "."], "cannot be written"),
    (["tiny-random-llama", "ROUNDED", "--revision", "main"], "no revisions"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, rounded, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *[rounded if word == "ROUNDED" else word for word in arguments], *SMALL)
    assert code == 2
    (message,) = [line for line in err.splitlines() if line.startswith("lens-geometry: ")]
    assert words in message
    assert "Cure:" in message
    assert "Traceback" not in err


@pytest.mark.parametrize("names", [[], ["tiny-random-llama"]])
def test_a_command_without_two_models_ends_with_2(capsys, names):
    try:
        code = cli.main(["compare", *names])
    except SystemExit as ended:
        code = ended.code
    assert code == 2


def test_a_revision_is_that_of_models_from_the_hub_alone(rounded):
    how = compare_commands.HowLoaded(revision="v1", dtype="float64")
    loads = compare_commands._loaders(how, "some/model", [str(rounded), "twin-rmsnorm"])
    assert loads["some/model"].revision == "v1"
    assert loads[str(rounded)].revision is None
    assert loads["twin-rmsnorm"].dtype == "float64"


def test_token_ids_stand_for_text(capsys, tmp_path, rounded):
    ids = np.random.default_rng(0).integers(0, 259, (5, 12))
    np.save(tmp_path / "ids.npy", ids)
    few = ["--sites", "mlp", "--out", tmp_path / "out", "--tokens", tmp_path / "ids.npy"]
    assert run(capsys, "tiny-random-llama", rounded, *SMALL, *few)[0] == 0
    data = Result.load(tmp_path / "out").meta["data"]
    assert (data["n_sequences"], data["sequences_available"], data["text"]) == (3, 5, "ids.npy")
    np.save(tmp_path / "ids.npy", ids + 1000)
    code, _, err = run(capsys, "tiny-random-llama", rounded, *SMALL, *few)
    assert (code, "outside the model's vocabulary of 259, in 5 of 5" in err) == (2, True)


# ---- a model over items: no language, no tokenizer -----------------------------------------------------------


@pytest.fixture(scope="module")
def sessions(tmp_path_factory) -> Path:
    """What people looked at, one session a line, of items 0 to 39."""
    draw = np.random.default_rng(1)
    path = tmp_path_factory.mktemp("items") / "sessions.jsonl"
    path.write_text("\n".join(json.dumps(draw.integers(0, 40, n).tolist()) for n in draw.integers(4, 12, 8)))
    return path


def items_model(**changes):
    import transformer_lens

    settings = dict(n_layers=2, d_model=32, d_head=8, n_heads=4, n_ctx=12, d_vocab=40, act_fn="gelu", seed=0)
    with zoo.quiet():
        model = transformer_lens.HookedTransformer(transformer_lens.HookedTransformerConfig(**{**settings, **changes}))
    zoo.fill(model)
    return model.eval()


@hooked_only
@pytest.mark.parametrize("positions", ["standard", "rotary"])
def test_a_model_over_items_goes_from_its_own_files_through_the_gate(capsys, tmp_path, sessions, positions):
    more = {"rotary_dim": 8} if positions == "rotary" else {}
    model = items_model(positional_embedding_type=positions, **more)
    lg.save_hooked(model, tmp_path / "base")
    lg.save_hooked(compress.round_to_nearest(model, bits=3), tmp_path / "rounded")
    arguments = [
        tmp_path / "base",
        tmp_path / "rounded",
        "--backend",
        "hooked",
        "--device",
        "cpu",
        "--tokens",
        sessions,
    ]
    arguments += ["--out", tmp_path / "out", "--no-progress", "--replicates", 20]
    code, out, _ = run(capsys, *arguments, "--max-perpendicular", 0.01)
    assert code == 1
    assert "attn, layer 1 (local)" in out
    result = Result.load(tmp_path / "out")
    assert result.meta["data"]["text"] == "sessions.jsonl"
    assert result.meta["data"]["n_sequences"] == 8
    assert result.meta["compressed"]["class"] == "HookedTransformer"
    in_memory = lg.compression_report(
        model, compress.round_to_nearest(model, bits=3), lg.load_tokens(sessions), replicates=20, progress=False
    )
    assert np.allclose(in_memory.table["mean"], result.table["mean"], equal_nan=True)
    assert run(capsys, *arguments, "--max-perpendicular", 10)[0] == 0


def test_a_model_that_the_trainer_saved_without_a_tokenizer_goes_through_too(capsys, tmp_path, sessions):
    from lens_geometry.training.config import Shape
    from lens_geometry.training.model import fresh_hugging_face_model

    shape = Shape(n_layers=2, d_model=32, n_heads=4, n_key_value_heads=2, d_mlp=64, d_vocab=40, n_ctx=12, tied=False)
    model = fresh_hugging_face_model(shape, 0)
    zoo.fill(model)
    model.save_pretrained(tmp_path / "base")
    compress.magnitude(model, sparsity=0.5).save_pretrained(tmp_path / "pruned")
    arguments = [tmp_path / "base", tmp_path / "pruned", "--out", tmp_path / "out", "--no-progress", "--replicates", 20]
    code, _, err = run(capsys, *arguments)
    assert (code, "--tokens" in err) == (2, True)
    assert run(capsys, *arguments, "--tokens", sessions, "--max-perpendicular", 10)[0] == 0
    assert run(capsys, *arguments, "--tokens", sessions, "--max-perpendicular", 0.01)[0] == 1
