"""`longrnn doctor`."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from longrnn.bundled import bundled

if TYPE_CHECKING:
    from rich.table import Table

    from longrnn.mixers.self_test import LayerFinding
    from longrnn.ops.ssd.self_test import Finding

# Packages in the order of the table, and what needs those that are optional.
PACKAGES = {
    "longrnn": "",
    "torch": "",
    "transformers": "",
    "accelerate": "",
    "safetensors": "",
    "triton": "backend triton, on NVIDIA GPUs",
    "datasets": "training on tables and datasets",
    "lm-eval": "eval harness",
    "peft": "LoRA",
    "tensorboard": "report_to=tensorboard",
    "wandb": "report_to=wandb",
    "trackio": "report_to=trackio",
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


def doctor() -> None:
    """Check this installation: versions, devices, and a short test of every backend.

    Each backend computes the recurrence of Mamba-2, and a whole layer. Exits with 1 if one fails or
    does not give the results of the reference.

    Example: longrnn doctor
    """
    from longrnn.console import print_table

    for name, needed in PACKAGES.items():
        typer.echo(f"{name:<14}{_version(name, needed)}")
    typer.echo("")
    for name, value in _machine().items():
        typer.echo(f"{name:<14}{value}")
    typer.echo("")
    typer.echo("Largest errors in float32, relative to the largest entry of each result:")
    failed = []
    for device in _devices():
        table, wrong = _backends(device)
        print_table(table, 100)
        for backend, why in _unavailable(device).items():
            typer.echo(f"{backend} is not available on {device}. {why[0].upper()}{why[1:]}.")
        typer.echo("")
        failed += wrong
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
    devices = []
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        memory, capability = found.total_memory / 2**30, f"{found.major}.{found.minor}"
        devices.append(
            f"cuda:{number} {found.name}, {memory:.0f} GiB, compute capability {capability}"
        )
    return {
        "processor": f"{torch.backends.cpu.get_cpu_capability()}, "
        f"{cores} core{'s' * (cores != 1)}, {threads} thread{'s' * (threads != 1)}",
        "CUDA of torch": torch.version.cuda or "none: this build of torch runs on CPUs only",
        "GPUs": f"\n{'':<14}".join(devices) or "none that torch can use",
        "examples": f"{bundled('configs')}\n{'':<14}{bundled('eval')}",
    }


def _devices() -> list[str]:
    """The types of device to test the recurrence on."""
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _unavailable(device: str) -> dict[str, str]:
    """The backends that do not run on a type of device, each with the reason."""
    from longrnn.ops.native import missing as missing_native
    from longrnn.ops.ssd import KERNELS
    from longrnn.ops.ssd.mamba_ssm import missing as missing_mamba_ssm
    from longrnn.ops.triton import interpreting
    from longrnn.ops.triton import missing as missing_triton

    reasons = {"native": missing_native(), "triton": missing_triton()}
    if interpreting():
        reasons["triton"] = "TRITON_INTERPRET=1 keeps its kernels off the GPU: unset it"
    for other, name in KERNELS.items():
        # There it would compute by `chunked`, which is tested anyway.
        if other != device and reasons[name] is None:
            reasons[name] = f"it has kernels for the device {other} only: use backend=auto"
    reasons["mamba_ssm"] = missing_mamba_ssm(device)
    return {name: why for name, why in reasons.items() if why is not None}


def _backends(device: str) -> tuple[Table, list[str]]:
    """The table of backends on one type of device, and one line per backend that failed."""
    from rich.table import Table

    from longrnn.files import one_line
    from longrnn.mixers.self_test import layer_self_test
    from longrnn.ops.ssd import BACKENDS, PARTIAL, resolve
    from longrnn.ops.ssd.self_test import self_test

    table = Table(title=f"Mamba-2 on {device} (auto: {resolve('auto', device)})")
    for column in ("backend", "recurrence", "layer", "time without gradients"):
        table.add_column(column)
    unavailable, failed, chunked = _unavailable(device), [], None
    tested = [name for name in BACKENDS | PARTIAL if name not in unavailable]
    for backend in sorted(tested, key=lambda name: name != "chunked"):
        try:
            found, layer = self_test(backend, device), layer_self_test(backend, device)
        except Exception as error:  # kernels that do not compile or start raise many types
            table.add_row(backend, "FAILED", "FAILED", "–")
            failed.append(f"{backend} on {device}: {type(error).__name__}, {one_line(error)}")
            continue
        chunked = found.seconds if backend == "chunked" else chunked
        times = "–" if chunked is None else f"{found.seconds / chunked:.2f} × chunked"
        table.add_row(backend, _verdict(found), _verdict(layer), times)
        if not (found.passed and layer.passed):
            failed.append(f"{backend} on {device}: wrong results")
    return table, failed


def _verdict(found: Finding | LayerFinding) -> str:
    return f"{found.error:.1e} {'passed' if found.passed else 'FAILED'}"


def _advice() -> list[str]:
    """What would make this installation faster."""
    import torch

    if torch.cuda.is_available():
        return []
    advice = []
    if NVIDIA_DRIVER.exists():
        advice.append(HIDDEN_GPU if torch.version.cuda else CPU_BUILD)
    if torch.get_num_threads() > 1 and "OMP_NUM_THREADS" not in os.environ:
        advice.append(
            "On a machine that other programs use too, OMP_NUM_THREADS=1 is often faster: the "
            "threads of a call wait for one another."
        )
    return advice
