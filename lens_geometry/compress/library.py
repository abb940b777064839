"""GPTQ, AWQ and SparseGPT by llmcompressor, each ending in an ordinary dense model.

llmcompressor is the extra `[compression]` and is imported only when one of them is called. It works on a copy of its
own, whose linear maps are read out by what they do (observers, wrapped forwards and all), and thrown away. It leaves no
file, no handler of loguru and no random state behind; what it would only log (a matrix that it gave up on) is an error.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from lens_geometry.bundled import byte_tokenizer
from lens_geometry.compress.calibrating import Calibration, calibration_of
from lens_geometry.compress.matrices import Matrix, matrices
from lens_geometry.compress.plain import NATIVE, fresh_copy, is_hooked, plain_of_hooked
from lens_geometry.compress.pruning import parse_pattern, pruned_share
from lens_geometry.compress.records import Step, Work, stored_sparse
from lens_geometry.compress.rounding import Bits, bits_by_layer, check_grid, stored_rounded
from lens_geometry.compressed import DENSE_BITS, Storage
from lens_geometry.errors import CompressionError, ModelError

LOGS = ("LLM_COMPRESSOR_LOG_DISABLED", "COMPRESSED_TENSORS_LOG_DISABLED")


def gptq(
    model: Any,
    calibration: Any,
    *,
    bits: Bits = 4,
    group_size: int | None = 64,
    symmetric: bool = False,
    layers: Any = None,
) -> Any:
    """A new model rounded by GPTQ: column by column, the columns that are left make up for what was rounded.

    Args:
        model: a TransformerLens model, or a Hugging Face one; it stays as it is.
        calibration: text or tokens to measure the inputs on; never the text of an evaluation.
        bits: 2 to 8, or for each layer its own; 16, 32 and layers that are not named stay as they are.
        group_size: weights along the inputs that share a scale; None for a whole row.
        symmetric: without zero points.
        layers: None for all, or which ("4-11", [0, 3]).

    Raises:
        CompressionError: llmcompressor is not installed, settings that make no sense, or nothing that changed.
        DataError: a calibration text that cannot be used.
        SiteError: layers that the model does not have.
        ModelError: a model that llmcompressor cannot take: TransformerLens' own native one, a mixture of experts, a
            HookedTransformer that is no Llama.
    """
    return _rounded("gptq", model, calibration, bits, group_size, symmetric, layers)


def awq(
    model: Any,
    calibration: Any,
    *,
    bits: Bits = 4,
    group_size: int | None = 64,
    symmetric: bool = False,
    layers: Any = None,
) -> Any:
    """A new model rounded to nearest after AWQ: inputs that matter are scaled up before, and so lose less.

    Where a kernel would keep the scaled weights, and norms scaled the other way, the model that is returned has the
    scaling undone in both: the same function, with norms untouched, so that its weights, its values and everything
    between a norm and a matrix compare with the uncompressed model's.

    Arguments and errors are those of `gptq`; ModelError also for a model whose norms AWQ does not know.
    """
    return _rounded("awq", model, calibration, bits, group_size, symmetric, layers)


def sparse_gpt(
    model: Any, calibration: Any, *, sparsity: float = 0.5, pattern: str | None = None, layers: Any = None
) -> Any:
    """A new model pruned by SparseGPT: the weights that are left make up for those that went.

    Args:
        model, calibration, layers: as of `gptq`.
        sparsity: share of the weights that become zero; not used where there is a pattern.
        pattern: "2:4" or "4:8": how many weights stay of how many along the inputs.

    Raises as `gptq` does.
    """
    share = pruned_share(sparsity, pattern)
    library, text = _library(), calibration_of(model, calibration)
    work = Work(model, layers)
    if pattern is not None and (wrong := [m for m in work.matrices() if m.read().shape[1] % parse_pattern(pattern)[1]]):
        raise CompressionError(
            f"groups of {parse_pattern(pattern)[1]} do not divide {wrong[0].read().shape[1]} inputs",
            where=wrong[0].name,
            cure="another pattern, or a sparsity without one",
        )

    def recipe(names: Sequence[str], blocks: Sequence[str], _: Any) -> list[Any]:
        kept, size = (0, 0) if pattern is None else parse_pattern(pattern)
        modifier = library("modifiers.pruning.sparsegpt").SparseGPTModifier
        others = [f"re:^(?!({'|'.join(name.replace('.', '[.]') for name in names)})$).*$"]
        return [modifier(sparsity=share, mask_structure=f"{size - kept}:{size}", targets=list(blocks), ignore=others)]

    def stored(matrix: Matrix, new: Tensor, before: Storage) -> Storage:
        return stored_sparse(before, 1 - share)

    _compress(work, library, recipe, text, stored)
    return work.done(Step("sparsegpt", {"sparsity": share, "pattern": pattern}, share), calibration=text)


def _rounded(
    method: str, model: Any, calibration: Any, bits: Bits, group_size: int | None, symmetric: bool, layers: Any
) -> Any:
    check_grid(4, group_size)
    library, text = _library(), calibration_of(model, calibration)
    work = Work(model, layers)
    by_layer = bits_by_layer(bits, work.layers, work.n_layers)
    work.layers = tuple(layer for layer in work.layers if by_layer[layer] < DENSE_BITS)
    for matrix in work.matrices():
        if group_size is not None and matrix.read().shape[1] % group_size:
            raise CompressionError(
                f"groups of {group_size} do not divide {matrix.read().shape[1]} inputs",
                where=matrix.name,
                cure="another group size, or None for one scale per output channel",
            )

    def recipe(names: Sequence[str], _: Sequence[str], plain: nn.Module) -> list[Any]:
        groups = {
            f"bits_{number}": _grid(number, group_size, symmetric, [n for n, b in found.items() if b == number])
            for found in [dict(zip(names, (by_layer[m.layer] for m in work.matrices()), strict=True))]
            for number in sorted(set(found.values()))
        }
        if method == "gptq":
            return [library("modifiers.gptq").GPTQModifier(config_groups=groups, ignore=[])]
        transform = library("modifiers.transform.awq")
        rounding = library("modifiers.quantization").QuantizationModifier(config_groups=groups, ignore=[])
        return [transform.AWQModifier(mappings=_mappings(transform, plain)), rounding]

    def stored(matrix: Matrix, new: Tensor, before: Storage) -> Storage:
        return stored_rounded(before, new, by_layer[matrix.layer], group_size, symmetric)

    _compress(work, library, recipe, text, stored)
    said = bits if isinstance(bits, int) else {str(layer): number for layer, number in bits.items()}
    return work.done(Step(method, {"bits": said, "group_size": group_size, "symmetric": symmetric}), calibration=text)


def _grid(bits: int, group_size: int | None, symmetric: bool, targets: list[str]) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
    return {"targets": targets, "weights": {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}}


def _compress(
    work: Work,
    library: Callable[[str], Any],
    recipe: Callable[[Sequence[str], Sequence[str], nn.Module], list[Any]],
    text: Calibration,
    stored: Callable[[Matrix, Tensor, Storage], Storage],
) -> None:
    """Let llmcompressor change a plain copy, and give what came out to the model that is being made."""
    plain: Any = plain_of_hooked(work.model) if is_hooked(work.model) else fresh_copy(work.model)
    if type(plain).__name__ == NATIVE:
        raise ModelError(
            "llmcompressor takes Hugging Face models, and this is TransformerLens' native one",
            cure="use rtn, magnitude, wanda, low-rank, blank or drop",
        )
    keys = {matrix.key for matrix in work.matrices()}
    targets = [matrix for matrix in matrices(plain) if matrix.key in keys]
    if experts := [matrix.name for matrix in targets if "experts" in matrix.name]:
        raise ModelError(
            "llmcompressor would take the experts apart, and what comes back would be another architecture",
            where=experts[0],
            cure="use rtn, magnitude or low-rank without calibration",
        )
    changed = _library_copy(plain)
    names = [matrix.name for matrix in targets]
    blocks = list(dict.fromkeys(_block_of(name) for name in names))
    with _progress(changed, names, blocks):
        _run(library, changed, recipe(names, blocks, changed), text)
    plain_now = {matrix.key: matrix.read() for matrix in targets}
    new = {m.key: _unscaled(plain_now[m.key], changed.get_submodule(m.name), m.name) for m in targets}

    def change(matrix: Matrix, weight: Tensor, before: Storage) -> tuple[Tensor, Storage]:
        return new[matrix.key].to(weight), stored(matrix, new[matrix.key], before)

    work.change(change)
    _require_same_function(changed, work.copied, text)


@contextlib.contextmanager
def _progress(model: nn.Module, names: Sequence[str], blocks: Sequence[str]) -> Iterator[None]:
    """One bar over the blocks, instead of llmcompressor's hundreds; it moves when a block is first passed."""
    handles = []
    with tqdm(total=len(blocks), desc="compressing layers", delay=2, disable=None, leave=False) as bar:

        def hook(number: int) -> Callable[..., None]:
            def passed(*_: Any) -> None:
                bar.update(max(number + 1 - bar.n, 0))

            return passed

        own = tqdm.__init__

        def silent(self: Any, *given: Any, **named: Any) -> None:
            own(self, *given, **{**named, "disable": True})

        try:
            for number, block in enumerate(blocks):
                first = next(name for name in names if _block_of(name) == block)
                handles.append(model.get_submodule(first).register_forward_pre_hook(hook(number)))
            tqdm.__init__ = silent
            yield
        finally:
            tqdm.__init__ = own
            for handle in handles:
                handle.remove()


def _block_of(name: str) -> str:
    steps = name.split(".")
    return ".".join(steps[: next(i for i, step in enumerate(steps) if step.isdecimal()) + 1])


@torch.no_grad()
def _library_copy(plain: nn.Module) -> Any:
    """A copy for the library, with GPT-2's transposed maps as linear ones."""
    copied = fresh_copy(plain)
    for name, module in list(copied.named_modules()):
        if type(module).__name__ == "Conv1D":
            weight: Tensor = module.weight  # type: ignore[assignment]
            with torch.random.fork_rng(devices=[]):
                linear = nn.Linear(weight.shape[0], weight.shape[1], dtype=weight.dtype, device="cpu").to(weight.device)
            linear.weight.copy_(weight.T)
            linear.bias.copy_(module.bias)  # type: ignore[arg-type]
            copied.set_submodule(name, linear)
    return copied


@torch.no_grad()
def _unscaled(before: Float[Tensor, "out in"], module: Any, name: str) -> Float[Tensor, "out in"]:
    """What a matrix has become, with the scaling of its inputs and outputs undone.

    AWQ makes a_i W_ij b_j of W and rounds that; a and b are found by least squares, and are 1 where nothing was scaled
    (GPTQ and SparseGPT, which change the weights themselves, have a and b left at 1).
    """
    after = _effective(module)
    scaled = module.weight.detach().double()
    if getattr(module, "quantization_scheme", None) is None or torch.equal(scaled.to(after), after):
        return after  # nothing is left to be rounded: the weights themselves were changed
    working = before.double()
    rows, columns = torch.ones_like(working[:, :1]), torch.ones_like(working[:1])
    for _ in range(20):
        made = rows * working
        columns = _ratio((made * scaled).sum(0, keepdim=True), made.square().sum(0, keepdim=True))
        made = working * columns
        rows = _ratio((made * scaled).sum(1, keepdim=True), made.square().sum(1, keepdim=True))
    off = float((rows * working * columns - scaled).norm() / scaled.norm())
    if not off <= (1e-4 if after.dtype in (torch.float32, torch.float64) else 1e-2):
        raise CompressionError(
            f"AWQ did something else to this matrix than to scale its rows and columns (off by {off:.2g})",
            where=name,
            cure="use gptq or rtn",
        )
    return (after.double() / (rows * columns)).to(after.dtype)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """1 where there is nothing to compare: a row or column of zeros."""
    return torch.where(below > 0, above / below.clamp_min(torch.finfo(below.dtype).tiny), 1.0)


@torch.no_grad()
def _require_same_function(changed: Any, copied: Any, text: Calibration) -> None:
    """Raise CompressionError unless the dense model does what llmcompressor's does."""
    ids = text.batches()[0][:1].to(next(copied.parameters()).device)
    output = copied(ids)
    given = (output if isinstance(output, Tensor) else output.logits).float()
    expected = changed(input_ids=ids, use_cache=False).logits.float()
    off = float((given - expected).norm() / expected.norm())
    if not off <= (1e-3 if next(copied.parameters()).dtype in (torch.float32, torch.float64) else 5e-2):
        raise CompressionError(
            f"the logits of the dense model differ from llmcompressor's by {off:.2g}",
            cure="install the version of llmcompressor that constraints.txt names",
        )


@torch.no_grad()
def _effective(module: Any) -> Tensor:
    """The matrix [out, in] that a linear map multiplies with, its rounding done.

    Raises CompressionError where that is not what the map does: it is checked on a few inputs.
    """
    weight, scheme = module.weight.detach().clone(), getattr(module, "quantization_scheme", None)
    if scheme is not None:
        rounding = importlib.import_module("compressed_tensors.quantization")
        weight = rounding.forward_quantize(module, weight, "weight", scheme.weights)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, weight.shape[1], generator=generator).to(weight)
    bias = None if module.bias is None else module.bias.detach()
    expected, given = module(inputs).float(), nn.functional.linear(inputs, weight, bias).float()
    if not torch.allclose(given, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise CompressionError(
            "a matrix that llmcompressor returned does something else than its weights say",
            cure="install the version of llmcompressor that constraints.txt names",
        )
    return weight.clone()  # type: ignore[no-any-return]


def _mappings(transform: Any, plain: nn.Module) -> list[Any]:
    """Which norms and matrices AWQ scales against which. Raises ModelError for a class it knows nothing of."""
    known = importlib.import_module(f"{transform.__name__}.mappings")
    dynamic = importlib.import_module(f"{transform.__name__}.dynamic_mappings")
    kind = type(plain).__name__
    own = {
        "GPTNeoXForCausalLM": (
            ("input_layernorm", ("query_key_value",)),
            ("post_attention_layernorm", ("dense_h_to_4h",)),
        ),
        "GPT2LMHeadModel": (("ln_1", ("attn.c_attn",)), ("ln_2", ("mlp.c_fc",))),
        "OPTForCausalLM": (
            ("self_attn_layer_norm", ("q_proj", "k_proj", "v_proj")),
            ("layers.*final_layer_norm", ("fc1",)),
            ("v_proj", ("out_proj",)),
        ),
        "StableLmForCausalLM": (
            ("input_layernorm", ("q_proj", "k_proj", "v_proj")),
            ("post_attention_layernorm", ("gate_proj", "up_proj")),
            ("v_proj", ("o_proj",)),
            ("up_proj", ("down_proj",)),
        ),
    }
    if kind in own:
        return [
            known.AWQMapping(f"re:.*{smooth}$", [f"re:.*{balance}$" for balance in balanced])
            for smooth, balanced in own[kind]
        ]
    if kind not in known.AWQ_MAPPING_REGISTRY:
        raise ModelError(f"which norms AWQ may scale in a {kind} is not known", cure="use gptq or rtn")
    return list(dynamic.get_layer_mappings_from_model(plain))


def _library() -> Callable[[str], Any]:
    """Import modules of llmcompressor by name, without what it does to loguru. Raises CompressionError without it."""
    before = {name: os.environ.get(name) for name in LOGS}
    os.environ.update(dict.fromkeys(LOGS, "true"))
    try:
        importlib.import_module("llmcompressor")
    except ImportError as error:
        raise CompressionError(
            f"this method is llmcompressor's, which cannot be imported ({error})",
            cure='pip install "lens-geometry[compression]"',
        ) from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return lambda name: importlib.import_module(f"llmcompressor.{name}")


def _run(library: Callable[[str], Any], plain: Any, modifiers: list[Any], text: Calibration) -> None:
    """`oneshot` on a model, in place, with the random state, loguru, the environment and its session left alone."""
    device = next(plain.parameters()).device
    batches: Any = [{"input_ids": ids.to(device)} for ids in text.batches()]
    plain.config._name_or_path, plain.config.quantization_config = "", None
    del plain.config.quantization_config
    with tempfile.TemporaryDirectory(prefix="lens-geometry-") as folder, _undisturbed(library):
        plain.config.save_pretrained(folder)
        plain.config._name_or_path = folder  # it reads the configuration once more from there
        try:
            library("entrypoints").oneshot(
                model=plain,
                processor=byte_tokenizer(),  # never used
                recipe=modifiers,
                dataset=torch.utils.data.DataLoader(batches, batch_size=None, shuffle=False),
                num_calibration_samples=len(batches),
                max_seq_length=max(map(len, text.sequences)),
                output_dir=None,
            )
        finally:
            library("core").reset_session()
    given_up = [name for modifier in modifiers for name in getattr(modifier, "_rtn_fallback_module_names", [])]
    if given_up:
        raise CompressionError(
            f"GPTQ could not invert the inputs' second moments of {len(given_up)} matrices, such as {given_up[0]}",
            cure="calibrate with more text",
        )


@contextlib.contextmanager
def _undisturbed(library: Callable[[str], Any]) -> Iterator[None]:
    """llmcompressor without its log, and without pinned memory where there is no accelerator to move it to."""
    logger, tracing = importlib.import_module("loguru").logger, logging.getLogger("torch.fx._symbolic_trace")
    heard = tracing.disabled
    cache = library("pipelines.cache").IntermediatesCache
    pinning, tokenizers = cache.pin_memory, os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    for name in ("llmcompressor", "compressed_tensors"):
        logger.disable(name)
    try:
        logger.level("METRIC")  # which llmcompressor logs at, and adds only where it takes loguru over
    except ValueError:
        logger.level("METRIC", no=38)
    try:
        tracing.disabled = True  # it warns of llmcompressor's way to ask whether it traces
        if not torch.accelerator.is_available():
            cache.pin_memory = lambda *_, **__: None
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            yield
    finally:
        cache.pin_memory, tracing.disabled = pinning, heard
        for name in ("llmcompressor", "compressed_tensors"):
            logger.enable(name)
        if tokenizers is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
