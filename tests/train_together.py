"""Trains the runs of a JSON file, one after another: a process of several, started by torchrun's variables."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lens_geometry.training import Shape, Suppression, TrainingConfig


def together(configs: Sequence[TrainingConfig], place: Path, count: int = 2) -> None:
    """Train each config in `count` gloo processes. Raises with their output when one fails."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "runs.json").write_text(json.dumps([config.as_dict() for config in configs]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    variables |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "CUDA_VISIBLE_DEVICES": ""}
    variables["PYTHONPATH"] = os.pathsep.join(sys.path)
    running = [
        subprocess.Popen(
            [sys.executable, __file__, str(place / "runs.json")],
            env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    printed = [process.communicate(timeout=500)[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError("\n\n".join(printed))


def read(settings: dict[str, Any]) -> TrainingConfig:
    """The inverse of `as_dict`."""
    changes = {"shape": Shape(**settings["shape"]), "suppression": Suppression.from_dict(settings["suppression"])}
    config = TrainingConfig(**{**settings, **changes})
    return replace(config, betas=tuple(config.betas))


if __name__ == "__main__":
    import torch

    from lens_geometry.training import train

    torch.set_num_threads(1)
    for settings in json.loads(Path(sys.argv[1]).read_text()):
        train(read(settings))
