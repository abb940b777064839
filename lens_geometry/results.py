"""A result is a tidy table plus everything needed to know what it is a table of."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import filelock
import pandas as pd
import plotly.graph_objects as go

from lens_geometry import plots
from lens_geometry.errors import ResultError

VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1">'  # phones lay out 980 px without it
RESULT_FILES = ("table.parquet", "table.csv", "meta.json", "figure.html")
PACKAGES = ("lens-geometry", "torch", "transformer-lens", "transformers", "numpy", "pandas", "scipy")


@dataclass
class Result:
    """What an experiment returns.

    Attributes:
        experiment: the experiment's name, such as `"profile"`; it chooses the figure.
        table: one tidy pandas table, one row per measured number.
        meta: provenance (model, data, settings, seed, versions, token mask, counts of what failed).
    """

    experiment: str
    table: pd.DataFrame
    meta: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Result({self.experiment!r}, {len(self.table)} rows; see .table, .meta, .plot(), .save(directory))"

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Write `table.parquet`, `table.csv`, `meta.json` and `figure.html`; returns the directory.

        Every file is written beside its place and then moved there, so a full disk or a kill leaves
        the previous file whole. Raises ResultError when the directory cannot be written.
        """
        where = Path(directory)
        try:
            where.mkdir(parents=True, exist_ok=True)
            replace_file(where / "table.parquet", lambda path: self.table.to_parquet(path, index=False))
            replace_file(where / "table.csv", lambda path: self.table.to_csv(path, index=False))
            replace_file(where / "meta.json", lambda path: path.write_text(self._meta_json(), encoding="utf-8"))
            figure = self.plot()
            page = figure.to_html(include_plotlyjs=True).replace("<head>", f"<head>{VIEWPORT}", 1)
            replace_file(where / "figure.html", lambda path: path.write_text(page, encoding="utf-8"))
        except OSError as error:
            raise ResultError(
                f"the result could not be written ({error.strerror or error})",
                where=str(where),
                cure="free space or choose another --out; what was there before is untouched",
            ) from error
        return where

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Result:
        """Read what `save` wrote. Raises ResultError when a file is missing or damaged."""
        where = Path(directory)
        try:
            meta = json.loads((where / "meta.json").read_text(encoding="utf-8"))
            return cls(meta["experiment"], pd.read_parquet(where / "table.parquet"), meta)
        except (OSError, ValueError, KeyError) as error:
            raise ResultError(
                f"no readable result here ({type(error).__name__}: {error})",
                where=str(where),
                cure="pass a directory that an experiment wrote, with meta.json and table.parquet in it",
            ) from error

    def plot(self) -> go.Figure:
        """The experiment's plotly figure, drawn from the table alone."""
        return plots.figure(self.experiment, self.table, self.meta)

    def _meta_json(self) -> str:
        return json.dumps(jsonable({**self.meta, "experiment": self.experiment}), indent=2, ensure_ascii=False)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a number depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def jsonable(value: Any) -> Any:
    """`value` in JSON's own types: tuples and ranges become lists, paths strings, NaN and inf strings."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range, set, frozenset)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if hasattr(value, "item") and getattr(value, "size", None) == 1:
        return jsonable(value.item())
    return str(value)


@contextlib.contextmanager
def alone(directory: Path, doing: str) -> Iterator[None]:
    """Make a directory and hold its lock while something is done there. Raises ResultError where it is held."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(directory / ".lock")
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise ResultError(
            f"another process is {doing} in this directory", where=str(directory), cure="wait for it, or choose another"
        ) from error
    except OSError as error:
        raise ResultError(
            f"the directory cannot be written ({error.strerror or error})", where=str(directory), cure="choose another"
        ) from error
    try:
        yield
    finally:
        lock.release()


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Write through a temporary file in the same directory, then move it over `path` in one step."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        umask = os.umask(0)  # mkstemp's file is its owner's alone; a result is as readable as any new file
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
