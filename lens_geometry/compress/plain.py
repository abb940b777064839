"""A fresh copy of a model whose weights may be changed, and the way back to the class that was given.

A bridge has Hugging Face's own modules in its grip: wrapped in place, with copies of fused queries, keys and values.
So its copy is a new Hugging Face model of the same configuration that gets the same weights, and must give the same
logits; what comes back is a new bridge around it. A HookedTransformer is copied as it is; one that is a Llama, or a
Llama with LayerNorm, can become a Hugging Face model too (`plain_of_hooked`).
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lens_geometry import loaders
from lens_geometry.anatomy import alone, at_rest, hook_points, probe_tokens
from lens_geometry.errors import ModelError
from lens_geometry.hugging_face import hugging_face_config, hugging_face_weights, is_added_bias
from lens_geometry.provenance import COMPRESSION, SOURCE, SUPPRESSION
from lens_geometry.suppressed import carry_suppression

NATIVE = "NativeModel"  # the class behind bridges of TransformerLens' own
POLICY = ("default_prepend_bos", "tokenizer_prepends_bos", "tokenizer_appends_eos", "default_padding_side")
_WRAPPED = "_original_component"


def is_bridge(model: Any) -> bool:
    """Whether it is a TransformerBridge."""
    return isinstance(model, loaders.bridge_class())


def is_hooked(model: Any) -> bool:
    """Whether it is a HookedTransformer."""
    hooked = loaders.hooked_class()
    return hooked is not None and isinstance(model, hooked)


def fresh_copy(model: Any) -> nn.Module:
    """A copy whose weights may be changed: a plain model for a bridge, otherwise the same class.

    Raises ModelError for what is no decoder of TransformerLens or transformers, or cannot be copied faithfully.
    """
    if is_hooked(model):
        return _copy_of_hooked(model)
    if is_bridge(model):
        return plain_model(model)
    if isinstance(model, nn.Module) and hasattr(model, "config") and hasattr(model, "save_pretrained"):
        if any(type(module).__module__.startswith("transformer_lens.") for module in model.modules()):
            raise ModelError(
                f"the blocks of this {type(model).__name__} have been taken into a TransformerBridge",
                cure="pass the bridge",
            )
        return _rebuilt(model, model.config, _weights(model), dict(model.named_buffers()))
    raise ModelError(
        f"a {type(model).__name__} cannot be compressed",
        cure="pass what lens_geometry.load_model or AutoModelForCausalLM.from_pretrained returns",
    )


@torch.no_grad()
def plain_model(bridge: Any) -> nn.Module:
    """A new Hugging Face model (or TransformerLens' native one) with the weights of a bridge.

    Raises ModelError where its logits are not the bridge's: weights that were processed, or changed after wrapping.
    """
    if getattr(bridge, "compatibility_mode", False):
        raise ModelError(
            "the weights of this bridge are folded (compatibility mode), and a new one would not know it",
            cure="compress the model before enable_compatibility_mode",
        )
    inner = bridge.original_model
    settings = bridge.cfg if type(inner).__name__ == NATIVE else inner.config
    plain = _rebuilt(inner, settings, _weights(inner), {_own_name(inner, n): b for n, b in inner.named_buffers()})
    _require_same(bridge, plain)
    return plain


@torch.no_grad()
def plain_of_hooked(model: Any) -> nn.Module:
    """A new Hugging Face Llama (StableLM for LayerNorm) with the weights of a HookedTransformer that is one.

    Raises ModelError for any other HookedTransformer.
    """
    cfg, norm = model.cfg, str(model.cfg.normalization_type)
    usual = dict(
        gated_mlp=True, positional_embedding_type="rotary", rotary_adjacent_pairs=False, rotary_dim=cfg.d_head,
        parallel_attn_mlp=False, num_experts=None, use_local_attn=False, use_qk_norm=False, attn_only=False,
        use_normalization_before_and_after=False, final_rms=norm == "RMS",
    )  # fmt: skip
    other = sorted(name for name, value in usual.items() if getattr(cfg, name, value) != value)
    biased = [name for name, weight in model.named_parameters() if is_added_bias(name) and bool(weight.any())]
    if norm not in ("RMS", "LN") or other or biased or (norm == "LN" and cfg.d_head * cfg.n_heads != cfg.d_model):
        differs = ", ".join([*other, *biased[:1]]) or f"{norm} normalisation"
        raise ModelError(
            f"this HookedTransformer is no Llama ({differs}), and there is no Hugging Face model of it",
            cure="use rtn, magnitude, wanda, low-rank, blank or drop, and save it with save_hooked; or load it with "
            'backend="bridge"',
        )
    weights = hugging_face_weights(model)
    tied = torch.equal(model.W_U.T, model.W_E)
    shape = SimpleNamespace(
        n_layers=cfg.n_layers, n_heads=cfg.n_heads, n_key_value_heads=cfg.n_key_value_heads or cfg.n_heads,
        d_model=cfg.d_model, d_mlp=cfg.d_mlp, n_ctx=cfg.n_ctx, d_vocab=cfg.d_vocab, norm=norm, activation=cfg.act_fn,
        eps=cfg.eps, rotary_base=float(cfg.rotary_base), tied=tied, initial_std=0.02,
    )  # fmt: skip
    config = hugging_face_config(shape, model.tokenizer)
    if norm == "RMS":
        config.head_dim = cfg.d_head
    kind = importlib.import_module("transformers").AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        plain = kind.from_config(config, dtype=model.W_E.dtype, attn_implementation="eager").to(model.W_E.device)
    for name, parameter in plain.named_parameters():
        parameter.data = weights[name].clone()
    _require_same(model, plain.eval())
    return plain  # type: ignore[no-any-return]


def _require_same(model: Any, plain: nn.Module) -> None:
    """Raise ModelError unless the logits of a plain model are those of the TransformerLens one."""
    tokens = probe_tokens(model)
    with at_rest(model), alone(hook_points(model)):
        expected = model(tokens, return_type="logits").double()
    with torch.no_grad():
        output = plain(tokens)
    given = (output if isinstance(output, Tensor) else output.logits).double()
    off = float((given - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    if not off <= (1e-3 if next(plain.parameters()).dtype in (torch.float32, torch.float64) else 5e-2):
        raise ModelError(
            f"the logits of a plain {type(plain).__name__} with this model's weights differ by {off:.2g}: the weights "
            "were processed, or changed after the model was wrapped",
            cure="load the model with lens_geometry.load_model, which leaves its weights raw",
        )


def returned(model: Any, copied: nn.Module) -> Any:
    """The changed copy as the class that was given, with its tokenizer, policy, provenance and edit."""
    if not is_bridge(model):
        if is_hooked(model):
            _carry(model, copied)
        return copied.eval()
    build = importlib.import_module("transformer_lens.model_bridge.sources").build_bridge_from_module
    native = type(copied).__name__ == NATIVE
    config = {"tl_config": _config_of(copied)} if native else {"hf_config": copied.config}
    with torch.random.fork_rng(devices=[]):
        bridge = build(
            copied,
            architecture=model.cfg.architecture,
            model_name=model.cfg.model_name,
            device=str(next(copied.parameters()).device),
            **config,
        )
    bridge.tokenizer = copy.deepcopy(model.tokenizer)
    for name in POLICY:
        if hasattr(model.cfg, name):
            setattr(bridge.cfg, name, getattr(model.cfg, name))
    _carry(model, bridge)
    return bridge.eval()


def shortened(plain: Any, stay: Sequence[int]) -> nn.Module:
    """A plain model with some of its layers, numbered anew, and whatever its configuration lists by layer.

    Raises ModelError where the class builds other layers in their places.
    """
    native = type(plain).__name__ == NATIVE
    settings = copy.deepcopy(_config_of(plain) if native else plain.config)
    count = int(settings.n_layers if native else settings.num_hidden_layers)
    listed = {
        name: [value[layer] for layer in stay]
        for name, value in vars(settings).items()
        if isinstance(value, list | tuple) and len(value) == count and name != "architectures"
    }
    setattr(settings, "n_layers" if native else "num_hidden_layers", len(stay))
    for name, value in listed.items():
        setattr(settings, name, value)
    numbers = {old: new for new, old in enumerate(stay)}

    def renumbered(named: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in named.items():
            steps = name.split(".")
            place = next((i for i, step in enumerate(steps) if step.isdecimal()), None)
            if place is None or int(steps[place]) in numbers:
                if place is not None:
                    steps[place] = str(numbers[int(steps[place])])
                found[".".join(steps)] = tensor
        return found

    return _rebuilt(
        plain, settings, renumbered(dict(plain.named_parameters())), renumbered(dict(plain.named_buffers()))
    )


def shortened_hooked(hooked: Any, stay: Sequence[int]) -> Any:
    """The same for a HookedTransformer, which is changed."""
    cfg = hooked.cfg
    if cfg.attn_types is not None:
        cfg.attn_types = [cfg.attn_types[layer] for layer in stay]
    cfg.n_layers = len(stay)
    hooked.blocks = type(hooked.blocks)([hooked.blocks[layer] for layer in stay])
    for number, block in enumerate(hooked.blocks):
        block.attn.layer_id = number
    hooked.setup()  # names of hooks
    return hooked


def _carry(model: Any, new: Any) -> None:
    """Where the weights come from, what was done to them, and the edit that they were trained under."""
    for name in (SOURCE, COMPRESSION):
        if name in model.__dict__:
            new.__dict__[name] = copy.copy(model.__dict__[name])
    carry_suppression(model, new)


def _config_of(native: Any) -> Any:
    return next(module.cfg for module in native.modules() if hasattr(module, "cfg"))


@torch.no_grad()
def _rebuilt(model: Any, settings: Any, weights: dict[str, Tensor], buffers: dict[str, Tensor]) -> nn.Module:
    """A new model of the class and configuration, with these weights (their devices and dtypes) and buffers."""
    settings, first = copy.deepcopy(settings), next(model.parameters())
    with torch.random.fork_rng(devices=[]):
        if type(model).__name__ == NATIVE:
            plain: Any = type(model)(settings).to(first.dtype)
        else:
            plain = type(model)._from_config(settings, dtype=first.dtype, attn_implementation="eager")
    plain = plain.to(first.device)
    _add_biases(plain, weights)
    own = dict(plain.named_parameters())
    if lacking := sorted(own.keys() - weights.keys()):
        raise ModelError(
            f"a plain {type(model).__name__} has {len(lacking)} weights that this model has not, such as {lacking[0]}",
            cure="compress the Hugging Face model before it is wrapped or changed",
        )
    if stray := sorted(name for name in weights.keys() - own.keys() if bool(weights[name].any())):
        raise ModelError(
            f"this model has {len(stray)} weights that a plain {type(model).__name__} has not, such as {stray[0]}",
            cure="compress the Hugging Face model before it is wrapped or changed",
        )
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            raise ModelError(
                f"its shape is {tuple(weights[name].shape)}, and by its class {tuple(parameter.shape)}",
                where=name,
                cure="compress the Hugging Face model before it is wrapped or changed",
            )
        parameter.data = weights[name].detach().clone()
    for name, buffer in plain.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape:
            place, _, last = name.rpartition(".")
            plain.get_submodule(place)._buffers[last] = buffers[name].detach().clone()
    return plain.eval()  # type: ignore[no-any-return]


def _add_biases(plain: nn.Module, weights: dict[str, Tensor]) -> None:
    """Biases of linear maps that have none by their class, and that the model was given (the bridge of 3.9 does so)."""
    for name, module in plain.named_modules():
        bias = weights.get(f"{name}.bias")
        if isinstance(module, nn.Linear) and module.bias is None and bias is not None and bool(bias.any()):
            module.bias = nn.Parameter(bias.detach().clone())


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by the names that they have in a plain model; copies that a bridge made of fused ones are left out."""
    return {_own_name(model, name): weight for name, weight in model.named_parameters() if _own_name(model, name)}


def _own_name(model: nn.Module, name: str) -> str:
    """The name of a parameter or buffer without the bridge; "" for what the bridge has added."""
    module: Any = model
    steps = []
    for step in name.split("."):
        found = getattr(module, "submodules", None)
        known = found if isinstance(found, dict) else {}
        component = known.get(step)
        if component is not None and step in ("q", "k", "v") and "qkv" in known:
            return ""  # a slice of the fused matrix
        if step != _WRAPPED:
            steps.append(str(component.name) if component is not None else step)
        module = getattr(module, step, None)
    return ".".join(steps)


def _copy_of_hooked(model: Any) -> Any:
    """A HookedTransformer with weights of its own and no hooks."""
    points = hook_points(model)
    with alone(points):
        new = copy.deepcopy(model)
    for point in hook_points(new).values():
        point.fwd_hooks, point.bwd_hooks = [], []
        point._forward_hooks.clear()
        point._backward_hooks.clear()
    for name in (SOURCE, COMPRESSION, SUPPRESSION):
        new.__dict__.pop(name, None)
    return new
