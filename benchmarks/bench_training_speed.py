"""Tokens per second of the trainer's baseline step, against a plain PyTorch model of the same shape and weights.

    python benchmarks/bench_training_speed.py [--rounds 7] [--batch 8] [--layers 4] [--width 256] [--length 256]

The plain model below is a Llama in fifty lines with `scaled_dot_product_attention`: no hook, no attention map. Every
model does the trainer's own step (loss, backward, clipping, AdamW); its first loss has to be the plain model's. Steps
are taken in turn and each is divided by the plain steps before and after it. Then torch.profiler says where the time
of each class goes, by kind of operation. On a CPU the clock is this process's CPU time, so that other work on the
machine disturbs it less; run it with OMP_NUM_THREADS=1 there.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from lens_geometry import loaders
from lens_geometry.training import Shape, TrainingConfig
from lens_geometry.training.model import build_model, hugging_face_weights
from lens_geometry.training.presets import gated_width
from lens_geometry.training.processes import Processes, clip_gradients
from lens_geometry.training.suppression import Suppression, Suppressor
from lens_geometry.training.trainer import backward, make_optimizer

KINDS = {  # of operations, by what their names begin with
    "matrix products": ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"),
    "attention kernel": ("aten::_scaled_dot_product", "aten::_flash", "aten::_efficient"),
    "softmax": ("aten::_softmax", "aten::_log_softmax", "aten::nll_loss"),
    "copies and layout": ("aten::copy_", "aten::clone", "aten::cat", "aten::index", "aten::gather", "aten::scatter"),
    "filling": ("aten::fill_", "aten::zero_", "aten::masked_fill", "aten::where", "aten::triu", "aten::tril"),
    "element by element": ("aten::add", "aten::mul", "aten::div", "aten::sub", "aten::pow", "aten::neg", "aten::silu"),
    "sums": ("aten::sum", "aten::mean", "aten::rsqrt", "aten::sqrt", "aten::norm", "aten::linalg"),
    "optimiser": ("Optimizer", "aten::lerp", "aten::addcdiv", "aten::addcmul", "aten::_foreach", "aten::_fused"),
}


class PlainBlock(nn.Module):
    """Attention with grouped queries and rotary positions, then a gated MLP; each before it a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        keys = shape.n_key_value_heads * shape.d_head
        sizes = {"q": shape.d_model, "k": keys, "v": keys, "o": shape.d_model}
        self.attn = nn.ModuleDict({name: nn.Linear(shape.d_model, size, bias=False) for name, size in sizes.items()})
        self.gate, self.up = (nn.Linear(shape.d_model, shape.d_mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.d_mlp, shape.d_model, bias=False)
        self.norm1, self.norm2 = (nn.RMSNorm(shape.d_model, eps=shape.eps) for _ in range(2))
        self.d_head = shape.d_head

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (rearrange(self.attn[n](y), "b pos (head d) -> b head pos d", d=self.d_head) for n in "qkv")
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        z = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attn["o"](rearrange(z, "b head pos d -> b pos (head d)"))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (i, i + d/2) of a head turned by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Plain(nn.Module):
    """The whole model, called as the trainer calls one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.d_vocab, shape.d_model)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.d_model, eps=shape.eps)
        frequencies = shape.rotary_base ** (-torch.arange(0, shape.d_head, 2) / shape.d_head)
        angles = torch.outer(torch.arange(shape.n_ctx).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor, return_type: str = "logits") -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        return functional.linear(self.norm(x), self.embed.weight)


def plain_with(shape: Shape, weights: dict[str, Tensor]) -> Plain:
    """The plain model with weights under Hugging Face's names."""
    names = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2", "embed_tokens": "embed"}
    names |= {f"self_attn.{letter}_proj": f"attn.{letter}" for letter in "qkvo"}
    names |= {f"mlp.{name}_proj": name for name in ("gate", "up", "down")} | {"layers": "blocks", "model.": ""}
    found = {}
    for name, weight in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        if name != "lm_head.weight":
            found[name] = weight.clone()
    model = Plain(shape)
    model.load_state_dict(found)
    return model


def stepper(model: Any, config: TrainingConfig, ids: Tensor) -> Callable[[], float]:
    """The trainer's step on one batch, as a function that returns the loss before it."""
    device = torch.device(config.device or "cpu")
    model.train()
    suppressor = Suppressor(model, Suppression())
    optimizer, scored = make_optimizer(model, suppressor, config), torch.ones_like(ids[:, 1:], dtype=torch.bool)

    def step() -> float:
        loss = backward(model, suppressor, ids, scored, config, 0, Processes(device=device))
        clip_gradients([each for group in optimizer.param_groups for each in group["params"]], config.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def seconds(step: Callable[[], float], device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    began = clock()
    step()  # ends with a number on the CPU, but for the optimiser
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - began


def compare(steps: dict[str, Callable[[], float]], rounds: int, n_tokens: int, device: str) -> None:
    plain = steps["plain PyTorch, sdpa"]
    others = {name: step for name, step in steps.items() if step is not plain}
    ratios: dict[str, list[float]] = {name: [] for name in others}
    base: list[float] = []
    for _ in range(rounds):
        before = seconds(plain, device)
        for name, step in others.items():
            taken, after = seconds(step, device), seconds(plain, device)
            ratios[name].append((before + after) / 2 / taken)
            base.append(before)
            before = after
    print(f"plain PyTorch, sdpa: {n_tokens / median(base):,.0f} tokens per second")
    for name, found in ratios.items():
        print(f"{name:32} x {median(found):.3f} of its tokens per second  ({min(found):.3f} to {max(found):.3f})")


def where_time_goes(name: str, step: Callable[[], float], device: str) -> None:
    """Milliseconds of a step by kind of operation: what each operation took by itself."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profile(activities=activities) as profiler:
        step()
    taken: Counter[str] = Counter()
    for event in profiler.key_averages():
        own = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        kind = next((kind for kind, starts in KINDS.items() if event.key.startswith(starts)), "other")
        taken[kind] += own
    print(f"\n{name}: {sum(taken.values()) / 1000:.0f} ms")
    for kind, own in taken.most_common():
        print(f"    {kind:24}{own / 1000:8.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rounds", 7), ("batch", 8), ("layers", 4), ("heads", 8), ("width", 256), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    shape = Shape(
        n_layers=given.layers,
        n_heads=given.heads,
        n_key_value_heads=given.heads // 4,
        d_model=given.width,
        d_mlp=gated_width(given.width),
        n_ctx=given.length,
        d_vocab=given.vocabulary,
    )
    config = TrainingConfig("", "", shape=shape, batch_size=given.batch, device=given.device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.d_vocab, (given.batch, given.length + 1), generator=generator)
    classes = {"bridge": "TransformerBridge"} | ({"hooked": "HookedTransformer"} if loaders.hooked_class() else {})
    built = {label: build_model(shape, 0, backend=backend, device=given.device) for backend, label in classes.items()}  # type: ignore[arg-type]
    plain = plain_with(shape, hugging_face_weights(built["TransformerBridge"])).to(given.device)
    steps = {label: stepper(model, config, ids) for label, model in {"plain PyTorch, sdpa": plain, **built}.items()}
    losses = {name: step() for name, step in steps.items()}  # warm-up too
    print(", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()), "nats at first")
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit("the models differ, so their speeds say nothing")
    compare(steps, given.rounds, given.batch * given.length, given.device)
    for name, step in steps.items():
        where_time_goes(name, step, given.device)


if __name__ == "__main__":
    main()
