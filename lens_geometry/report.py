"""One self-contained HTML page from results: what was run, what was found, figures, tables, provenance.

    path = write_report([profile, sweep], "out/report.html")

The page holds everything it needs (plotly included, about 5 MB), loads nothing, and follows the reader's
light or dark setting. Its words about the outcome are `findings`, computed from the tables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from lens_geometry.errors import ResultError
from lens_geometry.findings import findings
from lens_geometry.html_pieces import details, grid, notes, text
from lens_geometry.results import Result, jsonable, replace_file
from lens_geometry.sections import SIZES, heading, section

__all__ = ["findings", "write_report"]

SHAPE = {  # of the model, in words
    "architecture": "{}",
    "n_layers": "{} layers",
    "n_heads": "{} heads",
    "d_model": "d_model {}",
    "dtype": "{}",
}
# experiments whose data are no text that others could share
OWN_DATA = ("minimal_pairs", "continuations", "generation_profile", "evaluate", "train", "compare_arms")
NO_SITES = ("none", "", "pooled")
PACKAGES = ("python", "torch", "transformer-lens", "transformers")


def write_report(results: Sequence[Result], out: str | os.PathLike[str]) -> Path:
    """Write `out` (an .html file; its directory is made) and return its path.

    Only what is among `results` is in the page. Raises ResultError when there are no results, when a table
    lacks a column that its figure needs, and when the file cannot be written; an older file then stays.
    """
    if not results:
        raise ResultError("there are no results to report on", cure="run an experiment first")
    path = Path(out)
    body = [
        _found(results),
        *(section(result, place) for place, result in enumerate(results)),
        _provenance(results),
    ]
    links = "".join(f'<a href="#part{i}">{text(heading(result))}</a>' for i, result in enumerate(results))
    parts = {
        "title": text(_title(results)),
        "run": f'<p class="run"><strong>What was run:</strong> {text(_what_was_run(results))}</p>',
        "nav": f'<nav aria-label="Parts of this report">{links}<a href="#provenance">Provenance</a></nav>',
        "body": "\n".join(body),
        "css": _asset("report.css"),
        "plotly": get_plotlyjs(),
    }
    page = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("report.html"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda temporary: temporary.write_text(page, encoding="utf-8"))
    except OSError as error:
        problem = f"the report could not be written ({error.strerror or error})"
        raise ResultError(problem, where=str(path), cure="free space or choose another place") from error
    return path


def _asset(name: str) -> str:
    return (resources.files("lens_geometry") / "assets" / name).read_text(encoding="utf-8")


def _part(meta: dict[str, Any], part: str) -> dict[str, Any]:
    return meta[part] if isinstance(meta.get(part), dict) else {}


def _name(result: Result, part: str, key: str) -> str:
    """`meta[part][key]`, or `meta[part]` itself where it is not a dict, or an empty string."""
    about = result.meta.get(part, "")
    return str(about.get(key, "") if isinstance(about, dict) else about or "")


def _model(result: Result) -> str:
    """Which model a result is of, or which two it compares."""
    one, other = _name(result, "model", "name") or _name(result, "base", "name"), _name(result, "compressed", "name")
    return f"{other} against {one}" if other else one


def _title(results: Sequence[Result]) -> str:
    models = dict.fromkeys(_model(result) or "unnamed model" for result in results)
    texts = dict.fromkeys(_name(result, "data", "text") or "unnamed text" for result in results)
    return f"{', '.join(models)} on {', '.join(texts)}"


def _what_was_run(results: Sequence[Result]) -> str:
    """One sentence from the first result's meta: experiments, model, text, sites, seed, versions, date."""
    meta = results[0].meta
    model, versions = _part(meta, "model"), _part(meta, "versions")
    shape = [words.format(model[key]) for key, words in SHAPE.items() if model.get(key)]
    same = [result for result in results if _name(result, "data", "text") == _name(results[0], "data", "text")]
    sizes = {heading(result).lower(): _sizes(result) for result in same if _sizes(result)}
    if len(set(sizes.values())) > 1:
        size = " and ".join(f"{words} ({name})" for name, words in sizes.items())
    else:
        size = next(iter(sizes.values()), "")
    tables = [result.table for result in results if "site" in result.table]
    sites = dict.fromkeys(str(site) for table in tables for site in table["site"].unique() if site not in NO_SITES)
    text_name = _name(results[0], "data", "text") or "an unnamed text"
    used = [f"{name} {versions[name]}" for name in PACKAGES if name in versions]
    words = [
        " and ".join(dict.fromkeys(heading(result).lower() for result in results)),
        f" of {_model(results[0]) or 'an unnamed model'}",
        f" ({', '.join(shape)})" if shape else "",
        f" on {size}{' of ' if size else ''}{text_name}",
        f"; at {', '.join(sites)}" if sites else "",
        f"; seed {meta['seed']}" if "seed" in meta else "",
        f"; {', '.join(used)}" if used else "",
        f", on {str(meta['created'])[:10]}" if "created" in meta else "",
    ]
    return "".join(words) + "."


def _sizes(result: Result) -> str:
    """`16 sequences, 2,048 tokens`, as far as a result's meta says."""
    data = _part(result.meta, "data")
    return ", ".join(f"{data[key]:,} {word}" for key, word in SIZES.items() if isinstance(data.get(key), int))


def _unbroken(sentence: str) -> str:
    """Escaped, and `s_par = 0` never broken over two lines."""
    return text(sentence).replace(" = ", "&nbsp;=&nbsp;").replace(" times)", "&nbsp;times)")


def _found(results: Sequence[Result]) -> str:
    items = "".join(f"<li>{_unbroken(sentence)}</li>" for sentence in findings(results))
    if not items:
        return ""
    texts = [result for result in results if result.experiment not in OWN_DATA]
    sources = {(_model(result), _name(result, "data", "text")) for result in texts}
    remarks = ["The results are of different models or texts: see each part."] if len(sources) > 1 else []
    if len({result.experiment for result in results}) < len(results):
        remarks.append("Where an experiment is here more than once, the sentences are about its first result.")
    return f'<section class="found" id="found"><h2>What was found</h2><ol>{items}</ol>{notes(remarks)}</section>'


def _provenance(results: Sequence[Result]) -> str:
    """Everything each result's meta says, folded away."""
    parts = []
    for result in results:
        facts = [(name, value or "none") for name, value in _flat(jsonable(result.meta))]
        parts.append(details(heading(result), grid(f"Provenance of: {heading(result)}", [], facts, "facts")))
    words = "<p>Where every number comes from: model, text, settings, seed, versions, counts.</p>"
    return f'<section id="provenance"><h2>Provenance</h2>{words}{"".join(parts)}</section>'


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested dicts as `a.b.c` and the value; lists of plain values in one line."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    else:
        yield name, "" if value is None or value == {} else str(value)
