"""Compiles kernels for GPUs that need not be present, and prints what they use as JSON.

Run it in a process of its own, without TRITON_INTERPRET:
`python -m tests.ops.triton.compiled 90 forward-two backward-one`.

A case calls the host code with tensors of the device `meta` and the sizes of Mamba-2 2.7B. Launches
are recorded instead of started, so that exactly what a GPU would run is compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from longrnn.ops.ssd import ScanInputs
from longrnn.ops.ssd.chunks import Chunk
from longrnn.ops.ssd.window_step import Older, StaticWindow
from longrnn.ops.triton import (
    limited,
    limited_gradient,
    recurrence,
    recurrence_gradient,
    window_step,
    windowed,
)

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages")


class Launch(NamedTuple):
    """One launch of a kernel: the values of its arguments by name, and its options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


Case = Callable[[], list[Launch]]


class Recorder:
    """Stands for a kernel, and records launches instead of starting them."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def record(*args: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in OPTIONS if name in named}
            arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | named
            self.launches.append(Launch(self.kernel, arguments, options))

        return record


def launches_of(run: Callable[[], object], *modules: Any) -> list[Launch]:
    """The launches of `run()`, of kernels that are names in modules of host code."""
    found: list[Launch] = []
    with ExitStack() as stack:
        for module in modules:
            for name, kernel in vars(module).items():
                if isinstance(kernel, JITFunction):
                    recorder = Recorder(kernel, found)
                    stack.enter_context(mock.patch.object(module, name, recorder))
        run()
    return found


class Compiled(NamedTuple):
    """What a kernel is compiled for: types, values and divisors of its arguments, and options."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int], Any]
    attributes: dict[tuple[int], list[Any]]
    options: dict[str, int]


def specialised(launch: Launch) -> Compiled:
    """What Triton compiles for a launch; equal for launches that share a compiled kernel."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[Any]] = {}
    for number, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name] = "constexpr"
            constants[(number,)] = value
        elif isinstance(value, Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(number,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(number,)] = [["tt.divisibility", 16]]
    return Compiled(launch.kernel, signature, constants, attributes, launch.options)


def compiled(given: Compiled, architecture: int) -> dict[str, Any]:
    """Registers, bytes that do not fit into them, shared memory, and whether tensor cores run."""
    source = ASTSource(given.kernel, given.signature, given.constants, given.attributes)
    target = GPUTarget("cuda", architecture, 32)
    built = triton.compile(source, target=target, options=given.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {
        "kernel": given.kernel.__name__,
        "warps": given.options.get("num_warps", 4),
        "registers": int(found[1]),
        "spilled_bytes": int(found[2]),
        "shared_bytes": built.metadata.shared,
        "tensor_cores": re.search(r"\b(wgmma|mma\.sync)", built.asm["ptx"]) is not None,
    }


def _recurrence(dtype: torch.dtype, wide: torch.dtype, part: str, *, rounded: bool = True) -> Case:
    """A case: the recurrence on views of the output of the convolution.

    Args:
        dtype: of x, B and C.
        wide: of the state.
        part: `forward`, `backward`, `limited` and `limited-backward` for a limit on the norm of the
            state, or `walk` for the states between segments alone.
        rounded: see `longrnn.ops.triton.recurrence.plan`.
    """

    def run() -> None:
        time, h, p, n = 65_536, 80, 64, 128
        convolved = torch.empty(1, time, h * p + 2 * n, dtype=dtype, device="meta")
        x, B, C = convolved.split([h * p, n, n], dim=-1)
        gain = torch.empty(1, time, h, dtype=wide, device="meta")
        state = torch.empty(1, h, p, n, dtype=wide, device="meta")
        given = recurrence.operands(
            x.unflatten(2, (h, p)), gain, gain, B[:, :, None], C[:, :, None], state
        )
        how = recurrence.plan(given, 64, 2048, rounded=rounded)
        y = torch.empty(1, time, h, p, dtype=wide, device="meta")
        if part == "walk":
            recurrence.segment_states(given, how, state)
        elif part == "limited":
            limits = torch.empty(h, dtype=torch.float64, device="meta")
            limited.forward(given, how, limits)
        elif part == "limited-backward":
            before = torch.empty(how.segments, *state.shape, dtype=wide, device="meta")
            limited_gradient.backward(given, how, gain, before, y, state)
        elif part == "backward":
            recurrence_gradient.backward(given, how, None, y, state)
        else:
            recurrence.forward(given, how)

    return lambda: launches_of(run, limited, limited_gradient, recurrence, recurrence_gradient)


def _windowed(dtype: torch.dtype, wide: torch.dtype, *, rounded: bool = True) -> Case:
    """A case: a window of 8,000 tokens, in segments of 512."""

    def run() -> None:
        time, h, p, n = 65_536, 80, 64, 128

        def empty(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        read = time + 16 * 512
        x, B = empty(1, read, h, p, dtype=dtype), empty(1, read, 1, n, dtype=dtype)
        tokens = x, empty(1, read, h), empty(1, read, h), B
        window = windowed.Window(512, 320, 14, 3, complete=time // 512)
        stacks = windowed.Stacks(
            empty(14, 1, h, p, n), 0, empty(1, h, p, n),
            empty(1, h, dtype=FP64), empty(16, 1, h, dtype=FP64),
        )  # fmt: skip
        C = empty(1, time, 1, n, dtype=dtype)
        windowed.forward(tokens, C, window, stacks, 64, rounded=rounded)

    return lambda: launches_of(run, windowed, recurrence)


def _window_step(dtype: torch.dtype, wide: torch.dtype) -> Case:
    """A case: one token of a window of 8,000 tokens, in chunks of 512."""

    def run() -> None:
        h, p, n = 80, 64, 128

        def empty(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.empty(2, *shape, dtype=dtype, device="meta")

        def tokens(time: int) -> tuple[Tensor, ...]:
            x, B = empty(time, h, p, dtype=dtype), empty(time, 1, n, dtype=dtype)
            return x, empty(time, h), empty(time, h), B

        token = ScanInputs(*tokens(1), C=empty(1, 1, n, dtype=dtype))
        x, weight, _, B = tokens(831)
        offset = torch.empty(2, dtype=torch.int64, device="meta")
        start = empty(h, p, n)
        static = StaticWindow(offset, Chunk(*tokens(512)), Older(x, B, weight), start)
        window_step.step(token, static)

    return lambda: launches_of(run, window_step)


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CASES: dict[str, Case] = {
    "walk-one": _recurrence(BF16, FP32, "walk"),
    "forward-one": _recurrence(BF16, FP32, "forward"),
    "forward-two": _recurrence(BF16, FP32, "forward", rounded=False),
    "forward-float32": _recurrence(FP32, FP32, "forward"),
    "forward-float64": _recurrence(FP64, FP64, "forward"),
    "limited-two": _recurrence(BF16, FP32, "limited", rounded=False),
    "limited-float32": _recurrence(FP32, FP32, "limited"),
    "limited-float64": _recurrence(FP64, FP64, "limited"),
    "limited-one": _recurrence(BF16, FP32, "limited"),
    "limited-backward-one": _recurrence(BF16, FP32, "limited-backward"),
    "limited-backward-float32": _recurrence(FP32, FP32, "limited-backward"),
    "limited-backward-float64": _recurrence(FP64, FP64, "limited-backward"),
    "windowed-one": _windowed(BF16, FP32),
    "windowed-two": _windowed(BF16, FP32, rounded=False),
    "windowed-float32": _windowed(FP32, FP32),
    "windowed-float64": _windowed(FP64, FP64),
    "window-step-two": _window_step(BF16, FP32),
    "window-step-float32": _window_step(FP32, FP32),
    "window-step-float64": _window_step(FP64, FP64),
    "backward-one": _recurrence(BF16, FP32, "backward"),
    "backward-float32": _recurrence(FP32, FP32, "backward"),
    "backward-float64": _recurrence(FP64, FP64, "backward"),
}


def main(architecture: str, *names: str) -> None:
    for name in names:
        found = map(specialised, CASES[name]())
        distinct = {f"{one.kernel.__name__} {one[1:]}": one for one in found}
        for one in distinct.values():
            print(json.dumps({"case": name, **compiled(one, int(architecture))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
