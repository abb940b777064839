"""`scale` on a plain Hugging Face model: the same edit, put on the model's own modules by torch's hooks.

    with lg.suppress(model, site="value", parallel=0.0):
        loss = model(ids, labels=ids).loss
        loss.backward()

    handle = lg.suppress(model, site="attn", layers="4-11")
    ...
    handle.remove()

The vectors are those of `sites.py`, the arithmetic that of `scale`; only where the activations are found differs
(`plain_layouts.py`). It works in training and generation, under gradient checkpointing, and through wrappers (DDP,
FSDP, PEFT), since the hooks are on modules inside a block. Under torch.compile the edit is traced along with the
model, if it was put on before the first compiled pass.
"""

from __future__ import annotations

from types import TracebackType

from torch import nn

from lens_geometry.edits.layer_edit import Heads, Layers, Positions
from lens_geometry.edits.noise import Batch
from lens_geometry.edits.plain_attention import hide_weights, require_weights, show_weights
from lens_geometry.edits.plain_layer import PlainLayer
from lens_geometry.edits.plain_layouts import plain_anatomy, plain_blocks
from lens_geometry.edits.scaling import Control, Scale, checked_scale, scalings
from lens_geometry.errors import HookError, SiteError
from lens_geometry.sites import SITES, Grouping, choose_layers

PLAIN_SITES = ("attn", "mlp", "block", "value", "value_excl_self")


def suppress(
    model: nn.Module,
    site: str,
    *,
    parallel: Scale = 0.0,
    perpendicular: Scale = 1.0,
    layers: Layers = None,
    heads: Heads = None,
    positions: Positions = None,
    grouping: Grouping = "each",
    control: Control = "none",
    seed: int = 0,
    batch: Batch | None = None,
) -> Suppressed:
    """Keep `parallel` of the parallel part of an update of a Hugging Face model, from now until it is removed.

    Args:
        model: Llama, Mistral, Mixtral, Qwen 2 and 3 (also MoE), GPT-NeoX (Pythia), GPT-2, StableLM, Gemma 2 and 3,
            OLMo 2 or Granite as transformers builds it, with any head; also inside DDP, FSDP or PEFT.
        site: "attn", "mlp", "block", "value" or "value_excl_self" (which needs eager attention).
        parallel, perpendicular, layers, heads, positions, grouping, control, seed, batch: as in `scale`; callables
            get the layer's input.

    Returns a handle with `remove()`, which is a context manager as well. Leaving it, or `remove()`, raises HookError
    when an edit never ran or changed nothing.
    Raises ModelError for a model that is not known here, SiteError for a site, layers or heads that it does not have,
    GeometryError for scales that do not fit; HookError, when run, for activations that are not what they should be.
    """
    blocks = plain_blocks(model)
    if site not in PLAIN_SITES:
        known = site in SITES
        raise SiteError(
            f"site {site!r} cannot be edited in a plain model" if known else f"there is no site {site!r}",
            cure=f"choose one of {', '.join(PLAIN_SITES)}"
            + ("; with TransformerLens lg.scale has it" if known else ""),
        )
    found, chosen = SITES[site], choose_layers(layers, len(blocks))
    anatomy = plain_anatomy(blocks, next(model.parameters()).dtype)
    edits = scalings(
        model, anatomy, found, chosen, parallel=parallel, perpendicular=perpendicular, heads=heads,
        positions=positions, grouping=grouping, control=control, seed=seed, batch=batch,
    )  # fmt: skip
    if "pattern" in found.reads:
        for layer in chosen:
            require_weights(blocks[layer].part("attention"), blocks[layer].where("attention"))
    return Suppressed(
        [PlainLayer(blocks[edit.layer], edit, anatomy) for edit in edits], [b.part("attention") for b in blocks]
    )


class Suppressed:
    """An edit that is on a plain model. Made by `suppress`; a context manager, and a handle.

    Attributes:
        layers: one for each edited layer, with `fired` and `changed`: whether its edit has run, and changed anything.
    """

    def __init__(self, layers: list[PlainLayer], attentions: list[nn.Module]) -> None:
        self.layers, self._attentions = layers, attentions
        self.on = True
        for layer in layers:
            layer.attach()
            if layer.reads_weights:
                show_weights(layer.block.part("attention"), layer.see_weights)

    def __repr__(self) -> str:
        sites = ", ".join(dict.fromkeys(layer.edit.site.name for layer in self.layers))
        where = ", ".join(str(layer.edit.layer) for layer in self.layers)
        return f"Suppressed(site {sites}, layers {where}, {'on' if self.on else 'removed'})"

    def set_parallel(self, parallel: Scale) -> None:
        """Another retained scale from now on, as for a schedule. Raises GeometryError as `suppress` does."""
        for layer in self.layers:
            layer.set_parallel(checked_scale(parallel, layer.n_layers, layer.edit.site))

    def check(self, *, changed: bool = True) -> None:
        """Raise HookError when an edit has never run, or (with `changed`) when none changed anything that should."""
        silent = [layer.edit.where for layer in self.layers if not layer.fired]
        if silent:
            raise HookError(
                f"{len(silent)} of {len(self.layers)} edits never ran"
                + ("" if len(silent) < len(self.layers) else " (no forward pass, or one compiled before)"),
                where=_some(silent),
                cure="run the model while the edit is on; put it on before the first pass of a compiled model, or call "
                "torch.compiler.reset()",
            )
        due = [layer for layer in self.layers if layer.due]
        if changed and due and not any(layer.changed for layer in due):
            raise HookError(
                "the edit left every activation as it was",
                where=_some([layer.edit.where for layer in due]),
                cure="check heads and positions; in sequences of one token value_excl_self has nothing to edit",
            )

    def remove(self, *, check: bool = True) -> None:
        """Take the edit off; the model is then as it was. Raises as `check` does, unless `check` is False.

        Under gradient checkpointing a pass that is computed again later, in a backward pass that comes after this,
        would be another one: such a backward pass raises HookError.
        """
        if not self.on:
            return
        self.on = False
        for layer in self.layers:
            layer.detach()
            if layer.reads_weights:
                hide_weights(layer.block.part("attention"), layer.see_weights, self._attentions)
        if check:
            self.check()

    def __enter__(self) -> Suppressed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove(check=kind is None)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
