"""The options of every command that loads a model: which one, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lens_geometry import models
from lens_geometry.cache import say
from lens_geometry.edits.suppressing import Suppression
from lens_geometry.provenance import suppression_of

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_TEXT = "austen"


@dataclass(frozen=True)
class HowLoaded:
    """How models are loaded.

    Attributes:
        backend: "bridge" (TransformerBridge) or "hooked" (HookedTransformer, TransformerLens 3 only).
        dtype: of the weights: float32, bfloat16, float16 or float64.
        device: such as cpu, cuda, mps; chosen when left out.
        revision: branch, tag or commit of a Hugging Face model.
        trust_remote_code: run code that comes with a Hugging Face model.
        without_suppression: leave out the edit that a checkpoint was trained under; its results say so.
    """

    backend: Literal["bridge", "hooked"] = "bridge"
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    device: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    without_suppression: bool = False

    def load(self, name: str) -> Any:
        """The model of this name, which says so when it is under the edit that it was trained with."""
        model = models.load_model(
            name,
            backend=self.backend,
            dtype=self.dtype,
            device=self.device,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            without_suppression=self.without_suppression,
        )
        about = suppression_of(model)
        if about is not None and about["status"] == "attached":
            say(f"this model was trained under {Suppression.from_dict(about['settings']).words()}, which is on")
        return model


@dataclass(frozen=True)
class Loading:
    """Which model, and how it is loaded.

    Attributes:
        model: a name of `lens-geometry models`, a Hugging Face name, a local directory or a .gguf file.
        how: how it is loaded.
    """

    model: str = DEFAULT_MODEL
    how: HowLoaded = field(default_factory=HowLoaded)

    def load(self) -> Any:
        """The model."""
        return self.how.load(self.model)
