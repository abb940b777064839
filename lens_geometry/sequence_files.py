"""Token ids from files: for models without a tokenizer, and for text that was tokenised elsewhere.

tokens = load_tokens("sessions.jsonl")          # [3, 17, 4], one sequence a line, of any lengths
tokens = load_tokens("ids.npy")                 # integers [sequence, pos]
tokens = load_tokens("prepared")                # the held-out side of `lens-geometry tokens`
profile(model, tokens)
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lens_geometry.cache import sha256_of
from lens_geometry.data import Tokens, evenly_spaced, tokens_meta
from lens_geometry.errors import DataError
from lens_geometry.training.data import open_tokens

LINES = (".jsonl", ".txt", ".csv")
FORMS = ".npy [sequence, pos], .jsonl, .txt or .csv with a sequence of ids in every line, or a prepared directory"
Lines = list[tuple[int, list[int]]]  # the number of each line, and its ids


def load_tokens(
    path: str | os.PathLike[str],
    *,
    model: Any = None,
    max_sequences: int | None = None,
    sequence_length: int = 256,
) -> Tokens:
    """Token ids of a file or a prepared directory, checked, with mask and provenance.

    Args:
        path: a `.npy` of integers [sequence, pos]; a `.jsonl` with a list of ids (or an object with `input_ids`) in
            every line; a `.txt` or `.csv` with ids in every line, separated by blanks or commas; or a directory that
            `lens-geometry tokens` wrote, whose held-out documents are taken. Shorter sequences are padded on the right
            (with 0, masked out); blank lines are no sequences.
        model: check that the ids fit its vocabulary and its context. Without one, the experiment does.
        max_sequences: take this many, evenly spaced over all; None takes all.
        sequence_length: of a prepared directory alone: tokens per sequence; a sequence never leaves its document.

    Returns:
        Tokens. `meta` has the file's sha256 (of a directory, that of its ids) and what follows from the ids.

    Raises:
        DataError: nothing is there, it cannot be read, or it has what is no id: not an integer, negative, outside the
            vocabulary; or a sequence that is empty, a single token, or longer than the context, with how many are.
    """
    where = Path(path).expanduser()
    if max_sequences is not None and max_sequences < 1:
        raise DataError(f"max_sequences is {max_sequences}", cure="pass 1 or more, or None for all")
    if where.is_dir():
        ids, mask, about, available = _prepared(where, max_sequences, sequence_length)
    elif where.is_file():
        ids, mask, about, available = _of_file(where, model, max_sequences)
    else:
        raise DataError("there is no such file or directory", where=str(where), cure=f"give {FORMS}")
    check_fit(model, ids, mask, where=str(where))
    return Tokens(ids, mask, tokens_meta(ids, mask, about, available=available, bos=None))


def check_fit(model: Any, ids: Tensor, mask: Tensor, *, where: str) -> None:
    """Raise DataError where real tokens are outside the model's vocabulary, or sequences longer than its context."""
    if model is None:
        return
    context, d_vocab = getattr(model.cfg, "n_ctx", None), model.cfg.d_vocab
    outside = mask & ((ids < 0) | (ids >= d_vocab))
    if outside.any():
        rows, worst = int(outside.any(1).sum()), int(ids[outside].max())
        raise DataError(
            f"ids up to {worst} are outside the model's vocabulary of {d_vocab}, in {rows:,} of {len(ids):,} sequences",
            where=where,
            cure="give the ids of this model's own vocabulary",
        )
    lengths = mask.sum(1)
    if context and int(lengths.max()) > context:
        rows = int((lengths > context).sum())
        raise DataError(
            f"{rows:,} of {len(ids):,} sequences are longer than the model's context of {context} (the longest has "
            f"{int(lengths.max()):,})",
            where=where,
            cure="cut them, or leave them out",
        )


def _of_file(path: Path, model: Any, max_sequences: int | None) -> tuple[Tensor, Tensor, dict[str, Any], int]:
    """Ids, mask, provenance of one file, and how many sequences it has. All of them are checked, taken or not."""
    if path.suffix == ".npy":
        ids = _of_array(path)
        mask = torch.ones_like(ids, dtype=torch.bool)
    elif path.suffix in LINES:
        try:
            rows = _READERS[path.suffix](path)
        except UnicodeDecodeError as error:
            raise DataError("the file is no UTF-8 text", where=str(path), cure=f"give {FORMS}") from error
        ids, mask = _padded(rows, path)
    else:
        raise DataError(f"files ending in {path.suffix!r} are not known", where=str(path), cure=f"give {FORMS}")
    check_fit(model, ids, mask, where=str(path))
    chosen = evenly_spaced(len(ids), max_sequences)
    available, width = len(ids), int(mask[chosen].sum(1).max())
    about = {
        "text": path.name,
        "source": str(path.resolve()),
        "licence": "unknown",
        "text_sha256": sha256_of(path),
        "pad_token_id": 0,
    }
    return ids[chosen, :width], mask[chosen, :width], about, available


def _of_array(path: Path) -> Tensor:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        problem = f"this is no array of numbers ({type(error).__name__}: {error})"
        raise DataError(problem, where=str(path), cure="write it with numpy.save, integers [sequence, pos]") from error
    place = f"{path}, shape {array.shape}, {array.dtype}"
    if array.dtype.kind not in "iu":
        raise DataError("token ids must be integers", where=place, cure="save ids.astype(numpy.int64)")
    if array.ndim != 2:
        raise DataError("token ids must have the shape [sequence, pos]", where=place, cure="save ids[None] for one")
    if array.shape[0] < 1 or array.shape[1] < 1:
        raise DataError(
            "there is no sequence in the file", where=place, cure="save at least one, of two tokens or more"
        )
    if array.shape[1] < 2:
        raise DataError("every sequence is a single token", where=place, cure="save two tokens or more in each")
    if int(array.min()) < 0:
        number = int((array < 0).any(1).sum())
        raise DataError(
            f"there are negative ids (in {number:,} of {len(array):,} sequences)",
            where=place,
            cure="leave padding out: sequences of different lengths are the lines of a .jsonl",
        )
    if int(array.max()) >= 2**63:
        raise DataError(f"{int(array.max())} is no token id", where=place, cure="save ids of the model's vocabulary")
    return torch.from_numpy(array.astype(np.int64))


def _json_lines(path: Path) -> Lines:
    rows = []
    for number, line in _lines(path):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"the line is no JSON ({error})", where=_at(path, number), cure="write [3, 17, 4]"
            ) from error
        found = found.get("input_ids") if isinstance(found, dict) else found
        if not isinstance(found, list):
            raise DataError("the line holds no list of ids", where=_at(path, number), cure="write [3, 17, 4]")
        rows.append((number, [_an_id(value, path, number) for value in found]))
    return rows


def _text_lines(path: Path) -> Lines:
    return [(n, [_an_id(word, path, n) for word in line.replace(",", " ").split()]) for n, line in _lines(path)]


def _csv_lines(path: Path) -> Lines:
    rows = []
    for number, line in _lines(path):
        try:
            cells = next(csv.reader([line]))
        except csv.Error as error:
            raise DataError(f"the line is no CSV ({error})", where=_at(path, number), cure="write 3,17,4") from error
        rows.append((number, [_an_id(cell.strip(), path, number) for cell in cells if cell.strip()]))
    return rows


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines that are not blank, with their numbers."""
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


_READERS: dict[str, Callable[[Path], Lines]] = {".jsonl": _json_lines, ".txt": _text_lines, ".csv": _csv_lines}


def _an_id(value: Any, path: Path, line: int) -> int:
    """One id. Raises DataError, naming the line, for what is none."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,30}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        cure = "write whole numbers alone, without a header or names"
        raise DataError(f"{repr(value)[:60]} is no integer", where=_at(path, line), cure=cure)
    if value < 0:
        cure = "leave padding out: sequences may have different lengths"
        raise DataError(f"the id {value} is negative", where=_at(path, line), cure=cure)
    if value >= 2**63:
        raise DataError(f"{value} is no token id", where=_at(path, line), cure="write ids of the model's vocabulary")
    return value


def _at(path: Path, line: int) -> str:
    return f"{path}, line {line}"


def _padded(rows: Lines, path: Path) -> tuple[Tensor, Tensor]:
    """Ids padded on the right with 0, and which are real."""
    if not rows:
        raise DataError("there is no sequence in the file", where=str(path), cure="write one sequence of ids a line")
    short = [(number, ids) for number, ids in rows if len(ids) < 2]
    if short:
        what = "is a single token, which has nothing to predict" if short[0][1] else "is empty"
        more = f" ({len(short):,} of {len(rows):,} are too short)" if len(short) > 1 else ""
        raise DataError(
            f"the sequence {what}{more}", where=_at(path, short[0][0]), cure="leave sequences of fewer than two ids out"
        )
    lengths = torch.tensor([len(ids) for _, ids in rows])
    ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for row, (_, values) in enumerate(rows):
        ids[row, : len(values)] = torch.tensor(values)
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


def _prepared(
    directory: Path, max_sequences: int | None, sequence_length: int
) -> tuple[Tensor, Tensor, dict[str, Any], int]:
    """Ids, mask, provenance of the held-out documents of `lens-geometry tokens`, and how many sequences there are."""
    if sequence_length < 2:
        raise DataError(f"sequence_length is {sequence_length}", where=str(directory), cure="pass at least 2")
    files = open_tokens(directory)
    windows = files.held_out.windows(sequence_length - 1)
    numbers: Sequence[int] = evenly_spaced(len(windows), max_sequences)
    ids, targets = windows.batch(numbers)
    mask = torch.cat([torch.ones(len(ids), 1, dtype=torch.bool), targets], 1)
    width = int(mask.sum(1).max())
    about = {
        "text": f"{directory.name}, held-out documents",
        "source": str(directory.resolve()),
        "licence": "unknown",
        "text_sha256": files.meta["tokens_sha256"],
        "documents": files.held_out.n_documents,
        "tokens_dropped": windows.meta["predictions_dropped"],
        "pad_token_id": files.end,
    }
    return ids[:, :width], mask[:, :width], about, len(windows)
