"""Finished conditions of a run on disk, so that it can be stopped at any point and goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from lens_geometry.errors import ResultError
from lens_geometry.metrics import SequenceLosses
from lens_geometry.results import jsonable


class Journal:
    """Finished conditions, one JSON line each, so that a killed run loses at most the one it was in.

    Numbers survive the round trip to the last bit. Without a path it only remembers.
    """

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self.path, self.losses = path, dict[str, SequenceLosses]()
        self.measured: dict[str, dict[str, Any]] = {}  # what else was seen of a condition
        if path is None:
            return
        head = json.dumps(jsonable(about), sort_keys=True)
        if path.exists() and path.stat().st_size:
            self._read(path, head)
        else:
            self._write(head + "\n", "wb")

    def add(self, key: str, losses: SequenceLosses, measured: dict[str, Any] | None = None) -> None:
        self.losses[key] = losses
        if measured:
            self.measured[key] = measured
        if self.path is not None:
            line: dict[str, Any] = {name: array.tolist() for name, array in losses._asdict().items()}
            line = {"key": key, **line, **({"measured": measured} if measured else {})}
            self._write(json.dumps(line) + "\n", "ab")

    def check_same(self, before: SequenceLosses, now: SequenceLosses) -> None:
        """Raise ResultError when the unedited model no longer gives the losses that the journal holds."""
        same = before.sums.shape == now.sums.shape and (before.counts == now.counts).all()
        if not same or not np.allclose(before.sums, now.sums, rtol=1e-5, atol=1e-5):
            raise ResultError(
                "the unedited model gives other losses than when this journal was begun (its configuration, its hooks, "
                "the token mask or the machine have changed)",
                where=str(self.path),
                cure="give another --out directory, or delete this file to start again",
            )

    def _read(self, path: Path, head: str) -> None:
        cure = "give another --out directory, or delete this file to start again"
        try:
            text = path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            if not whole:  # killed while writing the first line
                self._write(head + "\n", "wb")
                return
            first, *lines = whole.decode("utf-8").splitlines()
            found = [json.loads(line) for line in lines]
            before = dict(json.loads(first))
            losses = {
                line["key"]: SequenceLosses(
                    np.array(line["sums"], np.float64), np.array(line["counts"]), np.array(line["nonfinite"])
                )
                for line in found
            }
            if len({len(array) for one in losses.values() for array in one}) > 1:
                raise ValueError("lines of different lengths")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ResultError(
                f"the journal of an earlier run is damaged ({error})", where=str(path), cure=cure
            ) from error
        now = json.loads(head)
        different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        if different:
            raise ResultError(
                f"an earlier run left its journal here, and it differs in: {', '.join(different)}",
                where=str(path),
                cure=cure,
            )
        self.losses.update(losses)
        self.measured.update({line["key"]: line["measured"] for line in found if "measured" in line})
        if len(whole) < len(text):  # killed while writing the last line
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def _write(self, text: str, mode: str) -> None:
        assert self.path is not None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode) as file:
                file.write(text.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ResultError(
                f"the journal could not be written ({error.strerror or error}); what it holds is kept",
                where=str(self.path),
                cure="free space or choose another --out, and run the same command again to go on",
            ) from error
