"""Names on the Hugging Face hub: down, silent, up, or only in its cache; and the list of models."""

from __future__ import annotations

import http.server
import shutil
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import zoo

from lens_geometry import bundled, loaders, models
from lens_geometry.edits.suppressing import Suppression, Suppressor
from lens_geometry.errors import ModelError
from lens_geometry.suppressed import save_suppression


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LENS_GEOMETRY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Put a hub in place: "silent" accepts and never answers, "up" answers everything with 404."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    servers: list[socketserver.BaseServer] = []

    class Silent(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            time.sleep(1.5)

    class Up(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *args: Any) -> None:
            pass

    def put(kind: str) -> None:
        handler = {"silent": Silent, "up": Up}[kind]
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
        server.daemon_threads, server.block_on_close = True, False
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)

    yield put
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("name", ["EleutherAI/pythia-14m", "smollm2-135", "Tiny-Random-Lama"])
def test_without_a_hub_a_name_fails_at_once_and_offers_what_works(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(ModelError, match=r"hub cannot be reached.*Cure: .*tiny-random-llama.*smollm2-135m") as caught:
        models.load_model(name)
    assert time.monotonic() - start < 4
    assert ("if you meant" in str(caught.value)) == ("pythia" not in name)


def test_a_hub_that_never_answers_is_given_up(hub: Callable[[str], None]) -> None:
    hub("silent")
    start = time.monotonic()
    assert not models.hub_reachable(timeout=0.2)
    assert time.monotonic() - start < 1


def test_a_hub_name_is_booted_with_what_was_asked(hub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    hub("up")
    asked: dict[str, Any] = {}

    class Bridge:
        @staticmethod
        def boot_transformers(name: str, **settings: Any) -> Any:
            asked.update(name=name, **settings)
            return zoo.build("llama_gqa", fresh=True)

    monkeypatch.setattr(loaders, "bridge_class", lambda: Bridge)
    monkeypatch.setattr(loaders, "hub_file", lambda *_: None)
    model = models.load_model("org/name", dtype="bfloat16", device="cpu", revision="v1")
    assert asked == {
        "name": "org/name",
        "dtype": torch.bfloat16,
        "device": "cpu",
        "revision": "v1",
        "trust_remote_code": False,
    }
    about = models.describe(model)
    assert (about["name"], about["revision"]) == ("org/name", "v1")
    assert about["source"].endswith("/org/name")


def test_the_edit_that_a_hub_model_was_trained_under_is_fetched_with_it(
    tmp_path: Path, hub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub("up")
    save_suppression(tmp_path, Suppressor(zoo.build("llama_gqa"), Suppression("value")))
    files = {"geometry.json": tmp_path / "geometry.json", "gate.safetensors": None}
    monkeypatch.setattr(loaders, "from_hub", lambda *_, **__: zoo.build("llama_gqa", fresh=True))
    monkeypatch.setattr(loaders, "hub_file", lambda name, file, revision: files[file])
    assert models.describe(models.load_model("org/name"))["suppression"]["status"] == "attached"
    about = models.describe(models.load_model("org/name", without_suppression=True))
    assert about["suppression"]["status"] == "left out"


def test_a_hub_that_does_not_say_whether_there_is_an_edit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the hub")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", silent)
    with pytest.raises(ModelError, match=r"does not say whether.*geometry\.json"):
        loaders.hub_file("org/name", "geometry.json", None)


def test_a_name_that_the_hub_does_not_know_is_one_clear_error(
    hub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub("up")

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("x is not a local folder and is not a valid model identifier listed on ...")

    monkeypatch.setattr(loaders, "from_hub", refuse)
    with pytest.raises(ModelError, match=r"hub has no such model.*\[tiny-random-lama\].*tiny-random-llama"):
        models.load_model("tiny-random-lama")


def test_a_model_in_the_hubs_cache_is_loaded_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = bundled.bundled_directory("tiny-random-llama")
    snapshot = shutil.copytree(directory, tmp_path / "snapshots" / "c0ffee")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    about = models.describe(models.load_model("org/name"))
    assert (about["name"], about["revision"]) == ("org/name", "c0ffee")
    assert about["source"] == f"{huggingface_hub.constants.ENDPOINT}/org/name"


def test_known_models_lists_what_is_here_and_asks_the_hub(hub: Callable[[str], None]) -> None:
    hub("up")
    table = models.known_models()
    assert list(table.columns) == ["name", "kind", "where", "ready", "size", "note"]
    rows = table.set_index("name")
    assert all(rows.loc[name, "ready"] for name in bundled.BUNDLED)
    assert (rows.loc["smollm2-135m", "kind"], rows.loc["smollm2-135m", "ready"]) == ("offline package", False)
    assert rows.loc["any Hugging Face name", "note"] == "reachable"
