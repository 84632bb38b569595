"""`longrnn doctor`."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table

# Packages in the order of the table, and what needs those that are optional.
PACKAGES = {
    "longrnn": "",
    "torch": "",
    "transformers": "",
    "accelerate": "",
    "safetensors": "",
    "triton": "fast kernels on a GPU: pip install 'longrnn[cuda]'",
    "datasets": "training on tables and datasets: pip install 'longrnn[data]'",
    "lm-eval": "eval harness: pip install 'longrnn[harness]'",
    "peft": "LoRA: pip install 'longrnn[lora]'",
    "tensorboard": "report_to=tensorboard: pip install 'longrnn[tensorboard]'",
    "wandb": "report_to=wandb: pip install 'longrnn[trackers]'",
    "trackio": "report_to=trackio: pip install 'longrnn[trackers]'",
    "mamba-ssm": "backend mamba_ssm, on NVIDIA GPUs: pip install mamba-ssm",
}


def doctor() -> None:
    """Check this installation: versions, devices, and a short test of every backend.

    Exits with 1 if a backend does not give the results of the reference.

    Example: longrnn doctor
    """
    from longrnn.console import print_table

    for name, needed in PACKAGES.items():
        typer.echo(f"{name:<14}{_version(name, needed)}")
    typer.echo("")
    for name, value in _machine().items():
        typer.echo(f"{name:<14}{value}")
    typer.echo("")
    failed = []
    for device in _devices():
        table, wrong = _backends(device)
        print_table(table, 100)
        failed += wrong
    for line in _advice():
        typer.echo(line)
    if failed:
        typer.echo(
            f"wrong results on this machine, please report it: {', '.join(failed)}", err=True
        )
        raise typer.Exit(1)


def _version(name: str, needed: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return f"not installed ({needed})" if needed else "not installed: pip install longrnn"


def _machine() -> dict[str, str]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = [
        f"cuda:{number} {torch.cuda.get_device_name(number)}"
        for number in range(torch.cuda.device_count())
    ]
    return {
        "processor": f"{torch.backends.cpu.get_cpu_capability()}, {cores} cores, "
        f"{torch.get_num_threads()} threads",
        "accelerators": ", ".join(devices) or "none that torch sees",
    }


def _devices() -> list[str]:
    """The types of device to test the recurrence on."""
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _backends(device: str) -> tuple[Table, list[str]]:
    """The table of backends on one type of device, and the names of those with wrong results."""
    from rich.table import Table

    from longrnn.ops.native import missing as missing_native
    from longrnn.ops.ssd import BACKENDS, KERNELS, resolve
    from longrnn.ops.ssd.self_test import self_test
    from longrnn.ops.triton import missing as missing_triton

    table = Table(title=f"recurrence of Mamba-2 on {device} (auto: {resolve('auto', device)})")
    for column in ("backend", "available", "largest error (float32)", "time without gradients"):
        table.add_column(column)
    # Kernels for another device would compute by `chunked`, which is tested anyway.
    elsewhere = {name for other, name in KERNELS.items() if other != device}
    findings = {name: self_test(name, device) for name in BACKENDS if name not in elsewhere}
    slowest = findings["chunked"].seconds
    for backend, found in findings.items():
        verdict = f"{found.error:.1e} {'passed' if found.passed else 'FAILED'}"
        table.add_row(backend, "yes", verdict, f"{found.seconds / slowest:.2f} × chunked")
    reasons = {"native": missing_native(), "triton": missing_triton()}
    for backend in sorted(reasons.keys() - findings.keys()):
        table.add_row(backend, f"no: {reasons[backend] or 'not on this device'}", "–", "–")
    failed = [f"{backend} on {device}" for backend, found in findings.items() if not found.passed]
    return table, failed


def _advice() -> list[str]:
    """What would make this installation faster."""
    import torch

    from longrnn.ops.triton import missing

    advice = []
    if torch.cuda.is_available():
        if (why := missing()) is not None:
            advice.append(f"The recurrence runs in plain torch on a GPU. {why}.")
    elif torch.get_num_threads() > 1 and "OMP_NUM_THREADS" not in os.environ:
        advice.append(
            "On a machine that other programs use too, OMP_NUM_THREADS=1 is often faster: the "
            "threads of a call wait for one another."
        )
    return advice
