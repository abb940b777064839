"""What docs/compression.md shows is run, and its workflow is one that GitHub would read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import zoo

from lens_geometry import cli, compare_commands
from lens_geometry.errors import ModelError

PAGE = (Path(__file__).parents[1] / "docs" / "compression.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.M | re.S)


def commands(block):
    """Every command with the exit code that its comment says."""
    for line in block.replace("\\\n", " ").splitlines():
        yield shlex.split(line, comments=True), 1 if "# exit code 1" in line else 0


def workflow():
    yaml = pytest.importorskip("yaml")
    (text,) = [block for kind, block in BLOCKS if kind == "yaml"]
    return yaml.safe_load(text)


def test_the_workflow_is_yaml_with_the_rights_and_steps_that_it_needs():
    found = workflow()
    assert "pull_request" in found[True]  # YAML 1.1 reads the key `on` as true
    assert found["permissions"] == {"contents": "read", "pull-requests": "write"}
    steps = found["jobs"]["compare"]["steps"]
    used = [step.get("uses", "").split("@")[0] for step in steps]
    order = ["actions/checkout", "actions/setup-python", "actions/cache", "actions/upload-artifact"]
    assert [name for name in used if name] == order
    by_name = {step.get("name"): step for step in steps}
    names = ["Install", "Cache the base model", "Compress", "Compare", "Comment", "Keep the results"]
    assert [name for name in by_name if name] == names
    assert by_name["Keep the results"]["if"] == "always()"
    assert by_name["Comment"]["if"].startswith("always() && ")
    assert by_name["Comment"]["env"]["GH_TOKEN"] == "${{ github.token }}"
    assert "--body-file results/summary.md" in by_name["Comment"]["run"]
    assert "if" not in by_name["Compare"]


def test_the_workflows_command_is_one_that_this_version_reads(monkeypatch, capsys, tmp_path):
    (step,) = [step for step in workflow()["jobs"]["compare"]["steps"] if step.get("name") == "Compare"]
    ((words, _),) = commands(step["run"])
    monkeypatch.chdir(tmp_path)
    asked = []

    def load(how, name):
        asked.append((name, how.revision))
        raise ModelError("no further")

    monkeypatch.setattr(compare_commands.HowLoaded, "load", load)
    values = {"$BASE": "some/base", "$REVISION": "abc", "$GITHUB_STEP_SUMMARY": "step.md"}
    assert cli.main([values.get(word, word) for word in words[1:]]) == 2
    assert asked == [("some/base", "abc")]
    assert "no further" in capsys.readouterr().err


@pytest.mark.slow
def test_every_block_and_command_of_the_page_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LENS_GEOMETRY_CACHE", str(tmp_path / "cache"))
    space: dict[str, object] = {}
    ran = 0
    for kind, block in BLOCKS:
        if "HookedTransformer" in block and zoo.MAJOR > 3:
            block = block[: block.index("items = HookedTransformer")].replace(
                "from transformer_lens import HookedTransformer, HookedTransformerConfig\n", ""
            )
        if kind == "python":
            exec(compile(block, "docs/compression.md", "exec"), space)
            ran += 1
        elif kind == "":
            for words, expected in commands(block):
                if "hooked" in words and zoo.MAJOR > 3:
                    continue
                assert words[0] == "lens-geometry"
                code = cli.main([*words[1:], *(["--no-progress"] if words[1] == "compare" else [])])
                assert (words, code) == (words, expected), capsys.readouterr().err
                ran += 1
    assert ran >= 12 - 2 * (zoo.MAJOR > 3)
    assert (tmp_path / "results" / "summary.md").read_text().startswith("**✅")
