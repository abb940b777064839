"""The report says what the tables say, in three sentences, loads nothing, and runs nobody else's markup."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import tables
from plotly.offline import get_plotlyjs
from tables import profile, sweep, without_interval

from lens_geometry import report
from lens_geometry.errors import ResultError
from lens_geometry.report import findings, write_report
from lens_geometry.results import Result


class Page(HTMLParser):
    """Every element's attributes, the text outside scripts and styles, and the scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: dict[str, str] = {}
        self.inside: tuple[str, str] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside = (tag, dict(attrs).get("id") or "")

    def handle_endtag(self, tag: str) -> None:
        if self.inside and tag == self.inside[0]:
            self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside is None:
            self.words.append(data)
        elif self.inside[0] == "script":
            self.scripts[self.inside[1]] = self.scripts.get(self.inside[1], "") + data

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words).replace("\xa0", " "))


def page_of(directory: Path, *results: Result) -> Page:
    """The report of `results`, with a stand-in for plotly's five megabytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "get_plotlyjs", lambda: "/* plotly */")
        return Page(write_report(results, directory / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(tmp_path_factory.mktemp("report"), profile(), sweep())


def test_the_page_loads_nothing(standard: Page) -> None:
    page = standard
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "object", "embed", "img", "base")
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "@import" not in (style := report._asset("report.css"))
    assert "url(" not in style
    (policy,) = [a["content"] for t, a in page.elements if t == "meta" and "Content-Security" in str(a)]
    assert str(policy).startswith("default-src 'none'")
    assert not re.search(r"https?:|fetch\(|XMLHttp|import\(", page.scripts[""])


def test_plotly_is_inside_once(tmp_path: Path) -> None:
    page = write_report([Result("wizardry", pd.DataFrame({"layer": [0]}), {})], tmp_path / "report.html")
    assert page.read_text(encoding="utf-8").count(get_plotlyjs()) == 1


def test_the_page_opens_with_what_was_run_and_the_findings(standard: Page) -> None:
    words = standard.text
    assert "smollm2-135m on austen" in words
    assert (
        "directional profile and component scaling of smollm2-135m (LlamaForCausalLM, 30 layers, 9 heads, "
        "d_model 576, float32) on 8 sequences, 2,048 tokens of austen; at attn, mlp, block, value, "
        "value_excl_self; seed 0; python 3.11.2, torch 2.13.0, transformer-lens 3.9.0, on 2025-11-30."
    ) in words
    places = [words.index(sentence) for sentence in findings([profile(), sweep()])]
    assert places == sorted(places)
    assert places[-1] < words.index("Every update is split")


def test_only_given_results_have_a_part(tmp_path: Path) -> None:
    only_profile = page_of(tmp_path, profile())
    assert "Component scaling" not in only_profile.text
    assert "not measured" not in only_profile.text
    other = page_of(tmp_path, Result("crystal_ball", pd.DataFrame({"layer": [0, 1], "loss": [0.5, math.nan]}), {}))
    assert "Crystal ball" in other.text
    assert "not finite" in other.text


def test_markup_in_names_stays_text(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
    results = [profile({"attn": 0.2, evil: 0.3}), sweep(losses={evil: (0.1, 0.2)})]
    for result in results:
        result.meta["model"]["name"] = result.meta["data"]["text"] = evil
        result.meta |= {"warnings": [evil], "settings": {evil: [evil]}, "token_mask": evil, "seed": evil}
    page, honest = (
        page_of(tmp_path, *results),
        page_of(tmp_path, profile({"attn": 0.2, "b": 0.3}), sweep(losses={"b": (0.1, 0.2)})),
    )
    count = {page: sum(tag == "script" for tag, _ in page.elements) for page in (page, honest)}
    assert count[page] == count[honest]
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in page.elements)
    assert evil in page.text  # shown as what it is
    for name, script in page.scripts.items():
        if name:
            assert "<" not in script
            json.loads(script)


def test_figures_hold_the_tables_numbers(standard: Page) -> None:
    figure = json.loads(standard.scripts["part1-loss-perpendicular"])
    (mlp,) = [t for t in figure["data"] if t.get("meta") == {"site": "mlp", "role": "edit"}]
    assert "change of loss +20.4 [+19.4, +21.4]" in str(mlp["text"])
    drawn = {attributes["data-figure"] for _, attributes in standard.elements if "data-figure" in attributes}
    assert drawn == {key for key in standard.scripts if key and not key.endswith("-csv")}


def test_the_short_table_has_value_and_interval_and_the_whole_table_can_be_saved(standard: Page) -> None:
    assert "+8.00 [+7.60, +8.40]" in standard.text
    assert "unedited loss 3.460" in standard.text
    rows, table = list(csv.DictReader(io.StringIO(json.loads(standard.scripts["part1-csv"])))), sweep().table
    assert len(rows) == len(table)
    assert float(rows[5]["loss_change"]) == pytest.approx(table["loss_change"].iloc[5], rel=1e-8)


def test_every_switch_acts_on_traces_that_are_there(standard: Page) -> None:
    boxes = [attributes for tag, attributes in standard.elements if tag == "input"]
    metas = [t.get("meta", {}) for key, script in standard.scripts.items() if key and not key.endswith("-csv")
             for t in json.loads(script)["data"]]  # fmt: skip
    for name in ("site", "role"):
        assert {box[f"data-{name}"] for box in boxes if f"data-{name}" in box} <= {meta[name] for meta in metas}
    assert {box["data-role"] for box in boxes if "data-role" in box} == {"band", *tables.CONTROLS}
    assert [box["data-quantity"] for box in boxes if box["type"] == "radio"] == ["loss", "perplexity"]


def test_a_lost_condition_is_no_number_in_the_short_table(tmp_path: Path) -> None:
    table = tables.sweep_table(losses={"mlp": (3.05, 20.4)}, controls=())
    partly = table.copy()
    partly.loc[(table.component == "perpendicular") & (table.scale == 0), ["status", "n_nonfinite"]] = [
        "nonfinite",
        9,
    ]
    words = page_of(tmp_path, sweep(partly)).text
    assert "not finite for 9 tokens" in words
    assert "+20.4 [" not in words


def test_warnings_stand_in_the_part_they_belong_to(tmp_path: Path) -> None:
    first, table = profile(), tables.sweep_table(controls=())
    first.meta["warnings"] = ["The weights were folded."]
    first.table.loc[(first.table.metric == "parallel_ratio") & (first.table.layer == 0), "n_infinite"] = 3
    second = sweep(without_interval(tables.lose(table, (table.site == "mlp") & (table.scale == -1))))
    words = page_of(tmp_path, first, second).text
    profile_part, sweep_part = words.split("Each update becomes")[0], words.split("Download all")[1]
    assert "The weights were folded." in profile_part
    assert "parallel_ratio: 5 of the means over all heads leave out tokens" not in sweep_part
    assert "parallel_ratio: 5 of the means over all heads leave out tokens" in profile_part
    assert "1 of 64 conditions have losses that are not finite: mlp at s_par = -1." in sweep_part
    assert "one sequence only" in sweep_part
    assert "No controls were run" in sweep_part


def test_provenance_lists_all_of_meta(tmp_path: Path) -> None:
    result = profile()
    result.meta["settings"] = {"sites": ["attn", "mlp"], "nested": {"deep": 3.5}, "empty": {}, "none": None}
    words = page_of(tmp_path, result).text
    for fact in (
        "model.d_model 576",
        "settings.sites attn, mlp",
        "settings.nested.deep 3.5",
        "settings.empty none",
    ):
        assert fact in words


def test_results_of_different_models_are_pointed_out(tmp_path: Path) -> None:
    first, second = profile(), sweep()
    second.meta["model"]["name"] = "another"
    page = page_of(tmp_path, first, second)
    assert "different models or texts" in page.text
    assert "smollm2-135m, another on austen" in page.text


def test_a_meta_of_plain_strings_or_nothing_is_enough(tmp_path: Path) -> None:
    table = tables.profile_table({"attn": 0.3}, layers=2)
    assert "gpt2 on a text" in page_of(tmp_path, Result("profile", table, {"model": "gpt2", "data": "a text"})).text
    assert "unnamed model" in page_of(tmp_path, Result("profile", table, {})).text


def test_an_older_report_survives_a_failure_and_the_error_says_where(tmp_path: Path) -> None:
    out = write_report([profile()], tmp_path / "new" / "report.html")
    before = out.read_bytes()
    with pytest.raises(ResultError, match="lacks the column q90"):
        write_report([Result("profile", profile().table.drop(columns="q90"), {})], out)
    with pytest.raises(ResultError, match="no results"):
        write_report([], out)
    assert out.read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]
    with pytest.raises(ResultError, match="could not be written"):
        write_report([profile()], out / "below" / "report.html")


def continued(**texts: str) -> Result:
    meta = {**tables.META, "data": {"text": "1 prompts", "n_sequences": 1, "n_tokens": 5}}
    return Result("continuations", tables.continuations_table(**texts), meta)


def test_continuations_are_text_of_the_page_marked_where_they_differ(tmp_path: Path) -> None:
    page = page_of(tmp_path, profile(), continued(text="once again, <script>alert(1)</script>"))
    raw = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "once <mark>again, &lt;script&gt;alert(1)&lt;/script&gt;</mark>" in raw
    assert "<dd>once upon a time</dd>" in raw
    assert "once again, <script>alert(1)</script>" not in raw
    assert "attn, s_par = 0, new tokens" in page.text
    assert "agrees for 1 of 4 tokens" in page.text
    assert "not finite: these tokens mean nothing" in page.text
    assert "1 of 4 rows are not finite." in page.text
    assert "1 of 4 rows are of an edit that changed nothing." in page.text
    assert "It was 1 < 2" in page.text
    style = report._asset("report.css")
    assert re.search(r"mark \{[^}]*underline", style)  # not by colour alone


def test_the_table_of_edits_leaves_out_what_is_not_finite(tmp_path: Path) -> None:
    page = page_of(tmp_path, continued())
    start = page.text.index("first tokens that agree")
    assert "attn, s_par = 0, new tokens 1.00 1 of 1 −1.25 0.500" in page.text[start:]
    assert "attn, s_par = 3, all tokens not finite" in page.text[start:]


def test_the_profile_over_steps_has_a_figure_per_metric_and_a_map_per_site(tmp_path: Path) -> None:
    page = page_of(tmp_path, Result("generation_profile", tables.generation_table(), dict(tables.META)))
    drawn = {key for key in page.scripts if key.startswith("part0-") and not key.endswith("csv")}
    assert drawn == {f"part0-{name}" for name in report_metrics()} | {"part0-map-attn", "part0-map-value"}
    (cells,) = json.loads(page.scripts["part0-map-value"])["data"]
    assert cells["type"] == "heatmap"
    assert "Profile over generation steps" in page.text


def report_metrics() -> list[str]:
    return ["parallel_ratio", "alpha", "parallel_fraction", "update_over_reference"]


def test_what_was_run_counts_only_text_of_the_same_name(tmp_path: Path) -> None:
    words = page_of(tmp_path, profile(), continued()).text
    assert "on 8 sequences, 2,048 tokens of austen; at attn, mlp, block, value, value_excl_self; seed" in words
    assert "1 sequences, 5 tokens" in words
