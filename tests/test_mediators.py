"""The mediators' experiment: against plain loops over two passes, with its statistics, its journal, and its figures."""

import json
import math

import numpy as np
import pytest
import torch
import zoo

from lens_geometry import Batch, perturb
from lens_geometry.data import Tokens, tokenize
from lens_geometry.edits.mediating import MEDIATORS, MediatorReader, angle
from lens_geometry.errors import DataError, ResultError, SiteError
from lens_geometry.experiments import mediators, scaling_sweep
from lens_geometry.experiments.mediator_rows import Measured, Pushed, as_table, rows
from lens_geometry.findings import NO_GROWTH, findings, mediators_sentence
from lens_geometry.mediator_plots import MEDIATORS as NAMES
from lens_geometry.mediator_plots import mediators_figure
from lens_geometry.metrics import SequenceLosses
from lens_geometry.report import write_report

QUIET = {"progress": False, "max_sequences": None}
PUSHED = (1, 2)


def passes(model, ids, hooks=()):
    """Every activation that is needed, as nested lists of floats, and the mean loss of each sequence."""
    names = ["hook_resid_pre", "hook_attn_out", "hook_mlp_out", "attn.hook_pattern", "attn.hook_q", "attn.hook_k"]
    kept = {}
    keep = [
        (f"blocks.{layer}.{name}", lambda t, hook, key=(layer, name): kept.update({key: t.double().tolist()}))
        for layer in range(4)
        for name in [*names, "hook_resid_post"]
    ]
    with torch.no_grad(), model.hooks(fwd_hooks=[*hooks, *keep]):
        losses = model(ids, return_type="loss", loss_per_token=True)
    return kept, losses.double().mean(1).tolist()


def norm(v):
    return math.sqrt(math.fsum(x * x for x in v))


def minus(a, b):
    return [x - y for x, y in zip(a, b, strict=True)]


def plain_mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


@pytest.fixture(scope="module")
def compared():
    """A result, and the passes it is about: three sequences, two seeds, one of them compared here."""
    model, ids = zoo.build("gpt2", dtype=torch.float64), zoo.tokens(3, 7)
    settings = {"layers": "1-2", "displacements": (0.2,), "seeds": 2, "seed": 5, "batch_size": 2}
    result = mediators(model, ids, variants=("default",), **settings, **QUIET)
    runs = {}
    for kind in ("angular", "magnitude"):
        pushes = []
        hooks = perturb(
            model, kind, 0.2, layers=PUSHED, seed=6, batch=Batch(ids=range(3)),
            record=lambda layer, before, after, *_, pushes=pushes: pushes.append((after - before).tolist()),
        )  # fmt: skip
        runs[kind] = (*passes(model, ids, hooks), pushes)
    return result, passes(model, ids), runs


def one(table, mediator, kind, measure="mean", layer=None, seed=6):
    rows = table[(table["mediator"] == mediator) & (table["kind"] == kind) & (table["measure"] == measure)]
    rows = rows[rows["seed"].isna() if seed is None else rows["seed"].eq(seed).fillna(False)]
    rows = rows[rows["layer"].isna() if layer is None else rows["layer"].eq(layer).fillna(False)]
    assert len(rows) == 1, (mediator, kind, measure, layer)
    return rows.iloc[0]


TOKENS = [(b, i) for b in range(3) for i in range(1, 7)]


@pytest.mark.parametrize("kind", ["angular", "magnitude"])
def test_streams_and_branches_are_those_of_plain_loops(compared, kind):
    result, (clean, _), runs = compared
    after = runs[kind][0]
    for level in range(5):
        key = (level, "hook_resid_pre") if level < 4 else (3, "hook_resid_post")
        pairs = [(clean[key][b][i], after[key][b][i]) for b, i in TOKENS]
        expected = {
            "displacement": [norm(minus(new, old)) for old, new in pairs],
            "relative_displacement": [norm(minus(new, old)) / norm(old) for old, new in pairs],
            "norm_ratio": [norm(new) / norm(old) for old, new in pairs],
            "angle": [
                math.degrees(
                    math.acos(min(1, math.fsum(x * y for x, y in zip(old, new, strict=True)) / norm(old) / norm(new)))
                )
                for old, new in pairs
            ],
        }
        for mediator, values in expected.items():
            row = one(result.table, mediator, kind, layer=level)
            tolerance = 1e-5 if mediator == "angle" else 1e-12  # of acos near 1
            assert row["value"] == pytest.approx(plain_mean(values), abs=tolerance)
            assert row["clean"] == (mediator == "norm_ratio")
            assert row["change"] == row["value"] - row["clean"]
            assert row["pushes"] == min(max(level, 0), 2)
    for hook, mediator in (("hook_attn_out", "attention_output"), ("hook_mlp_out", "mlp_output")):
        for layer in range(4):
            pairs = [(clean[layer, hook][b][i], after[layer, hook][b][i]) for b, i in TOKENS]
            moved = [norm(minus(new, old)) for old, new in pairs]
            row = one(result.table, f"{mediator}_displacement", kind, layer=layer)
            assert row["value"] == pytest.approx(plain_mean(moved), abs=1e-12)
            shares = [m / norm(old) for m, (old, _) in zip(moved, pairs, strict=True)]
            row = one(result.table, f"{mediator}_relative_displacement", kind, layer=layer)
            assert row["value"] == pytest.approx(plain_mean(shares), abs=1e-12)
    assert one(result.table, "displacement", kind, layer=0)["value"] == 0.0  # before the first push, to the last bit


@pytest.mark.parametrize("kind", ["angular", "magnitude"])
def test_attention_is_that_of_plain_loops_in_both_runs(compared, kind):
    result, (clean, _), runs = compared
    for layer in range(4):
        for acts, column in ((clean, "clean"), (runs[kind][0], "value")):
            entropies, firsts, alignments = [], [], []
            for b, i in TOKENS:
                for h in range(4):
                    row = acts[layer, "attn.hook_pattern"][b][h][i]
                    entropies.append(-math.fsum(a * math.log(a) for a in row if a > 0))
                    firsts.append(row[0])
                    q, keys = acts[layer, "attn.hook_q"][b][i][h], [k[h] for k in acts[layer, "attn.hook_k"][b]]
                    cosines = [math.fsum(x * y for x, y in zip(q, k, strict=True)) / norm(q) / norm(k) for k in keys]
                    alignments.append(math.fsum(a * c for a, c in zip(row, cosines, strict=True)))
            for mediator, values in (
                ("attention_entropy", entropies),
                ("attention_to_first", firsts),
                ("query_key_alignment", alignments),
            ):
                found = one(result.table, mediator, kind, layer=layer)
                assert found[column] == pytest.approx(plain_mean(values), abs=1e-12)


@pytest.mark.parametrize("kind", ["angular", "magnitude"])
def test_growth_is_measured_in_pushes_beside_the_pushes_own_sum(compared, kind):
    result, (clean, _), runs = compared
    after, _, pushes = runs[kind]
    squares = {"growth": [], "growth_of_pushes": []}
    for n, layer in enumerate(PUSHED, 1):
        ratios = {name: [] for name in squares}
        for b, i in TOKENS:
            size = plain_mean(norm(push[b][i]) ** 2 for push in pushes[:n])
            total = [math.fsum(push[b][i][x] for push in pushes[:n]) for x in range(zoo.D_MODEL)]
            moved = minus(after[layer, "hook_resid_pre"][b][i], clean[layer, "hook_resid_pre"][b][i])
            ratios["growth"].append(norm(moved) ** 2 / size)
            ratios["growth_of_pushes"].append(norm(total) ** 2 / size)
        for name, values in ratios.items():
            squares[name].append(math.sqrt(plain_mean(values)))
            row = one(result.table, name, kind, layer=layer)
            assert row["value"] == pytest.approx(squares[name][-1], rel=1e-12)
            assert row["pushes"] == n
    for name, (first, second) in squares.items():
        assert first == pytest.approx(1.0)
        row = one(result.table, name, kind, "growth_exponent")
        assert row["value"] == pytest.approx(math.log2(second / first))


def test_losses_come_from_the_same_passes_and_seeds_are_pooled(compared):
    result, (_, clean), runs = compared
    row = one(result.table, "loss", "angular")
    assert row["value"] == pytest.approx(plain_mean(runs["angular"][1]), abs=1e-9)
    assert row["clean"] == pytest.approx(plain_mean(clean), abs=1e-9)
    for mediator, layer in (("loss", None), ("angle", 3), ("attention_entropy", 2)):
        pooled, *alone = (one(result.table, mediator, "angular", layer=layer, seed=s) for s in (None, 5, 6))
        assert pooled["value"] == pytest.approx(plain_mean(row["value"] for row in alone))
        assert pooled["low"] <= pooled["value"] <= pooled["high"]
        assert (pooled["n_seeds"], alone[0]["n_seeds"]) == (2, 1)


def test_few_points_give_no_share_and_say_so(compared):
    result, *_ = compared
    shares = result.table[result.table["measure"].str.startswith("explained")]
    assert shares["value"].isna().all()
    assert set(shares["status"]) == {"few_points"}
    assert set(shares["n_points"]) == {6}
    assert any("too few" in warning for warning in result.meta["warnings"])
    assert result.meta["counts"]["conditions"] == 4


FAST = [("llama_gqa", "bridge"), ("neox", "bridge"), ("opt", "bridge"), ("llama_gqa", "native")]


@pytest.mark.parametrize(
    ("name", "backend"), [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in zoo.cases()]
)
def test_every_class_of_model_is_measured(name, backend):
    model = zoo.build(name, backend)
    result = mediators(model, zoo.tokens(2, 8), layers="1-2", variants=("default",), seeds=1, **QUIET)
    table = result.table
    rotary_native = backend == "native" and name == "llama_gqa"
    expected = {"loss", *MEDIATORS} - ({"query_key_alignment"} if rotary_native else set())
    assert set(table["mediator"]) == expected
    assert any("query-key alignment left out in every layer" in w for w in result.meta["warnings"]) == rotary_native
    moved = table[(table["mediator"] == "relative_displacement") & (table["layer"] == 1) & table["seed"].isna()]
    np.testing.assert_allclose(moved["value"], 0.1, rtol=1e-4)  # the displacement that was asked for
    assert (table.loc[(table["mediator"] == "displacement") & (table["layer"] == 0), "value"] == 0).all()
    assert set(table["status"]) == {"ok", "few_points"}


def test_shared_noise_adds_up_where_fresh_noise_walks_at_random():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(4, 10)
    settings = {
        "layers": "all",
        "seeds": 2,
        "displacements": (0.05,),
        "variants": ("default", "shared_noise", "fixed_signs"),
    }
    table = mediators(model, ids, **settings, **QUIET).table
    alone = table[(table["mediator"] == "growth_of_pushes") & (table["measure"] == "growth_exponent")]
    found = alone[alone["seed"].isna()].set_index(["variant", "kind"])["value"]
    assert found["default", "angular"] == pytest.approx(0.5, abs=0.06)
    assert found["shared_noise", "angular"] > 0.85
    assert found["fixed_signs", "magnitude"] > found["default", "magnitude"] + 0.2
    assert found["fixed_signs", "angular"] == found["default", "angular"]  # signs are nothing to a turn


def made_up(n_sequences=30, seeds=2, slope=2.0, lost=()):
    """Runs whose loss change is `slope` times the angle's change and noise; entropy has nothing to do with it."""
    noise = np.random.default_rng(0)
    counts = np.ones((n_sequences, len(MEDIATORS), 3))
    counts[:, MEDIATORS.index("growth") :] = 0
    zero = np.zeros(n_sequences, np.int64)
    clean = Measured(np.zeros(counts.shape), counts, SequenceLosses(np.full(n_sequences, 30.0), zero + 10, zero))
    runs = []
    for number in range(seeds):
        sums = noise.normal(size=counts.shape) * (counts > 0)
        turned = sums[:, MEDIATORS.index("angle"), 1:].mean(1)  # from the first pushed layer on
        bad = zero.copy()
        bad[list(lost)] = 1
        losses = SequenceLosses(30.0 + 10 * slope * turned + noise.normal(size=n_sequences), zero + 10, bad)
        runs.append(Measured(sums, counts, losses) if number < seeds else None)
    return clean, runs


def test_the_mediator_that_makes_the_damage_explains_it():
    clean, runs = made_up()
    about = {"variant": "default", "kind": "angular", "displacement": 0.1, "unit": "relative"}
    table = as_table(rows(Pushed(about, (1,), (0, 1), tuple(runs)), clean, seed=0))
    shares = table[table["measure"] == "explained"].set_index("mediator")
    damage = np.concatenate([run.losses.sums - 30 for run in runs]) / 10
    turned = np.concatenate([run.sums[:, MEDIATORS.index("angle"), 1:].mean(1) for run in runs])
    assert shares.loc["angle", "value"] == pytest.approx(np.corrcoef(turned, damage)[0, 1] ** 2)
    assert shares.loc["angle", "low"] > 0.9
    assert shares.loc["attention_entropy", "high"] < 0.4
    assert (shares["n_points"] == 60).all()
    beyond = table[table["measure"] == "explained_beyond"].set_index("mediator")["value"]
    assert "relative_displacement" not in beyond.index
    assert beyond["angle"] > 0.9 * (1 - shares.loc["relative_displacement", "value"])


def test_losses_that_are_not_finite_and_pushes_that_are_impossible_are_counted():
    clean, runs = made_up(slope=0.05, lost=(0, 1))
    about = {"variant": "default", "kind": "angular", "displacement": 0.1, "unit": "relative"}
    table = as_table(rows(Pushed(about, (1,), (0, 1, 2), (*runs, None)), clean, seed=0))
    loss = table[table["mediator"] == "loss"]
    loss = loss.set_index(loss["seed"].fillna(-1))
    assert loss["status"].to_dict() == {-1: "impossible", 0: "nonfinite", 1: "nonfinite", 2: "impossible"}
    assert np.isnan(loss.loc[2, "value"])
    shares = table[table["measure"] == "explained"].set_index("mediator")
    assert (shares["n_points"] == 56).all()
    place = MEDIATORS.index("angle")
    turned = np.concatenate([run.sums[2:, place, 1:].mean(1) for run in runs])
    damage = np.concatenate([(run.losses.sums[2:] - 30) / 10 for run in runs])
    assert shares.loc["angle", "value"] == pytest.approx(np.corrcoef(turned, damage)[0, 1] ** 2, rel=1e-9)


def test_a_displacement_that_is_too_long_is_a_status_and_not_the_end():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 8)
    result = mediators(model, ids, layers="1", displacements=(0.1, 2.5), variants=("default",), seeds=1, **QUIET)
    loss = result.table[(result.table["mediator"] == "loss") & result.table["seed"].notna()]
    statuses = loss.set_index(["kind", "displacement"])["status"]
    assert statuses["angular", 2.5] == statuses["magnitude", 2.5] == "impossible"
    assert statuses["angular", 0.1] == "ok"
    assert result.meta["counts"]["impossible_conditions"] == 2
    assert any("one layer is perturbed" in warning for warning in result.meta["warnings"])


def test_places_that_were_turned_right_round_or_moved_less_than_asked_are_counted():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 8)
    table = mediators(model, ids, layers="1-2", displacements=(2.5,), variants=("as_run",), seeds=2, **QUIET).table
    loss = table[table["mediator"] == "loss"].set_index([table["kind"][table["mediator"] == "loss"], "seed"])
    flipped, clipped = loss["n_flipped"], loss["n_clipped"]
    assert clipped["angular"].tolist() == [56, 28, 28]  # every place of two layers
    assert not clipped["magnitude"].any()
    pooled, *alone = flipped["magnitude"]
    assert pooled == sum(alone)
    assert 0 < alone[0] < 28  # those that shrink


def test_a_stopped_run_goes_on_where_it_was_to_the_same_table(tmp_path, monkeypatch):
    model, ids = zoo.build("llama_gqa"), zoo.tokens(4, 8)
    settings = {"layers": "1-2", "seeds": 1, "variants": ("default",), "batch_size": 2, **QUIET}
    whole = mediators(model, ids, **settings, out=tmp_path / "whole").table
    path = tmp_path / "cut" / "journal.jsonl"
    path.parent.mkdir()
    lines = (tmp_path / "whole" / "journal.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 4 * 3
    path.write_bytes(b"".join(lines[:6]) + lines[6][:40])  # killed in the midst of a line
    passed = []
    start = MediatorReader.start
    monkeypatch.setattr(MediatorReader, "start", lambda self, mask: passed.append(len(mask)) or start(self, mask))
    again = mediators(model, ids, **{**settings, "batch_size": 4}, out=tmp_path / "cut").table
    monkeypatch.undo()
    assert passed[1:] == [4, 4, 4]  # clean, and both kinds, since some sequences lacked them
    np.testing.assert_allclose(*(table["value"].to_numpy(float) for table in (again, whole)), rtol=1e-5)
    written = path.read_text().splitlines()
    assert len(written) == len(lines)
    assert [json.loads(line)["key"] for line in written[1:6]] == [json.loads(line)["key"] for line in lines[1:6]]
    with pytest.raises(ResultError, match=r"differs in: settings\.unit"):
        mediators(model, ids, **{**settings, "unit": "absolute"}, out=tmp_path / "cut")
    mediators(model, ids, **{**settings, "seeds": 2}, out=tmp_path / "cut")
    assert len(path.read_text().splitlines()) == len(lines) + 2 * 4  # the second seed alone
    halved = [("blocks.3.hook_mlp_out", lambda tensor, hook: tensor / 2)]
    with model.hooks(fwd_hooks=halved), pytest.raises(ResultError, match="gives other losses"):
        mediators(model, ids, **settings, out=tmp_path / "cut")


def test_results_do_not_depend_on_batches_or_padding():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(3, 9)
    settings = {"layers": "1-2", "seeds": 1, **QUIET}
    one_by_one, together = (mediators(model, ids, **settings, batch_size=n).table for n in (1, 3))
    np.testing.assert_allclose(*(t["value"].to_numpy(float) for t in (one_by_one, together)), rtol=2e-4, atol=1e-6)
    tokens = tokenize(model, ids)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[1, 6:] = False
    other = ids.clone()
    other[1, 6:] = 7
    padded, again = (
        mediators(model, Tokens(i, mask, dict(tokens.meta)), **settings, variants=("default",)).table
        for i in (ids, other)
    )
    np.testing.assert_allclose(*(t["value"].to_numpy(float) for t in (padded, again)), rtol=1e-5, atol=1e-7)
    plain = together[together["variant"] == "default"]
    assert not np.allclose(padded["value"].dropna(), plain["value"].dropna())


def test_losses_are_the_sweeps_losses():
    model, ids = zoo.build("llama_gqa"), zoo.tokens(3, 9)
    table = mediators(model, ids, layers="1-2", seeds=1, variants=("default",), **QUIET).table
    sweep = scaling_sweep(model, ids, sites=("mlp",), parallel=(), perpendicular=(0.5,), controls=(), **QUIET).table
    assert table.loc[table["mediator"] == "loss", "clean"].iloc[0] == sweep["base_loss"].iloc[0]


def test_angles_are_exact_where_they_are_small():
    one = torch.tensor([1.0, 0.0])
    assert angle(one, torch.tensor([1.0, 1e-6])).item() == pytest.approx(math.degrees(1e-6), rel=1e-5)
    assert angle(one, torch.tensor([-2.0, 0.0])).item() == pytest.approx(180)
    assert angle(one, torch.zeros(2)).isnan()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"variants": ("sideways",)}, DataError, "sideways"),
        ({"variants": ("principal",)}, DataError, "principal"),
        ({"kinds": ()}, DataError, "kinds"),
        ({"displacements": (0.0,)}, DataError, "above 0"),
        ({"displacements": 0.1}, DataError, "tuple"),
        ({"seeds": 0}, DataError, "seeds is 0"),
        ({"layers": "9"}, SiteError, "layers 0 to 3"),
        ({"exclude_positions": tuple(range(8))}, SiteError, "no token is left"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, error, words):
    with pytest.raises(error, match=words):
        mediators(zoo.build("llama_gqa"), zoo.tokens(2, 8), **{**QUIET, **changes})


@pytest.fixture(scope="module")
def result():
    return mediators(zoo.build("llama_gqa"), zoo.tokens(6, 9), layers="1-2", seeds=2, displacements=(0.1, 0.2), **QUIET)


def test_the_figure_has_every_panel_and_shades_what_was_pushed(result):
    drawn = mediators_figure(result.table)
    titles = [a.text for a in drawn.layout.annotations]
    assert len(titles) == 8
    rows = result.table[result.table["seed"].isna() & (result.table["displacement"] == 0.1)]
    shades = [(s.x0, s.x1) for s in drawn.layout.shapes if s.xref == "x"]
    assert shades == [(0.5, 1.5), (1.5, 2.5)]
    lines = [t for t in drawn.data if t.meta["site"] == "angular" and t.meta["role"] == "default" and t.xaxis == "x"]
    expected = rows[(rows["mediator"] == "relative_displacement") & (rows["kind"] == "angular")]
    expected = expected[(expected["variant"] == "default") & (expected["measure"] == "mean")].sort_values("layer")
    np.testing.assert_allclose(lines[0].y, expected["value"].astype(float))
    bars = [t for t in drawn.data if t.type == "bar" and t.meta == {"site": "magnitude", "role": "as_run"}]
    assert len(bars) == 2
    share = rows[(rows["measure"] == "explained") & (rows["kind"] == "magnitude") & (rows["variant"] == "as_run")]
    share = share.set_index("mediator")["value"]
    for words, value in zip(bars[0].y, bars[0].x, strict=True):
        name = next(key for key, text in NAMES.items() if text == words)
        assert value == share[name] or (np.isnan(value) and np.isnan(share[name]))
    guides = [t for t in drawn.data if t.meta["role"] == "guide"]
    assert [list(t.y) for t in guides] == [[1, 2.0], [1, 2**0.5]]


def test_report_and_findings_say_how_displacements_grow(result, tmp_path):
    page = write_report([result], tmp_path / "report.html").read_text()
    assert "Mediators of the damage" in page
    assert "d = 0.2 relative" in page
    sentence = findings([result])[0]
    exponents = result.table[(result.table["measure"] == "growth_exponent") & result.table["seed"].isna()]
    row = exponents[(exponents["mediator"] == "growth") & (exponents["kind"] == "angular")].iloc[0]
    assert f"angular {row['value']:.3g} (default) and" in sentence  # of many, those of the smallest displacement
    assert "the pushes alone angular" in sentence
    table = result.table
    few = table[(table["variant"] == "default") & (table["displacement"] == 0.1)]
    assert f"angular (default) {row['value']:.3g} [" in mediators_sentence(few)
    without = result.table[result.table["measure"] != "growth_exponent"]
    assert mediators_sentence(without) == NO_GROWTH
