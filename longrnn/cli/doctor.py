"""`longrnn doctor`."""

from importlib.metadata import PackageNotFoundError, version

import typer

from longrnn.bundled import bundled
from longrnn.console import print_rows, say
from longrnn.threads import usable_cores

# The optional packages are the second line; docs/devices.md says what needs them.
PACKAGES = (
    "longrnn", "torch", "transformers", "accelerate", "safetensors",
    "datasets", "lm-eval", "peft", "tensorboard", "wandb", "trackio", "fla-core", "mamba-ssm",
)  # fmt: skip


def doctor() -> None:
    """Check this installation: versions, devices, and a short test of every backend.

    Each backend of each cell computes a layer, forward and backward. Exits with 1 if one fails or
    does not give the results of float64.

    Example: longrnn doctor
    """
    import torch

    from longrnn.cells import MIXERS
    from longrnn.cells.self_test import backends

    versions = {package: _version(package) for package in PACKAGES}
    for name, value in (versions | _machine()).items():
        say(f"{name:<14}{value}")
    say("\nLargest errors in float32, relative to the largest entry of each result:")
    failed = []
    for device in ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]:
        for cell in MIXERS:
            rows = [_tested(cell, backend, device) for backend in backends(cell)]
            columns = ("backend", "error", "ms without gradients")
            print_rows(f"A layer of {cell} on {device}", columns, rows)
            failed += [
                f"{backend} of {cell} on {device}: {result}"
                for backend, result, _ in rows
                if "FAILED" in result
            ]
    if failed:
        say(f"please report what failed on this machine: {'; '.join(failed)}", error=True)
        raise typer.Exit(1)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _machine() -> dict[str, str]:
    import torch

    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    gpus = [f"{g.name}, {g.total_memory / 2**30:.0f} GiB, sm_{g.major}{g.minor}" for g in devices]
    return {
        "processor": f"{torch.backends.cpu.get_cpu_capability()}, {usable_cores()} cores",
        "threads": f"{torch.get_num_threads()} of torch (OMP_NUM_THREADS)",
        "CUDA of torch": torch.version.cuda or "none: this build of torch runs on CPUs only",
        "GPUs": "; ".join(gpus) or "none that torch can use; `nvidia-smi` lists those of NVIDIA",
        "examples": f"{bundled('configs')}\n{'':<14}{bundled('eval')}",
    }


def _tested(cell: str, backend: str, device: str) -> tuple[str, str, str]:
    """Return the row of a backend of a cell on a type of device."""
    from longrnn.cells.self_test import self_test
    from longrnn.errors import UserError
    from longrnn.files import one_line

    try:
        result = self_test(cell, backend, device)
    except UserError as error:
        return backend, f"not available: {error}", "–"
    except Exception as error:  # kernels that do not compile or start raise many types
        return backend, f"FAILED: {type(error).__name__}, {one_line(error)}", "–"
    verdict = "passed" if result.passed else "FAILED: wrong results"
    return backend, f"{result.error:.1e} {verdict}", f"{result.seconds * 1e3:.1f}"
