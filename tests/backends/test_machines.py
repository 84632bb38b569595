"""The C++ kernels give the same numbers on every machine; other tests use one thread of one."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn.ops.cpu import library, signatures
from longrnn.ops.scan import SCAN
from tests.backends.test_operations import inputs_of
from tests.contracts.builders import Spec, build_mitigated, random_tokens
from tests.contracts.subjects import assert_same, every_dtype, needs_kernels, outcome, read

MAMBA2: Spec = {"kind": "mamba2", "d_state": 32, "head_dim": 16, "n_groups": 2, "backend": "cpu"}
DELTA: Spec = {"kind": "gated_deltanet", "key_dim": 32, "value_dim": 16, "backend": "cpu"}
LIMIT: Spec = {"kind": "state_norm", "threshold": 0.3}
WINDOW: Spec = {"kind": "sliding_window", "window": 70}
CASES: list[tuple[list[Spec], Spec]] = [([], MAMBA2), ([LIMIT], MAMBA2), ([WINDOW], MAMBA2)]
CASES += [([], DELTA), ([LIMIT], {"kind": "gru"})]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Loads the kernels of an instruction set, until the end of the test."""

    def load(capability: str) -> None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        library.library.cache_clear()
        library._function.cache_clear()
        library._loaded.cache_clear()

    best = torch.backends.cpu.get_cpu_capability()
    yield load
    load(best)
    torch.set_num_threads(1)


@needs_kernels
@every_dtype
@pytest.mark.parametrize(("specs", "mixer"), CASES, ids=str)
def test_instruction_sets_and_threads(
    specs: list[Spec], mixer: Spec, dtype: torch.dtype, load: Callable[[str], None]
) -> None:
    model, tokens = build_mitigated(specs, mixer, dtype=dtype, d_model=64), random_tokens(7, 150)
    known, found = list(library.CAPABILITIES), []
    best = torch.backends.cpu.get_cpu_capability()
    runnable = known[known.index(best if best in known else "DEFAULT") :]
    for number, capability in enumerate(runnable):
        load(capability)
        torch.set_num_threads(1 + 2 * (number % 2))
        with torch.no_grad():
            logits, _ = read(model, tokens, None, [147, 1, 1, 1])
        found.append(outcome(model, tokens, model.init_state(7), [147, 3]) | {"read": logits})
        assert_same(found[-1], found[0], dtype)


PREFILL = """
import resource, torch
from longrnn import load
torch.set_num_threads(1)
model, tokens = load("collapse-tiny"), torch.zeros(1, 8192, dtype=torch.int64)
faults = []
with torch.inference_mode():
    for _ in range(4):
        model(tokens, keep=0)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(min(b - a for a, b in zip(faults, faults[1:])))
"""


@needs_kernels
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the heap is that of another C library"
)
def test_a_repeated_call_has_its_memory_from_the_call_before() -> None:
    """Hardly a page is new. With the settings of glibc, 3,000 to 45,000 pages of a call are."""
    ran = subprocess.run(
        [sys.executable, "-c", PREFILL], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) < 2000


@needs_kernels
def test_libraries_of_other_sources_are_not_used(
    load: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an update of a checkout: they would read arguments of another layout."""
    inputs, state = inputs_of((1, 3, 2, 3, 1, 5), torch.float32)
    for digest, expected in (("0" * 16, "torch"), (None, "cpu")):  # None: installed without sources
        monkeypatch.setattr(signatures, "digest", lambda digest=digest: digest)
        load("DEFAULT")
        chosen = SCAN.choose("auto", inputs, state)
        assert chosen is not None
        assert chosen.name == expected


CHECKED = """
import ctypes, sys, pytest
from longrnn.ops.cpu import library
loaded = ctypes.CDLL(sys.argv[1])
library.library = lambda: loaded
sys.exit(pytest.main(["-n", "0", "-q", "-x", *sys.argv[2:]]))
"""
TESTS = ["backends/test_operations.py", "cells", "models/test_token_stack.py", "ops"]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@needs_compiler
def test_the_kernels_compile_without_openmp_and_without_warnings(tmp_path: Path) -> None:
    """As on macOS, where a function that returned nothing without it once had no defined result."""
    (tmp_path / "signatures.h").write_text(signatures.header())
    flags = "-std=c++17 -fsyntax-only -Wall -Werror -Wno-unknown-pragmas"
    folders = [f"-I{tmp_path}", f"-I{signatures.FOLDER}"]
    subprocess.check_call(["g++", *flags.split(), *folders, signatures.FOLDER / "kernels.cpp"])


@pytest.mark.slow
@needs_compiler
@needs_kernels
def test_the_kernels_touch_no_memory_that_is_not_theirs(tmp_path: Path) -> None:
    """Under the address and undefined-behaviour sanitizers of the compiler."""
    built, folder = str(tmp_path / "checked.so"), Path(__file__).parents[1]
    (tmp_path / "signatures.h").write_text(signatures.header())
    flags = "-O1 -g -std=c++17 -march=native -fopenmp -fPIC -shared -fno-sanitize-recover=all"
    flags += f" -fsanitize=address,undefined -I{tmp_path} -I{signatures.FOLDER}"
    source = str(signatures.FOLDER / "kernels.cpp")
    subprocess.check_call(["g++", *flags.split(), "-o", built, source])
    find = [["g++", f"-print-file-name=lib{name}.so"] for name in ("asan", "ubsan")]
    runtime = " ".join(subprocess.check_output(one, text=True).strip() for one in find)
    checks = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
    run = [sys.executable, "-c", CHECKED, built, *(str(folder / name) for name in TESTS)]
    pipe: Any = {"capture_output": True, "text": True, "cwd": folder.parent}
    done = subprocess.run(run, env={**os.environ, **checks}, **pipe)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
