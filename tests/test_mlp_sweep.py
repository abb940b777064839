"""The sweep inside the MLP: its rows are those of the edits, and a model without a carrier is refused."""

import numpy as np
import pytest
import torch
import zoo
from tables import META

from lens_geometry import plots
from lens_geometry.edits import scale
from lens_geometry.errors import DataError, ModelError, SiteError
from lens_geometry.experiments import mlp_sweep, profile
from lens_geometry.report import findings, write_report
from lens_geometry.results import Result

UNEVEN = 100
SMALL = {"parallel": (0.0,), "perpendicular": (0.0,), "progress": False}


def test_every_row_is_the_loss_of_its_edit():
    model, ids = zoo.build("llama_gqa", dtype=torch.float64, d_mlp=UNEVEN), zoo.tokens(3, 10)
    table = mlp_sweep(model, ids, references=("normalised", "stream"), batch_size=2, **SMALL).table

    def loss(hooks):
        with torch.no_grad():
            logits = model.run_with_hooks(ids, return_type="logits", fwd_hooks=hooks)
        logs = torch.log_softmax(logits, -1)
        return -np.mean([float(logs[b, t, ids[b, t + 1]]) for b in range(3) for t in range(9)])

    base, seen = loss([]), set()
    edits = table[(table["control"] == "none") & (table["scale"] == 0.0)]
    for row in edits.itertuples():
        edited = loss(scale(model, row.site, parallel=row.parallel, perpendicular=row.perpendicular))
        assert row.loss_change == pytest.approx(edited - base, rel=1e-9)
        assert row.loss_change_low <= row.loss_change <= row.loss_change_high
        seen.add((row.site, row.component))
    assert len(seen) == len(edits) == 8
    assert set(table["control"]) == {"none", "random_reference", "isotropic", "gain"}
    assert (table.loc[table["scale"] == 1.0, "loss_change"] == 0).all()
    gain = table[table["control"] == "gain"].set_index("site")["loss"]
    whole = loss([(f"blocks.{layer}.hook_mlp_out", lambda tensor, hook: tensor * 0) for layer in range(4)])
    for site in ("mlp", "mlp_carrier", "mlp_carrier_stream", "mlp_contribution"):  # there is no bias to tell them apart
        assert gain[site] == pytest.approx(whole, rel=1e-9)


def test_the_normalised_input_is_the_default_reference():
    result = mlp_sweep(zoo.build("gpt2", d_mlp=UNEVEN), zoo.tokens(2, 8), **SMALL)
    references = dict(zip(result.table["site"], result.table["reference"], strict=True))
    assert references == {
        "mlp": "stream",
        "mlp_carrier": "normalised input",
        "mlp_contribution": "slice of the carrier",
    }
    assert result.meta["slices"] == {"d_mlp": UNEVEN, "width": 48, "count": 3, "last_width": 4}
    assert result.meta["settings"]["references"] == ["normalised"]


def test_a_sweep_of_the_mlp_goes_on_where_it_was(tmp_path):
    model, ids = zoo.build("llama_gqa"), zoo.tokens(2, 8)
    whole = mlp_sweep(model, ids, out=tmp_path, **SMALL).table
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:4]))
    assert mlp_sweep(model, ids, out=tmp_path, **SMALL).table.equals(whole)
    assert journal.read_text() == "".join(lines)


def test_a_mixture_of_experts_is_refused_not_swept_at_its_output_alone():
    with pytest.raises(SiteError, match="mixture of experts, which has no single carrier"):
        mlp_sweep(zoo.build("moe"), zoo.tokens(), **SMALL)


@pytest.mark.skipif(zoo.MAJOR > 3, reason="TransformerLens 4 has no HookedTransformer")
def test_a_site_that_the_class_does_not_show_is_left_out_and_named():
    with pytest.warns(UserWarning, match="site mlp_contribution was left out"):
        result = mlp_sweep(zoo.build("gemma2", "hooked"), zoo.tokens(2, 8), **SMALL)
    assert set(result.table["site"]) == {"mlp", "mlp_carrier"}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"references": ()}, SiteError),
        ({"references": ("mean",)}, SiteError),
        ({"layers": ("9",)}, SiteError),
        ({"controls": ("noise",)}, SiteError),
        ({"parallel": (), "perpendicular": ()}, DataError),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, error):
    with pytest.raises(error, match="Cure:"):
        mlp_sweep(zoo.build("llama_gqa"), zoo.tokens(), **{**SMALL, **changes})


def test_what_is_no_model_is_refused():
    with pytest.raises(ModelError):
        mlp_sweep("gpt2", zoo.tokens())


def test_its_figure_and_its_section_hold_every_site(tmp_path):
    result = mlp_sweep(zoo.build("llama_gqa"), zoo.tokens(2, 8), references=("normalised", "stream"), **SMALL)
    drawn = {trace.meta["site"] for trace in result.plot().data} - {""}
    assert drawn == {"mlp", "mlp_carrier", "mlp_carrier_stream", "mlp_contribution"}
    colours = {trace.line.color for trace in result.plot().data if trace.meta["role"] == "edit"}
    assert len(colours) == 4
    page = write_report([result], tmp_path / "report.html").read_text()
    assert "Inside the MLP" in page
    assert "what each slice writes to the stream" in page
    assert "mlp_contribution" in findings([result])[0]


def test_slices_are_called_slices_where_heads_are_called_heads():
    model = zoo.build("llama_gqa", d_mlp=UNEVEN)
    table = profile(model, zoo.tokens(), sites=("mlp_carrier", "value"), progress=False).table
    figure = plots.profile_heads_figure(table)
    assert [figure.layout.yaxis.title.text, figure.layout.yaxis2.title.text] == ["slice", "head"]
    assert ", slice 2" in figure.data[0].hovertext[2][0]
    assert Result("profile", table, META).plot() is not None
