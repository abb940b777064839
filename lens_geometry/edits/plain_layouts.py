"""Where Hugging Face's own blocks keep what the sites are made of: the one table of architectures outside models.py.

Each row is the class of a block in transformers; the paths in it are modules inside such a block. What a site means
is said in `sites.py`, and is the same here: an update is what is added to the stream, after a norm that follows the
branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lens_geometry.anatomy import Anatomy, LayerFacts
from lens_geometry.errors import ModelError, SiteError

Packing = Literal["alone", "last third", "last third of each head"]


@dataclass(frozen=True)
class Layout:
    """Where one class of block has its parts; the defaults are Llama's.

    Attributes:
        start: the module whose input is the stream as the block finds it.
        attention: the attention module.
        attn_out, mlp_out: the modules whose (first) output is what the branch adds to the stream, but for a constant
            factor (Granite's), which scales a component as it scales the whole.
        mid: the module whose input is the stream between the branches.
        values: the projection that makes the values, and `packing` which part of its output they are.
        z: the output projection, whose input is every head's aggregate, one head after another.
        d_head: what the attention module calls the width of a head.
    """

    start: str = "input_layernorm"
    attention: str = "self_attn"
    attn_out: str = "self_attn"
    mid: str = "post_attention_layernorm"
    mlp_out: str = "mlp"
    values: str = "self_attn.v_proj"
    packing: Packing = "alone"
    z: str = "self_attn.o_proj"
    d_head: str = "head_dim"


_LLAMA = Layout()
_GEMMA = Layout(
    attn_out="post_attention_layernorm", mid="pre_feedforward_layernorm", mlp_out="post_feedforward_layernorm"
)
LAYOUTS: Mapping[str, Layout] = {
    "LlamaDecoderLayer": _LLAMA,
    "MistralDecoderLayer": _LLAMA,
    "Qwen2DecoderLayer": _LLAMA,
    "Qwen3DecoderLayer": _LLAMA,
    "GraniteDecoderLayer": _LLAMA,
    "MixtralDecoderLayer": _LLAMA,
    "Qwen3MoeDecoderLayer": _LLAMA,
    "StableLmDecoderLayer": Layout(mlp_out="dropout"),
    "Gemma2DecoderLayer": _GEMMA,
    "Gemma3DecoderLayer": _GEMMA,
    "Olmo2DecoderLayer": Layout(
        start="self_attn", attn_out="post_attention_layernorm", mid="mlp", mlp_out="post_feedforward_layernorm"
    ),
    "GPTNeoXLayer": Layout(
        attention="attention", attn_out="post_attention_dropout", mlp_out="post_mlp_dropout",
        values="attention.query_key_value", packing="last third of each head", z="attention.dense", d_head="head_size",
    ),
    "GPT2Block": Layout(
        start="ln_1", attention="attn", attn_out="attn", mid="ln_2",
        values="attn.c_attn", packing="last third", z="attn.c_proj",
    ),
}  # fmt: skip
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What torch's wrappers call the module inside, which is where hooks belong."""


@dataclass(frozen=True)
class PlainBlock:
    """One block of a plain model, with the names of its parts."""

    name: str
    module: nn.Module
    layout: Layout

    def part(self, which: str) -> nn.Module:
        """A part by the layout's name for it. Raises ModelError when the block does not have it."""
        path = getattr(self.layout, which)
        module = self.module
        for step in path.split("."):
            inner = getattr(module, step, None)
            if not isinstance(inner, nn.Module):
                raise ModelError(
                    f"this {type(self.module).__name__} has no {path}, which the edit needs",
                    where=self.name,
                    cure="pass the model as transformers builds it, or wrap it with TransformerLens and use lg.scale",
                )
            module = _unwrapped(inner)
        return module

    def where(self, which: str) -> str:
        return f"{self.name}.{getattr(self.layout, which)}"

    @property
    def parallel(self) -> bool:
        """Whether the MLP reads the same stream as attention."""
        return bool(getattr(self.module, "use_parallel_residual", False))

    @cached_property
    def config(self) -> Any:
        return getattr(self.part("attention"), "config")  # noqa: B009  (a module's attributes are tensors to mypy)

    @cached_property
    def n_heads(self) -> int:
        return int(self.config.num_attention_heads)

    @cached_property
    def n_kv_heads(self) -> int:
        return int(getattr(self.config, "num_key_value_heads", None) or self.n_heads)

    @cached_property
    def width(self) -> int:
        """d_head."""
        return int(getattr(self.part("attention"), self.layout.d_head))

    def values(self, projected: Float[Tensor, "batch pos features"]) -> Float[Tensor, "batch pos kv d"]:
        """The values in what the projection gives."""
        own = self.n_kv_heads * self.width
        if self.layout.packing == "last third of each head":
            heads = rearrange(projected, "batch pos (head three d) -> batch pos head three d", three=3, d=self.width)
            return heads[..., 2, :]
        if self.layout.packing == "last third":
            projected = projected[..., -own:]
        return rearrange(projected, "batch pos (kv d) -> batch pos kv d", kv=self.n_kv_heads, d=self.width)

    def facts(self) -> LayerFacts:
        """What the table and the configuration say of the block, in the form in which edits know a layer."""
        stream, heads = (0, 0, int(self.config.hidden_size)), (0, 0, self.n_heads, self.width)
        shapes: dict[str, tuple[int, ...]] = {
            "resid_pre": stream,
            "v": (0, 0, self.n_kv_heads, self.width),
            "pattern": (0, self.n_heads, 0, 0),
            "z": heads,
            "attn_out": stream,
            **({} if self.parallel else {"resid_mid": stream}),
            "mlp_out": stream,
            "resid_post": stream,
        }
        return LayerFacts(shapes, {})


def plain_blocks(model: Any) -> list[PlainBlock]:
    """The blocks of a Hugging Face model, also inside wrappers (DDP, FSDP, torch.compile, PEFT).

    Raises ModelError for what is none, has blocks that are not in the table, or has several stacks of them.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"a {type(model).__name__} is no model", cure="pass what AutoModelForCausalLM.from_pretrained returns"
        )
    if any(type(module).__module__.startswith("transformer_lens.") for module in model.modules()):
        raise ModelError(
            f"{type(model).__name__} is a TransformerLens model, or its blocks have been taken into one",
            cure="use lg.scale, the same edit as TransformerLens hooks; for lg.suppress pass a Hugging Face model of "
            "its own, such as a copy made before it was wrapped",
        )
    stacks = [
        (name, blocks)
        for name, blocks in model.named_modules()
        if isinstance(blocks, nn.ModuleList) and len(blocks) and all(_layout(block) for block in blocks)
    ]
    if len(stacks) != 1:
        raise ModelError(_no_blocks(model, len(stacks)), where=type(model).__name__, cure=_CURE)
    name, blocks = stacks[0]
    return [PlainBlock(f"{name}.{i}", _unwrapped(b), _layout(b) or _LLAMA) for i, b in enumerate(blocks)]


def plain_anatomy(blocks: list[PlainBlock], dtype: Any) -> Anatomy:
    """The blocks as an anatomy. Raises SiteError when they are not of one kind."""
    facts = tuple(block.facts() for block in blocks)
    if len({block.parallel for block in blocks}) > 1:
        raise SiteError("some blocks are parallel and some are not", where=blocks[0].name, cure="use lg.scale")
    return Anatomy(facts[0].shapes["resid_pre"][-1], dtype, blocks[0].parallel, facts)


_CURE = (
    f"suppress knows {', '.join(name for name in LAYOUTS)}; any model that TransformerLens can wrap has lg.scale, the "
    "same edit"
)


def _no_blocks(model: nn.Module, n_stacks: int) -> str:
    if n_stacks:
        return f"this model has {n_stacks} stacks of blocks, and which of them is meant is not known"
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    kinds = sorted({type(_unwrapped(blocks[0])).__name__ for blocks in lists})
    return f"where the blocks of this model ({', '.join(kinds) or 'it has none'}) add to the stream is not known"


def _unwrapped(module: nn.Module) -> nn.Module:
    for name in WRAPPERS:
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module):
            return _unwrapped(inner)
    return module


def _layout(block: nn.Module) -> Layout | None:
    """By the class of the block or one that it derives from (FSDP makes classes of its own)."""
    for kind in type(_unwrapped(block)).__mro__:
        if kind.__module__.startswith("transformers.") and kind.__name__ in LAYOUTS:
            return LAYOUTS[kind.__name__]
    return None
