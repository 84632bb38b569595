"""`longrnn doctor`."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from longrnn.bundled import bundled
from longrnn.console import print_rows

# Packages in the order of the table, and what needs those that are optional.
PACKAGES = {
    "longrnn": "",
    "torch": "",
    "transformers": "",
    "accelerate": "",
    "safetensors": "",
    "datasets": "training on tables and datasets",
    "lm-eval": "eval harness",
    "peft": "LoRA",
    "tensorboard": "report_to=tensorboard",
    "wandb": "report_to=wandb",
    "trackio": "report_to=trackio",
    "fla-core": "backend fla, on NVIDIA GPUs",
    "mamba-ssm": "backend mamba_ssm, on NVIDIA GPUs",
}

# Where the kernel driver of NVIDIA GPUs reports its version.
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
CPU_BUILD = (
    "This machine has an NVIDIA GPU, and torch was built without CUDA: install a build with CUDA, "
    "see https://pytorch.org/get-started/locally."
)
HIDDEN_GPU = (
    "This machine has an NVIDIA GPU that torch cannot use: compare the CUDA version that "
    "nvidia-smi prints with that of torch, and see whether CUDA_VISIBLE_DEVICES hides the GPU."
)
SHARED_MACHINE = (
    "On a machine that other programs use too, OMP_NUM_THREADS=1 is often faster: the threads of a "
    "call wait for one another."
)


def doctor() -> None:
    """Check this installation: versions, devices, and a short test of every backend.

    Each backend computes a Mamba-2 layer, forward and backward. Exits with 1 if one fails or does
    not give the results of float64.

    Example: longrnn doctor
    """
    import torch

    found = {name: _version(name, needed) for name, needed in PACKAGES.items()}
    for name, value in {**found, **_machine()}.items():
        typer.echo(f"{name:<14}{value}")
    typer.echo("\nLargest errors in float32, relative to the largest entry of each result:")
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    failed = [line for device in devices for line in _backends(device)]
    for line in _advice():
        typer.echo(line)
    for line in failed:
        typer.echo(f"failed on this machine, please report it: {line}", err=True)
    if failed:
        raise typer.Exit(1)


def _version(name: str, needed: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"not installed ({needed}: pip install {name})" if needed else "not installed"


def _machine() -> dict[str, str]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = [f"{g.name}, {g.total_memory / 2**30:.0f} GiB, sm_{g.major}{g.minor}" for g in found]
    return {
        "processor": f"{torch.backends.cpu.get_cpu_capability()}, "
        f"{cores} core{'s' * (cores != 1)}, {threads} thread{'s' * (threads != 1)}",
        "CUDA of torch": torch.version.cuda or "none: this build of torch runs on CPUs only",
        "GPUs": "; ".join(gpus) or "none that torch can use",
        "examples": f"{bundled('configs')}\n{'':<14}{bundled('eval')}",
    }


def _backends(device: str) -> list[str]:
    """Prints the table of backends on one type of device; one line per backend that failed."""
    from longrnn.cells.self_test import self_test
    from longrnn.errors import UserError
    from longrnn.files import one_line
    from longrnn.ops.backend import BACKENDS

    rows, failed, plain = [], [], None
    for backend in BACKENDS:
        try:
            found = self_test(backend, device)
        except UserError as error:
            rows.append((backend, f"not available: {error}", "–"))
            continue
        except Exception as error:  # kernels that do not compile or start raise many types
            rows.append((backend, "FAILED", "–"))
            failed.append(f"{backend} on {device}: {type(error).__name__}, {one_line(error)}")
            continue
        plain = found.seconds if backend == "torch" else plain
        time = "–" if plain is None else f"{found.seconds / plain:.2f} × torch"
        rows.append((backend, f"{found.error:.1e} {'passed' if found.passed else 'FAILED'}", time))
        if not found.passed:
            failed.append(f"{backend} on {device}: wrong results")
    columns = ("backend", "error", "time without gradients")
    print_rows(f"A Mamba-2 layer on {device}", columns, rows, width=100)
    return failed


def _advice() -> list[str]:
    """What would make this installation faster."""
    import torch

    if torch.cuda.is_available():
        return []
    advice = []
    if NVIDIA_DRIVER.exists():
        advice.append(HIDDEN_GPU if torch.version.cuda else CPU_BUILD)
    if torch.get_num_threads() > 1 and "OMP_NUM_THREADS" not in os.environ:
        advice.append(SHARED_MACHINE)
    return advice
