"""The command line: files written, exit codes, and one line instead of a traceback."""

import json

import pandas as pd
import pytest

from lens_geometry import cli
from lens_geometry.results import Result

TINY = ["--model", "tiny-random-llama"]
SMALL = ["--sequence-length", "32", "--max-sequences", "3", "--no-progress"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """A cache that the tests of this session share, and no other."""
    monkeypatch.setenv("LENS_GEOMETRY_CACHE", str(tmp_path_factory.getbasetemp() / "cli-cache"))


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_profile_writes_its_four_files_and_prints_the_short_table(capsys, tmp_path):
    code, out, _ = run(capsys, "profile", *TINY, *SMALL, "--out", tmp_path)
    assert code == 0
    assert "value_excl_self" in out
    assert {p.name for p in tmp_path.iterdir()} == {"table.parquet", "table.csv", "meta.json", "figure.html"}
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert meta["model"]["name"] == "tiny-random-llama"
    assert meta["data"]["n_sequences"] == 3
    assert len(pd.read_csv(tmp_path / "table.csv")) == len(Result.load(tmp_path).table)


def test_scale_resumes_and_prints_changes_by_scale(capsys, tmp_path):
    arguments = ["scale", *TINY, *SMALL, "--sites", "mlp", "--parallel", 0, "--perpendicular", 0, "--out", tmp_path]
    code, first, _ = run(capsys, *arguments)
    assert code == 0
    journal = (tmp_path / "journal.jsonl").read_text()
    code, again, _ = run(capsys, *arguments)
    assert (code, again) == (0, first)
    assert (tmp_path / "journal.jsonl").read_text() == journal
    assert "+0.000" in first


@pytest.mark.parametrize(("text", "scored"), [("python", 93), ("shuffled:austen", 93), ("repeated-random", 48)])
def test_scale_and_profile_take_texts_that_are_not_prose(capsys, tmp_path, text, scored):
    few = ["--sites", "mlp", "--out", tmp_path]
    code, _, _ = run(capsys, "scale", *TINY, *SMALL, "--text", text, "--parallel", 0, "--perpendicular", 0, *few)
    assert code == 0
    result = Result.load(tmp_path)
    assert set(result.table["n_tokens"]) == {scored}
    assert result.meta["data"]["text"] == text
    assert ("only the repeat is scored" in result.meta["token_mask"]) == (text == "repeated-random")
    assert run(capsys, "profile", *TINY, *SMALL, "--text", text, *few)[0] == 0
    assert ("only the repeat is scored" in Result.load(tmp_path).meta["token_mask"]) == (text == "repeated-random")


@pytest.mark.slow
def test_mlp_sweeps_the_sites_inside_the_mlp_and_resumes(capsys, tmp_path):
    arguments = ["mlp", *TINY, *SMALL, "--parallel", 0, "--perpendicular", 0, "--controls", "gain", "--out", tmp_path]
    code, first, _ = run(capsys, *arguments)
    assert code == 0
    assert {p.name for p in tmp_path.iterdir()} >= {"table.parquet", "table.csv", "meta.json", "figure.html"}
    result = Result.load(tmp_path)
    assert result.experiment == "mlp_sweep"
    assert set(result.table["site"]) == {"mlp", "mlp_carrier", "mlp_contribution"}
    assert run(capsys, *arguments)[:2] == (0, first)
    code, _, _ = run(capsys, *arguments[:-1], tmp_path / "both", "--references", "stream")
    assert code == 0
    assert "mlp_carrier" not in set(Result.load(tmp_path / "both").table["site"])


def test_repair_perturbs_repairs_and_resumes(capsys, tmp_path):
    few = ["--sequence-length", 16, "--max-sequences", 3, "--no-progress", "--seeds", 1, "--displacements", 0.3]
    arguments = ["repair", *TINY, *few, "--kinds", "angular", "--pathways", "mlp_output", "--out", tmp_path]
    code, first, _ = run(capsys, *arguments)
    assert code == 0
    assert {p.name for p in tmp_path.iterdir()} >= {"table.parquet", "table.csv", "meta.json", "figure.html"}
    result = Result.load(tmp_path)
    assert result.experiment == "pathway_repair"
    assert list(result.table["pathway"].unique()) == ["nothing", "mlp_output", "everything"]
    assert "share of the damage" in first
    journal = (tmp_path / "journal.jsonl").read_bytes()
    assert run(capsys, *arguments)[:2] == (0, first)
    assert (tmp_path / "journal.jsonl").read_bytes() == journal


@pytest.mark.slow
def test_report_holds_both_experiments_and_says_where_it_lies(capsys, tmp_path):
    code, out, _ = run(
        capsys,
        "report",
        *TINY,
        "--sequence-length",
        32,
        "--profile-sequences",
        3,
        "--sweep-sequences",
        2,
        "--generated-tokens",
        4,
        "--out",
        tmp_path,
    )
    assert code == 0
    assert str(tmp_path / "report.html") in out
    assert Result.load(tmp_path / "generate" / "profile").experiment == "generation_profile"
    assert "Edited continuations" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "profile" / "table.parquet").exists()
    assert (tmp_path / "scale" / "journal.jsonl").exists()
    assert "tiny-random-llama" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_scale_finds_basins_and_a_schedule_too_when_asked_for(capsys, tmp_path):
    few = ["--sequence-length", 16, "--max-sequences", 4, "--no-progress", "--sites", "mlp", "--controls"]
    few += ["--parallel", 0, "--perpendicular", 0]
    code, out, _ = run(capsys, "scale", *TINY, *few, "--basin", 0.2, "--schedule", 0.3, "--out", tmp_path)
    assert code == 0
    basins, schedules = (Result.load(tmp_path / name) for name in ("basin", "schedule"))
    assert basins.experiment == "basin"
    assert basins.meta["settings"]["bound"] == 0.2
    assert basins.meta["settings"]["sites"] == ["mlp"]
    assert schedules.meta["settings"]["budget"] == 0.3
    assert Result.load(tmp_path).experiment == "scaling_sweep"
    assert "a change of loss under 0.2 nats" in out
    row = basins.table[basins.table["kind"] == "basin"].iloc[0]
    assert f"{row['high']:.2f}" in out
    assert "joint change of loss under 0.3 nats" in out
    for variant in ("greedy", "uniform", "random 3"):
        assert variant in out


@pytest.mark.slow
def test_basin_and_schedule_are_commands_that_resume(capsys, tmp_path):
    few = ["--sequence-length", 16, "--max-sequences", 4, "--no-progress", "--sites", "value"]
    for command, options in (("basin", ["--layers", "each", "--bound", 0.3]), ("schedule", ["--budget", 0.3])):
        arguments = [command, *TINY, *few, *options, "--out", tmp_path / command]
        code, first, _ = run(capsys, *arguments)
        assert code == 0
        journals = {path: path.read_text() for path in (tmp_path / command).glob("*.jsonl")}
        assert journals
        assert run(capsys, *arguments)[:2] == (0, first)
        assert {path: path.read_text() for path in journals} == journals
    assert "greedy" in first
    assert "held_out" in first
    assert "value, layer 3" not in first
    assert len(Result.load(tmp_path / "basin").table.query("kind == 'basin'")) == 4


def test_generate_prints_continuations_side_by_side_and_writes_both_results(capsys, tmp_path):
    code, out, _ = run(
        capsys, "generate", *TINY, "--prompts", "Call me", "Good day", "--sites", "attn", "--parallel", -3, "--when",
        "always", "new", "--max-new-tokens", 6, "--out", tmp_path,
    )  # fmt: skip
    assert code == 0
    table = Result.load(tmp_path).table
    assert table["when"].tolist() == ["always", "always", "new"] * 2
    assert "prompt: Call me" in out
    assert "attn, s_par = -3, new tokens (agrees for" in out
    assert "┃" in out
    assert not [letter for letter in out if not letter.isprintable() and letter not in "\n\t"]
    assert Result.load(tmp_path / "profile").table["step"].max() == 5


def test_sites_shows_the_hooks_of_this_model(capsys, tmp_path):
    code, out, _ = run(capsys, "sites", "--model", "tiny-random-neox", "--out", tmp_path)
    assert code == 0
    assert "resid_pre + attn_out + mlp_out = resid_post" in out
    assert "blocks.L.attn.hook_z" in out
    assert len(Result.load(tmp_path).table) == 9


def test_validate_passes_on_a_sound_model_and_fails_with_1_on_a_check_that_fails(capsys, tmp_path, monkeypatch):
    code, out, _ = run(capsys, "validate", *TINY, "--out", tmp_path)
    assert code == 0
    assert "fail" not in out
    table = Result.load(tmp_path).table.assign(status="fail")
    monkeypatch.setattr(cli, "validate", lambda model: Result("validate", table, {}))
    code, out, _ = run(capsys, "validate", *TINY)
    assert code == 1


def test_models_lists_what_is_bundled(capsys):
    code, out, _ = run(capsys, "models")
    assert code == 0
    assert "tiny-random-neox" in out
    assert "smollm2-135m" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["profile", "--model", "tiny-random-lama"], "tiny-random-llama"),
        (["profile", *TINY, "--text", "no-such-file.txt"], "no-such-file.txt"),
        (["profile", *TINY, "--sequence-length", "100000"], "context"),
        (["scale", *TINY, "--text", "shuffled:"], "names no text"),
        (["scale", *TINY, "--text", "shuffled:nope"], "nope"),
        (["profile", *TINY, "--text", "shuffled:repeated-random"], "no order to shuffle"),
        (["scale", *TINY, "--text", "repeated-random", "--sequence-length", "3"], "at least 4"),
        (["scale", *TINY, *SMALL, "--sites", "atn"], "attn"),
        (["scale", *TINY, *SMALL, "--layers", "77"], "layers 0 to 3"),
        (["scale", *TINY, *SMALL, "--basin", "0"], "bound is 0"),
        (["scale", *TINY, *SMALL, "--sites", "block", "--schedule", "0.1"], "halved"),
        (["generate", *TINY, "--prompts", "a"], "2 to"),
        (["generate", *TINY, "--sites", "atn"], "attn"),
        (["profile", *TINY, *SMALL, "--out", "/proc/nowhere"], "could not be written"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    message = [line for line in err.splitlines() if line.startswith("lens-geometry: ")]
    assert len(message) == 1
    assert words in message[0]
    assert "Cure:" in message[0]
    assert "Traceback" not in err


def test_attention_writes_its_files_and_prints_the_diagonal(capsys, tmp_path):
    arguments = [
        "--prompt",
        "It is a truth",
        "--site",
        "value",
        "--parallel",
        0.5,
        "--layers",
        "1,3",
        "--out",
        tmp_path,
    ]
    code, out, _ = run(capsys, "attention", *TINY, *arguments)
    assert code == 0
    assert "mean before and after" in out
    assert "CircuitsVis, layers 1, 3" in out
    files = {"table.parquet", "table.csv", "meta.json", "figure.html", "attention.html"}
    assert {p.name for p in tmp_path.iterdir()} == files


def test_pairs_scores_sets_and_files_and_prints_accuracies(capsys, tmp_path):
    lines = [{"sentence_good": "The boys walk.", "sentence_bad": "The boys walks."}] * 2
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    few = ["--max-pairs", 5, "--no-progress", "--scorings", "word"]
    code, out, _ = run(
        capsys, "pairs", *TINY, "--sets", "anaphor-gender", tmp_path / "own.jsonl", *few, "--out", tmp_path / "out"
    )
    assert code == 0
    assert "anaphor-gender" in out
    result = Result.load(tmp_path / "out")
    assert dict(result.table.groupby("set")["n_pairs"].max()) == {"anaphor-gender": 5, "own": 2}
    assert set(result.table["scoring"]) == {"word"}
    code, _, err = run(capsys, "pairs", *TINY, "--sets", "agreement-simpel")
    assert (code, "agreement-simple" in err) == (2, True)
    code, _, err = run(capsys, "pairs", *TINY, "--sets", "anaphor-gender", "--conditions", "a", "b")
    assert (code, "SyntaxGym" in err) == (2, True)


@pytest.mark.parametrize("arguments", [["profil"], ["profile", "--no-such-option"], ["scale", "--parallel", "much"]])
def test_a_command_that_cannot_be_read_ends_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_explains_itself_with_an_example(capsys, command):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert f"Example: lens-geometry {command}" in capsys.readouterr().out


def test_ctrl_c_is_no_traceback(capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "profile", stop)
    code, _, err = run(capsys, "profile", *TINY)
    assert code == 130
    assert "stopped" in err


def test_mediators_prints_how_displacements_grow_and_resumes(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged, that a single man must be in want of a wife. " * 4)
    arguments = ["mediators", *TINY, "--text", text, "--sequence-length", 16, "--max-sequences", 5, "--no-progress"]
    arguments += ["--seeds", 2, "--variants", "default", "--layers", "1-2", "--out", tmp_path / "out"]
    code, first, _ = run(capsys, *arguments)
    assert code == 0
    assert "pushes alone" in first
    assert "attention_entropy" in first
    result = Result.load(tmp_path / "out")
    assert result.experiment == "mediators"
    assert result.meta["settings"]["seeds"] == 2
    assert result.meta["perturbed_layers"] == [1, 2]
    journal = (tmp_path / "out" / "journal.jsonl").read_text()
    assert run(capsys, *arguments)[:2] == (0, first)
    assert (tmp_path / "out" / "journal.jsonl").read_text() == journal
