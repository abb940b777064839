"""The cache of finished model directories, and a .gguf turned into one."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import torch
import transformers

from lens_geometry import cache, convert, fetch
from lens_geometry.errors import ModelError

TEXT = "In 1234, Émile’s café\n\tsold 56 «tartes»  —  ▁ok▁ 日本 <|im_end|>\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LENS_GEOMETRY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_only_one_of_two_builders_builds(home: Path) -> None:
    target, builders = home / "models" / "m", []

    def build(name: str) -> None:
        with cache.building(target) as unfinished:
            if unfinished is not None:
                builders.append(name)
                time.sleep(0.05)
                (unfinished / "weights").write_text(name)
                cache.write_marker(unfinished, {})

    threads = [threading.Thread(target=build, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builders) == 1
    assert (target / "weights").read_text() == builders[0]


def test_an_error_while_building_leaves_nothing(home: Path) -> None:
    def build() -> None:
        with cache.building(home / "m") as unfinished:
            assert unfinished is not None
            (unfinished / "half").write_text("x")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        build()
    assert [path.name for path in home.iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LENS_GEOMETRY_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="LENS_GEOMETRY_CACHE"):
        fetch.smollm2_directory()


def test_without_the_variable_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LENS_GEOMETRY_CACHE")
    assert cache.cache_directory().name == "lens_geometry"


def no_conversion(*_: Any, **__: Any) -> None:
    raise AssertionError("it was converted again")


def test_a_gguf_is_converted_once_and_again_when_it_changed(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(gguf.read_bytes())
    first = convert.gguf_directory(mine, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(convert, "fill_from_gguf", no_conversion)
        assert convert.gguf_directory(mine) == first
    os.utime(mine, (1, 1))
    assert convert.gguf_directory(mine, progress=False) != first


def test_converted_weights_are_those_that_transformers_dequantises(gguf: Path) -> None:
    state = torch.random.get_rng_state()
    directory = convert.gguf_directory(gguf, progress=False)
    assert torch.equal(state, torch.random.get_rng_state())
    reference = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    converted = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert not hasattr(converted.config, "quantization_config")
    weights = converted.state_dict()
    assert weights.keys() == reference.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in reference.state_dict().items())


def test_smollm_tokenizer_splits_digits_and_decodes_exactly(gguf: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(convert.gguf_directory(gguf, progress=False))
    assert tokenizer.tokenize(" 1234") == ["Ġ", "1", "2", "3", "4"]
    ids = tokenizer(TEXT).input_ids
    assert ids[0] != tokenizer.bos_token_id
    assert tokenizer.decode(ids) == TEXT
    assert "te" in tokenizer.tokenize(TEXT)  # merges are in use
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(200), os.urandom(300)])
def test_a_damaged_gguf_is_one_error_and_leaves_nothing(content: bytes, tmp_path: Path, home: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"cannot be converted.*bad\.gguf.*Cure: check that the file is whole"):
        convert.gguf_directory(path, progress=False)
    assert not [entry for entry in (home / "models").iterdir() if entry.is_dir()]


def test_a_truncated_gguf_is_one_error(gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf.read_bytes()[:-4000])
    with pytest.raises(ModelError, match="cannot be converted"):
        convert.gguf_directory(path, progress=False)
