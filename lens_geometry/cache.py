"""The cache of models on disk: finished Hugging Face directories, each with its provenance.

Everything lies under `cache_directory()`, which the environment variable LENS_GEOMETRY_CACHE moves. A
directory is finished when it holds `lens_geometry.json`; it is filled under another name and gets its own in
one step, under a lock, so neither a killed nor a second process leaves a broken one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import platformdirs
from tqdm import tqdm

from lens_geometry.errors import ModelError

MARKER = "lens_geometry.json"
_MOVE = "set LENS_GEOMETRY_CACHE to a directory that you may write to"


def cache_directory() -> Path:
    """Where models are kept: $LENS_GEOMETRY_CACHE, otherwise the user's cache directory."""
    if chosen := os.environ.get("LENS_GEOMETRY_CACHE"):
        return Path(chosen).expanduser()
    return platformdirs.user_cache_path("lens_geometry", appauthor=False)


def models_directory() -> Path:
    """Where the finished model directories are kept."""
    return cache_directory() / "models"


def read_marker(directory: Path) -> dict[str, Any] | None:
    """The provenance of a finished directory, or None when it is unfinished, damaged or not one of ours."""
    try:
        marker: dict[str, Any] = json.loads((directory / MARKER).read_text(encoding="utf-8"))
        whole = all((directory / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return marker if whole else None


def write_marker(directory: Path, provenance: dict[str, Any]) -> None:
    """Write the provenance and the size of every file there, which makes the directory a finished one."""
    files = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    text = json.dumps({**provenance, "files": files}, indent=2)
    (directory / MARKER).write_text(text + "\n", encoding="utf-8")


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path | None]:
    """Hold the lock of `target`; yield a temporary directory to fill, or None when it is finished already.

    On a clean exit the directory is named `target` in one step; after an error it is removed. The body must
    leave a marker (`write_marker`) in it. Other processes that want the same target wait.

    Raises:
        ModelError: the cache cannot be written, or the disk is full.
    """
    lock = filelock.FileLock(f"{target}.lock")
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(filelock.Timeout):
            lock.acquire(timeout=1)
        if not lock.is_locked:
            say(f"another process is preparing {target.name}; waiting for it")
            lock.acquire()
        if read_marker(target) is not None:
            yield None
            return
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        yield unfinished
        shutil.rmtree(target, ignore_errors=True)
        unfinished.replace(target)
    except OSError as error:
        raise disk_error(error, target.parent) from error
    finally:
        if lock.is_locked:
            shutil.rmtree(unfinished, ignore_errors=True)
            lock.release()


def disk_error(error: BaseException, where: Path) -> ModelError:
    """What to say of an error of the file system."""
    if is_full(error):
        return ModelError(
            "the disk is full",
            where=str(where),
            cure="free some space (smollm2-135m needs 800 MB) or set LENS_GEOMETRY_CACHE to a directory on a "
            "larger disk, and run it again; what was downloaded is kept",
        )
    return ModelError(f"cannot write to the cache ({error})", where=str(where), cure=_MOVE)


def is_full(error: BaseException) -> bool:
    """Whether an error, or what caused it, says that no space is left."""
    text = f"{error} {error.__cause__ or ''}"
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text


def sha256_of(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def say(line: str) -> None:
    """One line to standard error, above any progress bar."""
    tqdm.write(f"lens_geometry: {line}", file=sys.stderr)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars, for what takes a second or two."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Cannot (dis|en)able progress bars")
        logging.disable_progress_bar()
        try:
            yield
        finally:
            if shown:
                logging.enable_progress_bar()
