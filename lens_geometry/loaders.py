"""From files or the hub to a TransformerLens model; its classes are known to this file and the trainer only.

TransformerLens and transformers, slow to import, are imported where they are used.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lens_geometry import cache
from lens_geometry.catalogue import OFFLINE_NAMES, did_you_mean
from lens_geometry.errors import ModelError

_HARMLESS = ("inv_freq", "masked_bias", "attn.bias", "attention.bias")  # buffers in old files
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
BOOT = "TransformerBridge.boot_transformers(name, hf_model=model, tokenizer=tokenizer)"


def from_hub(name: str, backend: str, **settings: Any) -> Any:
    """A model from the Hugging Face hub, unprocessed."""
    if backend == "bridge":
        return bridge_class().boot_transformers(name, **settings)
    given = {key: value for key, value in settings.items() if value}
    with _quiet_hooked():
        return hooked_class().from_pretrained_no_processing(name, **given)


def hub_file(name: str, file: str, revision: str | None) -> Path | None:
    """A file of a hub model, in the hub's cache; None where the model has none. Raises ModelError for no answer."""
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.hf_hub_download(name, file, revision=revision))
    except hub.errors.EntryNotFoundError as error:
        if not isinstance(error, hub.errors.LocalEntryNotFoundError):
            return None
        raise ModelError(
            f"the Hugging Face hub does not say whether the model has a {file} ({error})",
            where=name,
            cure="run it again, or download the model and give its directory",
        ) from error


def read_directory(directory: Path, dtype: torch.dtype, trust_remote_code: bool) -> tuple[Any, Any]:
    """The Hugging Face model (eager attention, as the bridge wants it) and its tokenizer or None."""
    import transformers

    checkpoints = sorted((directory / "checkpoints").glob("step-*"))
    if checkpoints and (directory / "curve.jsonl").is_file():
        raise ModelError(
            "this is the directory of a training run, not a model",
            where=str(directory),
            cure=f"give one of its checkpoints, such as {checkpoints[-1]}",
        )
    if not (directory / "config.json").is_file():
        ggufs = sorted(directory.glob("*.gguf"))
        raise ModelError(
            "the directory has no config.json",
            where=str(directory),
            cure=f"give the file {ggufs[0]}" if ggufs else "give a directory that save_pretrained wrote",
        )
    with cache.quiet_transformers():
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
        )
    if missing := sorted(report["missing_keys"]):  # transformers only warns, and leaves them random
        raise ModelError(
            f"the weights lack {len(missing)} tensors, such as {missing[0]}",
            where=str(directory),
            cure="copy or save the model again, whole",
        )
    stray = [key for key in report["unexpected_keys"] if not key.endswith(_HARMLESS)]
    if stray:
        warnings.warn(
            f"{directory}: the model has no place for {len(stray)} tensors of its file, such as "
            f"{min(stray)}; is its config.json the right one?",
            stacklevel=4,
        )
    return model, read_tokenizer(directory, trust_remote_code)


def read_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    """The Hugging Face tokenizer of a directory, None where it has no files of one."""
    import transformers

    if not any((directory / file).is_file() for file in _TOKENIZER_FILES):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # its parsers raise whatever they stumble upon
        raise ModelError(
            f"the tokenizer cannot be read ({type(error).__name__}: {error})",
            where=str(directory),
            cure="copy its files again, or remove them to load the model without a tokenizer",
        ) from error


def bridge_of(hf_model: Any, tokenizer: Any, path: str, device: str) -> Any:
    """TransformerBridge around a Hugging Face model, with or without a tokenizer."""
    if tokenizer is not None:
        return bridge_class().boot_transformers(
            path, hf_model=hf_model, tokenizer=tokenizer, dtype=hf_model.dtype, device=device
        )
    build = importlib.import_module("transformer_lens.model_bridge.sources").build_bridge_from_module
    architecture = (hf_model.config.architectures or [type(hf_model).__name__])[0]
    return build(hf_model, architecture=architecture, hf_config=hf_model.config, device=device, model_name=path)


def hooked_of(hf_model: Any, tokenizer: Any, path: str, device: str) -> Any:
    """HookedTransformer from a Llama, or from a StableLM that is a Llama with LayerNorm.

    `from_pretrained` refuses names that it does not list, and guesses the architecture from the path.
    """
    config = hf_model.config
    rope = getattr(config, "rope_parameters", None) or {}
    biased = any(getattr(config, name, False) for name in ("attention_bias", "mlp_bias", "use_qkv_bias"))
    other = any(getattr(config, name, False) for name in ("use_parallel_residual", "qk_layernorm"))
    partial = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0) or 1.0)
    plain = not biased and not other and partial == 1.0 and rope.get("rope_type", "default") == "default"
    if config.model_type not in ("llama", "stablelm") or not plain:
        kind = type(hf_model).__name__
        raise ModelError(
            f"a local {kind} cannot become a HookedTransformer here (only Llama, and StableLM with "
            "partial_rotary_factor 1, without biases and with plain rotary positions can)",
            where=path,
            cure='backend="bridge"',
        )
    rms = config.model_type == "llama"
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    d_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    cfg = importlib.import_module("transformer_lens").HookedTransformerConfig(
        d_model=config.hidden_size,
        d_head=d_head,
        n_heads=heads,
        d_mlp=config.intermediate_size,
        n_layers=config.num_hidden_layers,
        n_ctx=config.max_position_embeddings,
        eps=config.rms_norm_eps if rms else config.layer_norm_eps,
        d_vocab=config.vocab_size,
        act_fn=config.hidden_act,
        n_key_value_heads=kv_heads if kv_heads != heads else None,
        normalization_type="RMS" if rms else "LN",
        positional_embedding_type="rotary",
        rotary_adjacent_pairs=False,
        rotary_dim=d_head,
        rotary_base=rope.get("rope_theta", 10000.0),
        final_rms=rms,
        gated_mlp=True,
        init_weights=False,
        original_architecture=type(hf_model).__name__,
        model_name=path,
        dtype=hf_model.dtype,
        device=device,
    )
    model = hooked_from(cfg, tokenizer)
    weights = hooked_weights(hf_model, cfg)
    lacking = set(dict(model.named_parameters())) - set(weights)
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    if lacking or unknown:
        differing = sorted(lacking | set(unknown))
        raise ModelError(
            f"HookedTransformer and the weights differ in {differing}", where=path, cure='backend="bridge"'
        )
    return model


def hooked_from(cfg: Any, tokenizer: Any) -> Any:
    """A HookedTransformer of this configuration, its weights not set, without what it prints."""
    with _quiet_hooked():
        return hooked_class()(cfg, tokenizer)


def hooked_weights(hf_model: Any, cfg: Any) -> dict[str, Any]:
    """TransformerLens' own conversion of a Llama; a StableLM differs from it in the biases of its LayerNorms."""
    convert = importlib.import_module("transformer_lens.pretrained.weight_conversions").convert_llama_weights
    weights = {key: value.detach() for key, value in convert(hf_model, cfg).items()}
    if cfg.normalization_type == "LN":
        weights["ln_final.b"] = hf_model.model.norm.bias.detach()
        for number, layer in enumerate(hf_model.model.layers):
            weights[f"blocks.{number}.ln1.b"] = layer.input_layernorm.bias.detach()
            weights[f"blocks.{number}.ln2.b"] = layer.post_attention_layernorm.bias.detach()
    return weights


def bridge_class() -> Any:
    """TransformerBridge."""
    return importlib.import_module("transformer_lens.model_bridge").TransformerBridge


def hooked_class() -> Any:
    """HookedTransformer, or None under TransformerLens 4, which has it no more."""
    try:
        return importlib.import_module("transformer_lens").HookedTransformer
    except (ImportError, AttributeError):  # TransformerLens 4 raises ImportError
        return None


@contextlib.contextmanager
def _quiet_hooked() -> Iterator[None]:
    """HookedTransformer warns that it is deprecated, and prints where our results go."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextlib.contextmanager
def explained(name: str, directory: Path | None) -> Iterator[None]:
    """Turn what transformers, safetensors and TransformerLens raise while loading into one ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        text, kind = " ".join(str(error).split()), type(error).__name__
        if kind == "SafetensorError":
            problem, cure = "the weights file is damaged", "copy or download it again"
        elif isinstance(error, MemoryError) or kind == "OutOfMemoryError":
            problem = "there is not enough memory for this model"
            cure = 'dtype="bfloat16", a smaller model, or device="cpu"'
        elif "mismatched" in text:
            problem, cure = "the weights do not fit config.json", "copy or save the model again, whole"
        elif "rchitecture" in text or "Unrecognized" in text:
            problem = "this architecture is not supported"
            cure = "TransformerBridge.list_supported_models() names what TransformerLens knows"
        elif directory is None and ("couldn't connect" in text or isinstance(error, ConnectionError)):
            problem = "the Hugging Face hub stopped answering"
            cure = f"run it again; without a network use {', '.join(OFFLINE_NAMES)}"
        elif "gated repo" in text:
            problem, cure = "this model is gated", "accept its licence on the hub and set HF_TOKEN"
        elif "valid model identifier" in text or "Repo id" in text:
            problem = "the Hugging Face hub has no such model"
            cure = f"{did_you_mean(name)}check the spelling, and HF_TOKEN if it is private"
        elif directory is not None and isinstance(error, OSError | ValueError):
            problem, cure = "the directory is incomplete or damaged", "copy or save the model again, whole"
        else:
            problem, cure = "the model cannot be loaded", f"load it with transformers, then wrap it: {BOOT}"
        where = name if directory is None else str(directory)
        raise ModelError(f"{problem} ({kind}: {text[:300]})", where=where, cure=cure) from error
