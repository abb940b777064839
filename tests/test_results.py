"""Results on disk: whole, or as they were before."""

import errno
import json
import os
import stat

import numpy as np
import pandas as pd
import pytest
import tables

from lens_geometry.errors import ResultError
from lens_geometry.results import Result, jsonable, replace_file, versions


def test_what_is_saved_is_what_is_loaded(tmp_path):
    result = tables.sweep()
    loaded = Result.load(result.save(tmp_path / "deep" / "folder"))
    assert loaded.experiment == "scaling_sweep"
    pd.testing.assert_frame_equal(loaded.table, result.table)
    assert loaded.meta["model"] == jsonable(result.meta["model"])
    assert loaded.plot().data


def test_the_csv_holds_the_same_rows(tmp_path):
    result = tables.sweep()
    result.save(tmp_path)
    assert np.allclose(pd.read_csv(tmp_path / "table.csv")["loss"], result.table["loss"])


def test_a_full_disk_leaves_the_earlier_result_whole(tmp_path, monkeypatch):
    tables.sweep().save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.raises(ResultError, match="No space left.*untouched"):
        tables.sweep(tables.sweep_table().head(20)).save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_write_that_dies_leaves_no_scraps(tmp_path):
    def die(path):
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "table.csv", die)
    assert list(tmp_path.iterdir()) == []


def test_a_saved_file_is_as_readable_as_any_other(tmp_path):
    (tmp_path / "plain").write_text("")
    replace_file(tmp_path / "ours", lambda path: path.write_text(""))
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "ours")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("name", ["meta.json", "table.parquet"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_or_missing_file_is_one_clear_error(tmp_path, name, damage):
    tables.sweep().save(tmp_path)
    if damage == "missing":
        (tmp_path / name).unlink()
    else:
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ResultError, match="no readable result"):
        Result.load(tmp_path)


def test_meta_is_strict_json_whatever_is_in_it():
    odd = {"nan": float("nan"), "inf": -np.inf, "np": np.float32(0.5), "range": range(3), 4: {"set": {1}}, "x": object}
    text = json.dumps(jsonable(odd), allow_nan=False)
    assert json.loads(text)["nan"] == "nan"
    assert json.loads(text)["np"] == 0.5
    assert json.loads(text)["range"] == [0, 1, 2]
    assert json.loads(text)["4"] == {"set": [1]}


def test_versions_name_what_a_number_depends_on():
    found = versions()
    assert {"python", "torch", "transformer-lens", "transformers", "lens-geometry"} <= set(found)
    assert found["torch"][0].isdigit()
