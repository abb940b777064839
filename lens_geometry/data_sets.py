"""Hugging Face data sets by name: `hf:PATH[:CONFIG[:SPLIT[:COLUMN]]]`, whole or row by row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lens_geometry.errors import DataError


@dataclass(frozen=True)
class DataSet:
    """What a name says. `joined`: the rows are the paragraphs of one long document."""

    name: str
    path: str
    config: str
    split: str
    column: str
    joined: bool

    @property
    def source(self) -> str:
        config = self.config or "default"
        return f"Hugging Face data set {self.path}, config {config}, split {self.split}, column {self.column}"


def named(name: str) -> DataSet:
    """The data set of a name `hf:...` or `hf-joined:...`. Raises DataError for a name of another form."""
    kind, *parts = name.split(":")
    if not parts or not parts[0] or len(parts) > 4:
        raise DataError("this is not a data set's name", where=name, cure="write hf:PATH[:CONFIG[:SPLIT[:COLUMN]]]")
    path, config, split, column = (parts + [""] * 4)[:4]
    return DataSet(name, path, config, split or "test", column or "text", kind == "hf-joined")


def open_rows(data_set: DataSet, *, streaming: bool, revision: str | None = None) -> tuple[Any, str]:
    """The rows as `datasets` gives them, and the licence. Raises DataError for a column that is not there.

    Fails within seconds without a connection; what else `datasets` raises is for `readable` to explain.
    """
    import datasets  # slow to import, and not needed offline

    if not Path(data_set.path).exists() and revision is None:
        require_hub(data_set.path, data_set.name)
    rows = datasets.load_dataset(
        data_set.path, data_set.config or None, split=data_set.split, streaming=streaming, revision=revision
    )
    if data_set.column not in (rows.column_names or [data_set.column]):
        cure = f"choose one of {', '.join(rows.column_names)}"
        raise DataError(f"the data set has no column {data_set.column!r}", where=data_set.name, cure=cure)
    return rows, getattr(rows.info, "license", "") or "see the data set's page"


@contextlib.contextmanager
def readable(name: str, cure: str = "check its path, config and split on its page") -> Iterator[None]:
    """Turn whatever the readers of `datasets` raise into one DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        problem = f"the data set cannot be read ({type(error).__name__}: {str(error).split(chr(10))[0]})"
        raise DataError(problem, where=name, cure=cure) from error


def row_texts(rows: Iterable[dict[str, Any]], data_set: DataSet) -> Iterator[str]:
    """The text of each row; empty rows separate others and are passed over."""
    return (text for row in rows if (text := row_text(row, data_set)))


def row_text(row: dict[str, Any], data_set: DataSet) -> str:
    """The text of a row, "" when it is only white space."""
    text = row.get(data_set.column)
    if not isinstance(text, str):
        cure = "name a column of strings: hf:PATH:CONFIG:SPLIT:COLUMN"
        raise DataError(f"column {data_set.column!r} holds {type(text).__name__}", where=data_set.name, cure=cure)
    return plain(text) if text.strip() else ""


def plain(text: str) -> str:
    """Text with line feeds for line ends, and without a byte order mark."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def require_hub(path: str, name: str, *, instead: str = "bundled text (austen, moby-dick) or a local .txt") -> Any:
    """What the hub says of this data set, or None when it is out of reach but an earlier download is in the cache.

    Raises DataError when there is neither, and for a data set that the hub does not know.
    """
    import datasets
    import huggingface_hub
    from datasets.naming import camelcase_to_snakecase
    from huggingface_hub.errors import HfHubHTTPError

    *namespace, short = path.split("/")
    cached = Path(datasets.config.HF_DATASETS_CACHE, "___".join([*namespace, camelcase_to_snakecase(short)]))
    try:  # one request without retries, where `load_dataset` alone would retry for half a minute
        return huggingface_hub.HfApi().dataset_info(path, timeout=10)
    except HfHubHTTPError as error:
        problem = "the hub has no such data set, or it is not open to you"
        raise DataError(problem, where=name, cure="check the path, or log in with `hf auth login`") from error
    except Exception as error:
        if cached.exists():
            return None
        cure = f"go online, or use {instead}"
        raise DataError(
            f"the Hugging Face hub is out of reach ({type(error).__name__})", where=name, cure=cure
        ) from error
