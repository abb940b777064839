"""Readers of minimal pairs: BLiMP's JSON lines, SyntaxGym's suites, and data sets of the Hugging Face hub."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lens_geometry.data_sets import require_hub
from lens_geometry.errors import DataError
from lens_geometry.pair import Pair, Pairs, Span, check_pair, critical_spans

BLIMP_FIELDS = (  # kept as features where they are there
    "one_prefix_prefix",
    "one_prefix_word_good",
    "one_prefix_word_bad",
    "one_prefix_method",
    "two_prefix_method",
    "simple_LM_method",
    "field",
    "pairID",
)
SIMPLEST = "(5;%match%) < (5;%mismatch%)"
NAMED = "name them: conditions=(GOOD, BAD), region=NUMBER"
EVERYWHERE = "*"  # SyntaxGym's name for the whole sentence

_FORMULA = re.compile(r"\(\s*(\d+|\*)\s*;\s*%([^%]+)%\s*\)\s*([<>])\s*\(\s*(\d+|\*)\s*;\s*%([^%]+)%\s*\)")


class Comparison(NamedTuple):
    """The condition that should be the likelier one, the other, and the region in each ("*" is the whole sentence)."""

    good: str
    bad: str
    good_region: str
    bad_region: str


def blimp_file(path: Path) -> Pairs:
    """Pairs of a .jsonl file with `sentence_good` and `sentence_bad` in each line.

    Raises DataError, which names the line, for what cannot be used.
    """
    lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError("the file is empty", where=str(path), cure="pass JSON lines with sentence_good, sentence_bad")
    rows = ((f"{path}, line {number}", _parsed(line, f"{path}, line {number}")) for number, line in lines)
    return Pairs(path.stem, tuple(_blimp_pair(row, where) for where, row in rows), f"local file {path}")


def hub_pairs(name: str) -> Pairs:
    """`hf:PATH:CONFIG[:SPLIT]` through `datasets`; rows as in BLiMP. Raises DataError as `load_text` does."""
    import datasets  # slow to import, and not needed offline

    _, *parts = name.split(":")
    if not parts[0] or len(parts) > 3:
        raise DataError("this is not a data set's name", where=name, cure="write hf:nyu-mll/blimp:CONFIG[:SPLIT]")
    path, config, split = (parts + [""] * 3)[:3]
    split = split or "train"  # the only one that BLiMP has
    if not Path(path).exists():
        require_hub(path, name, instead="generated pairs (such as agreement-simple) or a local .jsonl")
    try:
        rows = datasets.load_dataset(path, config or None, split=split)
        found = list(enumerate(rows))
    except Exception as error:  # `datasets` raises whatever its readers do
        problem = f"the data set cannot be read ({type(error).__name__}: {str(error).split(chr(10))[0]})"
        raise DataError(problem, where=name, cure="check its path, config and split on its page") from error
    items = tuple(_blimp_pair(row, f"{name}, row {number}") for number, row in found)
    source = f"Hugging Face data set {path}, config {config or 'default'}, split {split}"
    return Pairs(name, items, source, getattr(rows.info, "license", "") or "see the data set's page")


def _blimp_pair(row: Any, where: str) -> Pair:
    if not isinstance(row, dict):
        raise DataError(f"a {type(row).__name__} is no pair", where=where, cure="give an object with two sentences")
    for name in ("sentence_good", "sentence_bad"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            problem = f"there is no text in the field {name!r}"
            raise DataError(problem, where=where, cure="give sentence_good and sentence_bad in every line")
    good, bad = row["sentence_good"], row["sentence_bad"]
    features = {name: str(row[name]) for name in BLIMP_FIELDS if row.get(name) is not None}
    phenomenon, template = (str(row.get(name) or "") for name in ("linguistics_term", "UID"))
    pair = Pair(good, bad, *critical_spans(good, bad), phenomenon, template, features)
    check_pair(pair, where)
    return pair


def suite_file(path: Path, conditions: tuple[str, str] | None = None, region: int | str | None = None) -> Pairs:
    """Pairs of a SyntaxGym suite: two conditions of every item, and the region in which they are compared.

    Which ones is said by the suite's predictions, where each is one comparison such as "(5;%match%) < (5;%mismatch%)"
    (of surprisals, so the smaller side is the good sentence), or by `conditions` (good, bad) and `region`. A region is
    the critical word; without one, or with "*", it is where the sentences differ. Regions are joined by blanks.
    Raises DataError, which names item and condition, for what cannot be used.
    """
    suite = _parsed(read_text(path), str(path))
    if not isinstance(suite, dict) or not isinstance(suite.get("items"), list) or not suite["items"]:
        cure = "pass a SyntaxGym suite, or JSON lines as in BLiMP with the ending .jsonl"
        raise DataError("the file holds no list of items", where=str(path), cure=cure)
    if region is not None and conditions is None:
        raise DataError("a region without its conditions", where=str(path), cure=NAMED)
    if conditions is None:
        comparisons = [_comparison(prediction, str(path)) for prediction in _predictions(suite, path)]
    else:
        chosen = EVERYWHERE if region is None else str(region)
        comparisons = [Comparison(*conditions, chosen, chosen)]
    meta = suite.get("meta")
    name = str((meta.get("name") if isinstance(meta, dict) else None) or path.stem)
    items = [
        _suite_pair(item, place, comparison, name, str(path))
        for comparison in dict.fromkeys(comparisons)
        for place, item in enumerate(suite["items"], 1)
    ]
    return Pairs(name, tuple(items), f"local file {path}")


def _predictions(suite: dict[str, Any], path: Path) -> Iterator[Any]:
    found = suite.get("predictions")
    if not isinstance(found, list) or not found:
        raise DataError("the suite says nowhere which conditions are compared", where=str(path), cure=NAMED)
    yield from found


def _comparison(prediction: Any, where: str) -> Comparison:
    formula = prediction.get("formula") if isinstance(prediction, dict) else prediction
    found = _FORMULA.fullmatch(formula.strip()) if isinstance(formula, str) else None
    if found is None:
        problem = f"the prediction {formula!r} is not one comparison of two regions"
        raise DataError(problem, where=where, cure=f"write {SIMPLEST}, or {NAMED}")
    left_region, left, sign, right_region, right = found.groups()
    if sign == "<":
        return Comparison(left, right, left_region, right_region)
    return Comparison(right, left, right_region, left_region)


def _suite_pair(item: Any, place: int, comparison: Comparison, name: str, file: str) -> Pair:
    where = f"{file}, item {item.get('item_number', place) if isinstance(item, dict) else place}"
    (good, good_span), (bad, bad_span) = (
        _sentence(item, condition, region, where)
        for condition, region in (
            (comparison.good, comparison.good_region),
            (comparison.bad, comparison.bad_region),
        )
    )
    differ = critical_spans(good, bad)
    spans = (good_span or differ[0], bad_span or differ[1])
    pair = Pair(good, bad, *spans, name, f"{comparison.good} against {comparison.bad}", {"item": where.split()[-1]})
    check_pair(pair, where)
    if spans[0][1] <= differ[0][0] and spans[1][1] <= differ[1][0] and good[: spans[0][1]] == bad[: spans[1][1]]:
        problem = f"region {comparison.good_region} comes before the sentences differ"
        raise DataError(problem, where=where, cure="compare a region in which, or after which, they differ")
    return pair


def _sentence(item: Any, condition: str, region: str, where: str) -> tuple[str, Span | None]:
    """The sentence of one condition, and the characters of the region in it; None for the whole sentence."""
    conditions = item.get("conditions") if isinstance(item, dict) else None
    named = {str(one.get("condition_name")): one for one in _dicts(conditions, "conditions", where)}
    if condition not in named:
        cure = f"choose from {', '.join(map(str, named))}"
        raise DataError(f"there is no condition {condition!r}", where=where, cure=cure)
    where = f"{where}, condition {condition}"
    sentence, span = "", None
    for place, one in enumerate(_dicts(named[condition].get("regions"), "regions", where), 1):
        content = one.get("content")
        if not isinstance(content, str):
            raise DataError(f"region {place} has no content", where=where, cure="give a string, which may be empty")
        content = content.strip()
        start = len(sentence) + bool(sentence and content)
        sentence += f"{' ' if sentence and content else ''}{content}"
        if str(one.get("region_number", place)) == region:
            span = (start, len(sentence))
    if span is None and region != EVERYWHERE:
        raise DataError(f"there is no region {region}", where=where, cure="name a region_number of the suite")
    return sentence, span


def _dicts(found: Any, what: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise DataError(f"there is no list of {what}", where=where, cure="pass a SyntaxGym suite")
    return found


def read_text(path: Path) -> str:
    """A UTF-8 file without its byte order mark. Raises DataError when it cannot be read."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(
            f"the file cannot be read ({error.strerror})", where=str(path), cure="check its path"
        ) from error
    except UnicodeDecodeError as error:
        where = f"{path}, byte offset {error.start}"
        raise DataError("the file is not UTF-8", where=where, cure="re-encode it as UTF-8") from error
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise DataError("the file is empty or only white space", where=str(path), cure="pass a file with pairs in it")
    return text


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        at = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(
            f"this is not JSON{at}", where=where, cure="write one JSON object per line in a .jsonl"
        ) from error
