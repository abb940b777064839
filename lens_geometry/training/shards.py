"""Writing token files so that a kill or a full disk at any moment loses at most the file in hand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lens_geometry.cache import is_full, sha256_of
from lens_geometry.errors import DataError, LensGeometryError
from lens_geometry.results import jsonable, replace_file
from lens_geometry.training.token_files import META, SIDES

JOURNAL = "journal.jsonl"
ANOTHER = "give another directory, or delete this one to start again"


class Shard:
    """The documents of one file of each side, in memory until `write`."""

    def __init__(self, number: int) -> None:
        self.number, self.n_tokens = number, 0
        self._ids: dict[str, list[np.ndarray]] = {side: [] for side in SIDES}
        self._bytes = dict.fromkeys(SIDES, 0)
        self._texts = hashlib.sha256()

    def add(self, side: str, ids: np.ndarray, document: str) -> None:
        data = document.encode()
        self._texts.update(len(data).to_bytes(8, "little") + data)
        self._ids[side].append(ids)
        self._bytes[side] += len(data)
        self.n_tokens += len(ids)

    def write(self, directory: Path) -> dict[str, Any]:
        """Write the files; returns what meta.json says of them. A side without documents has no file."""
        about: dict[str, Any] = {"number": self.number, "text_sha256": self._texts.hexdigest(), "sides": {}}
        for side, documents in self._ids.items():
            if documents:
                ends = np.cumsum([len(ids) for ids in documents], dtype="<i8")
                stem = f"{side}-{self.number:05d}"
                about["sides"][side] = {
                    "ids": _write_array(directory / f"{stem}.npy", np.concatenate(documents)),
                    "ends": _write_array(directory / f"{stem}-ends.npy", ends),
                    "documents": len(documents),
                    "tokens": int(ends[-1]),
                    "text_bytes": self._bytes[side],
                }
        return about


def sweep(directory: Path) -> None:
    """Remove what a killed process was writing; what it finished has another name."""
    for stem in (*SIDES, "meta"):
        for path in directory.glob(f".{stem}-*"):
            path.unlink()


def _write_array(path: Path, array: np.ndarray) -> dict[str, Any]:
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())

    replace_file(path, write)
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


class Journal:
    """What of a preparation is finished, one JSON line each: settings, split, tokenizer, and every shard.

    Raises DataError when the journal that is there was begun with other settings, or is damaged.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.done: dict[str, Any] = {}
        self.shards: list[dict[str, Any]] = []
        lines = self._read()
        if len(lines) > 1:
            refuse_other_settings(lines[0].get("settings", {}), settings, path.parent)
            for line in lines[1:]:
                self._take(line)
        else:  # nothing is finished yet, whatever was begun
            self._append({"settings": settings}, "wb")

    def add(self, kind: str, about: Any) -> None:
        """Write one finished piece: "split" or "tokenizer", once, or a "shard"."""
        self._append({kind: about}, "ab")
        self._take({kind: about})

    def _take(self, line: dict[str, Any]) -> None:
        ((kind, about),) = line.items()
        if kind == "shard":
            self.shards.append(about)
        else:
            self.done[kind] = about

    def _read(self) -> list[dict[str, Any]]:
        """The whole lines; what was being written when the process was killed is cut off."""
        if not self.path.is_file():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        try:
            lines = [dict(json.loads(line)) for line in whole.decode().splitlines()]
            if any(len(line) != 1 for line in lines):
                raise ValueError("a line with more than one entry")
        except ValueError as error:
            problem = f"the journal of an earlier preparation is damaged ({error})"
            raise DataError(problem, where=str(self.path), cure=ANOTHER) from error
        return lines

    def _append(self, line: dict[str, Any], mode: str) -> None:
        with self.path.open(mode) as file:
            file.write((json.dumps(jsonable(line)) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())


def earlier_settings(where: Path) -> dict[str, Any]:
    """The settings of the tokens that are here, finished or begun; {} when there are none that can be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if (where / META).is_file():
            return dict(json.loads((where / META).read_text(encoding="utf-8"))["settings"])
        with (where / JOURNAL).open(encoding="utf-8") as lines:
            return dict(json.loads(lines.readline())["settings"])
    return {}


def refuse_other_settings(before: dict[str, Any], now: dict[str, Any], where: Path) -> None:
    """Raise DataError, naming the settings, when a directory holds tokens that were prepared otherwise."""
    now = jsonable(now)
    different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if different:
        told = "; ".join(f"{key} was {_short(before.get(key))} and is {_short(now.get(key))} now" for key in different)
        raise DataError(f"the directory holds another preparation: {told}", where=str(where), cure=ANOTHER)


def _short(value: Any) -> str:
    """A setting in few characters; texts by name and hash."""
    if isinstance(value, list):
        hashes = ("sha256", "revision", "names_and_sizes_sha256")
        return ", ".join(f"{text['name']} ({next(filter(None, map(text.get, hashes)), '?')[:8]})" for text in value)
    text = json.dumps(value)
    return text if len(text) <= 90 else f"{text[:87]}..."


@contextlib.contextmanager
def written(directory: Path) -> Iterator[None]:
    """Turn what the file system raises, or a library that writes, into one DataError."""
    try:
        yield
    except LensGeometryError:
        raise
    except Exception as error:
        full = is_full(error)
        if not full and not isinstance(error, OSError):
            raise
        problem = "the disk is full" if full else f"the tokens cannot be written ({error})"
        first = "free some space" if full else "choose a directory that you may write to"
        cure = f"{first}, and run the same preparation again: it goes on where it was"
        raise DataError(problem, where=str(directory), cure=cure) from error
