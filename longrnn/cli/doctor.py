"""`longrnn doctor`."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

import typer

from longrnn.bundled import bundled
from longrnn.console import print_rows

# The optional packages are the second line; docs/devices.md says what needs them.
PACKAGES = (
    "longrnn", "torch", "transformers", "accelerate", "safetensors",
    "datasets", "lm-eval", "peft", "tensorboard", "wandb", "trackio", "fla-core", "mamba-ssm",
)  # fmt: skip


def doctor() -> None:
    """Check this installation: versions, devices, and a short test of every backend.

    Each backend computes a Mamba-2 layer, forward and backward. Exits with 1 if one fails or does
    not give the results of float64.

    Example: longrnn doctor
    """
    import torch

    for name, value in {**{one: _version(one) for one in PACKAGES}, **_machine()}.items():
        typer.echo(f"{name:<14}{value}")
    typer.echo("\nLargest errors in float32, relative to the largest entry of each result:")
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    failed = [line for device in devices for line in _backends(device)]
    for line in failed:
        typer.echo(f"failed on this machine, please report it: {line}", err=True)
    if failed:
        raise typer.Exit(1)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _machine() -> dict[str, str]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = [f"{g.name}, {g.total_memory / 2**30:.0f} GiB, sm_{g.major}{g.minor}" for g in found]
    return {
        "processor": f"{torch.backends.cpu.get_cpu_capability()}, {cores} cores",
        "threads": f"{torch.get_num_threads()} of torch (OMP_NUM_THREADS)",
        "CUDA of torch": torch.version.cuda or "none: this build of torch runs on CPUs only",
        "GPUs": "; ".join(gpus) or "none that torch can use; `nvidia-smi` lists those of NVIDIA",
        "examples": f"{bundled('configs')}\n{'':<14}{bundled('eval')}",
    }


def _backends(device: str) -> list[str]:
    """Print the table of backends on a type of device; return one line per backend that failed."""
    from longrnn.cells.self_test import self_test
    from longrnn.errors import UserError
    from longrnn.files import one_line
    from longrnn.ops.backend import BACKENDS

    rows, failed = [], []
    for backend in BACKENDS:
        try:
            found = self_test(backend, device)
        except UserError as error:
            rows.append((backend, f"not available: {error}", "–"))
        except Exception as error:  # kernels that do not compile or start raise many types
            rows.append((backend, "FAILED", "–"))
            failed.append(f"{backend} on {device}: {type(error).__name__}, {one_line(error)}")
        else:
            verdict = "passed" if found.passed else "FAILED"
            rows.append((backend, f"{found.error:.1e} {verdict}", f"{found.seconds * 1e3:.1f}"))
            failed += [] if found.passed else [f"{backend} on {device}: wrong results"]
    columns = ("backend", "error", "ms without gradients")
    print_rows(f"A Mamba-2 layer on {device}", columns, rows, width=100)
    return failed
