"""The matrices of a model's blocks, as one list: each [out, in], with its layer and role, to read, write and listen to.

`x @ W.T` is what every one of them does, however the class keeps it. Embeddings, unembedding, norms, biases and the
routers of mixtures of experts are not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from lens_geometry.compress.plain import NATIVE, is_hooked
from lens_geometry.errors import ModelError

Listener = Callable[[Float[Tensor, "... in"]], None]
_ROLES = {
    "q": ("q_proj", "q", "W_Q"),
    "k": ("k_proj", "k", "W_K", "_W_K"),
    "v": ("v_proj", "v", "W_V", "_W_V"),
    "qkv": ("query_key_value", "c_attn", "qkv_proj"),
    "o": ("o_proj", "out_proj", "o", "W_O"),
    "gate": ("gate_proj", "gate", "W_gate"),
    "in": ("up_proj", "in", "fc1", "c_fc", "dense_h_to_4h", "fc_in", "W_in"),
    "out": ("down_proj", "out", "fc2", "dense_4h_to_h", "fc_out", "W_out"),
}
_BRANCH_DEPENDENT = ("c_proj", "dense", "wo")  # W_O in attention, W_out in the MLP
_ROUTERS = ("gate", "router", "shared_expert_gate", "W_gate")


@dataclass(frozen=True)
class Matrix:
    """One matrix of a block.

    Attributes:
        name: where it is in the model that was opened.
        layer: its block's number.
        role: q, k, v, qkv (fused), o, gate, in, out; otherwise the module's own name. "o" writes attention's output to
            the stream, "out" the MLP's.
        read: the weights now, [out, in].
        write: put weights of that shape in their place.
        listen: call a function with every input, [..., in], until the handle that is returned is removed.
        bias: of the output, or None.
    """

    name: str
    layer: int
    role: str
    read: Callable[[], Float[Tensor, "out in"]]
    write: Callable[[Float[Tensor, "out in"]], None]
    listen: Callable[[Listener], Any]
    bias: Tensor | None

    @property
    def key(self) -> str:
        """The layer and the place in it, the same for every class that keeps it alike: "3.gate"."""
        expert = [step for step in self.name.split(".") if step.isdecimal()][1:]
        return ".".join([str(self.layer), self.role, *expert])


def matrices(model: nn.Module) -> list[Matrix]:
    """All matrices of the blocks of a plain model or a HookedTransformer, in order.

    Raises ModelError when a block holds weights that are no known kind of matrix, or weights that are not floats.
    """
    found = []
    for layer, (place, block) in enumerate(blocks(model)):
        covered, routers = set(), _routers(block)
        for matrix, parameter in _of_block(model, layer, place, block):
            if not parameter.is_floating_point():
                raise ModelError(
                    f"its weights are {parameter.dtype}, and are quantised already",
                    where=matrix.name,
                    cure="load the model dequantised (a .gguf is, by lens_geometry.load_model)",
                )
            covered.add(id(parameter))
            found.append(matrix)
        for name, parameter in block.named_parameters():
            router, last = name.rpartition(".")[0] in routers, name.rpartition(".")[2]
            bias = last.lstrip("_").startswith("b")  # HookedTransformer's have heads
            if parameter.ndim > 1 and id(parameter) not in covered and not router and not bias:
                raise ModelError(
                    f"a weight of shape {tuple(parameter.shape)} is no matrix that a compression method knows",
                    where=f"{place}.{name}",
                    cure="compress a model whose blocks are made of linear maps, and of experts as transformers fuses "
                    "them",
                )
    keys = [matrix.key for matrix in found]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ModelError(
            f"a block has several matrices of one kind ({twice})",
            where=type(model).__name__,
            cure="compress a model whose blocks have one attention and one MLP or set of experts",
        )
    return found


def blocks(model: Any) -> list[tuple[str, nn.Module]]:
    """The blocks of a decoder with their names. Raises ModelError where there is not one stack of them."""
    if is_hooked(model):
        return [(f"blocks.{number}", block) for number, block in enumerate(model.blocks)]
    count = len(model.layers) if type(model).__name__ == NATIVE else int(model.config.num_hidden_layers)
    stacks = [
        (name, stack)
        for name, stack in model.named_modules()
        if isinstance(stack, nn.ModuleList) and len(stack) == count and name.split(".")[-1] in ("h", "layers", "blocks")
    ]
    if len(stacks) != 1:
        raise ModelError(
            f"this {type(model).__name__} has {len(stacks)} stacks of {count} blocks",
            cure="pass a decoder with one stack of blocks",
        )
    name, stack = stacks[0]
    return [(f"{name}.{number}", block) for number, block in enumerate(stack)]


def chosen(model: nn.Module, layers: Sequence[int]) -> list[Matrix]:
    """The matrices of some layers."""
    return [matrix for matrix in matrices(model) if matrix.layer in set(layers)]


def _of_block(model: Any, layer: int, place: str, block: Any) -> Iterator[tuple[Matrix, Tensor]]:
    if is_hooked(model):
        yield from _of_hooked_block(layer, place, block)
    routers = _routers(block)
    for name, module in block.named_modules():
        if name in routers:
            continue
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            yield _of_module(f"{place}.{name}", layer, module), module.weight  # type: ignore[misc]
        fused = [getattr(module, part, None) for part in ("gate_up_proj", "down_proj")]
        if all(isinstance(weight, nn.Parameter) and weight.ndim == 3 for weight in fused):
            yield from _of_experts(f"{place}.{name}", layer, fused[0], fused[1])  # type: ignore[arg-type]


def _routers(block: nn.Module) -> set[str]:
    """Names of the modules that choose experts: they stand beside them, and are not one of theirs."""
    names = [name for name, _ in block.named_modules()]
    beside = {name.removesuffix("experts") for name in names if name.rsplit(".", 1)[-1] == "experts"}
    return {place + router for place in beside for router in _ROUTERS if place + router in names}


def _role(name: str) -> str:
    last = name.rsplit(".", 1)[-1]
    if last in _BRANCH_DEPENDENT:
        return "o" if "attn" in name or "attention" in name else "out"
    return next((role for role, names in _ROLES.items() if last in names), last)


def _of_module(name: str, layer: int, module: nn.Module) -> Matrix:
    transposed = not isinstance(module, nn.Linear)  # Conv1D keeps [in, out]
    weight: Tensor = module.weight  # type: ignore[assignment]

    def listen(listener: Listener) -> Any:
        return module.register_forward_pre_hook(lambda _, inputs: listener(inputs[0].detach()))

    return Matrix(
        name,
        layer,
        _role(name),
        lambda: (weight.T if transposed else weight).detach(),
        lambda new: _put(weight, new.T if transposed else new),
        listen,
        module.bias,  # type: ignore[arg-type]
    )


def _of_experts(name: str, layer: int, gate_up: Tensor, down: Tensor) -> Iterator[tuple[Matrix, Tensor]]:
    """Experts in two tensors [expert, out, in], one matrix for each of them."""
    if gate_up.shape[2] != down.shape[1]:
        raise ModelError("these experts are kept as [expert, in, out]", where=name, cure="compress another model")

    def refuse(_: Listener) -> Any:
        raise ModelError(
            "what an expert is given cannot be listened to, since the experts are one fused module",
            where=name,
            cure="use a method without calibration: rtn, magnitude, low-rank without calibration, blank or drop",
        )

    for part, fused, role in (("gate_up_proj", gate_up, "gate_up_proj"), ("down_proj", down, "out")):
        for expert in range(len(fused)):
            weight = fused[expert]
            yield (
                Matrix(
                    f"{name}.{part}.{expert}",
                    layer,
                    role,
                    lambda weight=weight: weight.detach(),  # type: ignore[misc]
                    lambda new, weight=weight: _put(weight, new),  # type: ignore[misc]
                    refuse,
                    None,
                ),
                fused,
            )


def _of_hooked_block(layer: int, place: str, block: Any) -> Iterator[tuple[Matrix, Tensor]]:
    """HookedTransformer's own tensors: heads apart, and transposed."""
    attn, mlp = block.attn, getattr(block, "mlp", None)

    def at_input(module: nn.Module) -> Callable[[Listener], Any]:
        def listen(listener: Listener) -> Any:
            def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
                listener((inputs[0] if inputs else named["query_input"]).detach())

            return module.register_forward_pre_hook(hook, with_kwargs=True)

        return listen

    def at_point(point: nn.Module, heads: bool) -> Callable[[Listener], Any]:
        def listen(listener: Listener) -> Any:
            def hook(_: nn.Module, __: Any, output: Tensor) -> None:
                listener((rearrange(output, "b p head d -> b p (head d)") if heads else output).detach())

            return point.register_forward_hook(hook)

        return listen

    for letter in ("Q", "K", "V"):
        name = f"_W_{letter}" if hasattr(attn, f"_W_{letter}") else f"W_{letter}"
        yield _of_tensor(
            f"{place}.attn.{name}",
            layer,
            _role(name),
            getattr(attn, name),
            "head model d",
            "(head d) model",
            at_input(attn),
        )
    yield _of_tensor(
        f"{place}.attn.W_O", layer, "o", attn.W_O, "head d model", "model (head d)", at_point(attn.hook_z, True),
        attn.b_O,
    )  # fmt: skip
    if mlp is None or hasattr(mlp, "experts"):
        return  # the experts' are nn.Linear
    for name in ("W_gate", "W_in"):
        if isinstance(getattr(mlp, name, None), nn.Parameter):
            yield _of_tensor(f"{place}.mlp.{name}", layer, _role(name), getattr(mlp, name), "i o", "o i", at_input(mlp))
    yield _of_tensor(
        f"{place}.mlp.W_out", layer, "out", mlp.W_out, "i o", "o i", at_point(mlp.hook_post, False), mlp.b_out
    )


def _of_tensor(
    name: str,
    layer: int,
    role: str,
    weight: Tensor,
    own: str,
    usual: str,
    listen: Callable[[Listener], Any],
    bias: Tensor | None = None,
) -> tuple[Matrix, Tensor]:
    """A tensor kept in the pattern `own`, which `usual` rearranges to [out, in]."""
    sizes = {"head": weight.shape[0]} if "head" in own else {}
    matrix = Matrix(
        name,
        layer,
        role,
        lambda: rearrange(weight.detach(), f"{own} -> {usual}"),
        lambda new: _put(weight, rearrange(new, f"{usual} -> {own}", **sizes)),
        listen,
        bias,
    )
    return matrix, weight


@torch.no_grad()
def _put(weight: Tensor, new: Tensor) -> None:
    weight.copy_(new)
