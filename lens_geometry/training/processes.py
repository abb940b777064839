"""Several processes that train one model: what the trainer asks of them, one plain function each.

    accelerate launch --num_processes 8 -m lens_geometry.cli train --tokens tokens --out run

`accelerate` starts the processes and brings them together. Each step's batch is cut into equal rows, one part for each
process; the mean over processes is the mean over the batch, so that the number of processes changes rounding alone.
Under data parallel every process has the whole model. Under FSDP (torch's `fully_shard`, block by block) each has an
equal share of weights, gradients and optimiser, and a block's weights are put together while it runs.

A process by itself is the same code with nothing to exchange, and does not import `accelerate`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lens_geometry.errors import TrainingError

Sharding = Literal["auto", "data_parallel", "fsdp"]


@dataclass(frozen=True)
class Processes:
    """This process among those that train together. The first one writes files and shows progress."""

    rank: int = 0
    count: int = 1
    fsdp: bool = False
    device: torch.device | None = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def words(self) -> str:
        """For a result's provenance."""
        return "1" if self.count == 1 else f"{self.count}, {'FSDP' if self.fsdp else 'data parallel'}"


def join(sharding: Sharding = "auto", device: str | None = None) -> Processes:
    """Meet the processes that `accelerate launch` (or torchrun) has started; alone where it has started none.

    "auto" is FSDP where `accelerate launch --use_fsdp` (or its configuration file) says so, data parallel otherwise.

    Raises:
        TrainingError: accelerate is not installed, or the device is not there, or several processes cannot share it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes(device=None if device is None else _device(device))
    if device not in (None, "cpu", "cuda"):
        raise TrainingError(f"several processes cannot share {device!r}", cure="leave device out, or choose cpu")
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise TrainingError(
            "several processes need accelerate, which is not installed", cure="pip install accelerate"
        ) from error
    state = PartialState(cpu=device == "cpu")
    if sharding == "auto":
        sharding = "fsdp" if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true" else "data_parallel"
    here = torch.device("cpu") if state.device.type == "cpu" else state.device
    return Processes(state.process_index, state.num_processes, sharding == "fsdp", here)


def _device(name: str) -> torch.device:
    """The device of that name. Raises TrainingError when it is not there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise TrainingError(
            f"there is no device {name!r}", cure="choose cpu, cuda or mps, or leave device out"
        ) from error
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device.type, True):
        raise TrainingError(f"torch sees no device {name!r}", cure="choose cpu, or leave device out")
    return device


def share(model: Any, team: Processes) -> Any:
    """What to call in training: the model, which FSDP has cut up in place, or a wrapper that averages gradients."""
    if team.count == 1:
        return model
    if not team.fsdp:
        devices = None if team.device is None or team.device.type == "cpu" else [team.device]
        return torch.nn.parallel.DistributedDataParallel(
            model, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # of the logits, which nothing changes in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(next(model.parameters()).device.type, (team.count,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def own_rows(first: int, size: int, team: Processes) -> slice:
    """This process's part of `size` rows of a batch that begin at `first`."""
    each = size // team.count
    return slice(first + team.rank * each, first + (team.rank + 1) * each)


def exchanging(model: Any, team: Processes, *, last: bool) -> AbstractContextManager[Any]:
    """Around a part of a step's backward pass: data parallel exchanges gradients in the last part only."""
    return nullcontext() if last or team.count == 1 or team.fsdp else model.no_sync()


def summed(total: float, team: Processes) -> float:
    """The sum of a number over all processes."""
    if team.count == 1:
        return total
    together = torch.tensor(total, dtype=torch.float64, device=team.device)
    dist.all_reduce(together)
    return float(together)


def average_gradients(parameters: Iterable[Tensor], team: Processes) -> None:
    """Average gradients of parameters that are not the model's own (the gates): nobody else exchanges them."""
    for parameter in parameters:
        if team.count > 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= team.count


def clip_gradients(parameters: Iterable[Tensor], largest: float) -> float:
    """The norm of all gradients together; they are scaled down to `largest` where it is more, unless that is 0."""
    kinds: dict[type, list[Tensor]] = {}  # what is cut into shares is not added to what is not
    for parameter in parameters:
        if parameter.grad is not None:
            kinds.setdefault(type(parameter.grad), []).append(parameter)
    norms = []
    for part in kinds.values():
        norms.append(whole(torch.nn.utils.get_total_norm([each.grad for each in part if each.grad is not None])))
    norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)
    for part in kinds.values():
        torch.nn.utils.clip_grads_with_norm_(part, largest or float("inf"), norm)
    return float(norm)


def whole(tensor: Any) -> Tensor:
    """All of a tensor of which each process may have a share. Every process has to call it."""
    together: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return together


def shared_like(tensor: Tensor, parameter: Any) -> Tensor:
    """This process's share of a whole tensor, cut as the parameter is."""
    if not hasattr(parameter, "device_mesh"):
        return tensor.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


@contextmanager
def whole_weights(model: Any, team: Processes) -> Iterator[None]:
    """With every parameter whole, to be read. Every process has to enter."""
    cut = [module for module in model.modules() if hasattr(module, "unshard")] if team.fsdp else []
    for module in cut:
        module.unshard()
    try:
        yield
    finally:
        for module in cut:
            module.reshard()


@contextmanager
def first_in_turn(team: Processes) -> Iterator[None]:
    """The first process does it before the others do: it makes directories and files that they then read."""
    if team.count > 1 and not team.first:
        dist.barrier()
    yield
    if team.count > 1 and team.first:
        dist.barrier()


def check_parts(batch_size: int, accumulation: int, team: Processes) -> None:
    """Raise TrainingError when a batch cannot be cut into equal parts for all processes."""
    if batch_size % (accumulation * team.count):
        raise TrainingError(
            f"a batch of {batch_size} cannot be cut into {accumulation} parts for each of {team.count} processes",
            cure="choose a batch_size that is a multiple of accumulation times processes",
        )
