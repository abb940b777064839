"""Compression by weights alone: the input stays, the class stays, the numbers are those of plain references."""

import pytest
import torch
import zoo

from lens_geometry import compress
from lens_geometry.errors import CompressionError, SiteError
from lens_geometry.provenance import describe, fingerprint


@pytest.mark.parametrize(("name", "backend"), zoo.cases(exclude=("opt_post_norm",)))
def test_every_class_comes_back_changed_and_the_given_model_stays_to_the_bit(name, backend):
    model, tokens = zoo.build(name, backend), zoo.tokens()
    print_before, logits = fingerprint(model), model(tokens)
    small = compress.compress(model, "rtn:bits=4,group_size=8")
    assert type(small) is type(model)
    assert fingerprint(model) == print_before
    assert torch.equal(model(tokens), logits)
    assert float((small(tokens) - logits).abs().max()) > 1e-3
    about = describe(small)["compression"]
    assert about["bits_per_weight"] == pytest.approx(4 + 32 / 8)
    assert describe(model)["compression"] is None


def test_a_variant_reads_back_what_it_writes():
    for text in (
        "rtn:bits=4,group_size=64",
        "rtn:bits=0=8+1=4",
        "magnitude:pattern=2:4,layers=0+2-3",
        "blank:layers=1",
    ):
        variant = compress.parse_variant(text)
        assert variant.label == text
        assert compress.parse_variant(variant) is variant
    with pytest.raises(CompressionError, match="group_sise"):
        compress.parse_variant("rtn:group_sise=4")


@pytest.mark.parametrize(
    ("variant", "error", "words"),
    [
        ("rtn:group_size=7", CompressionError, "do not divide 48"),
        ("rtn:bits=16", CompressionError, "nothing to round"),
        ("magnitude:sparsity=1.0", CompressionError, "sparsity"),
        ("magnitude:pattern=4:2", CompressionError, "no pattern"),
        ("blank:layers=9", SiteError, "layers 0 to 3"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_cure(variant, error, words):
    with pytest.raises(error, match=words):
        compress.compress(zoo.build("llama_gqa"), variant)
