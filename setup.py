"""Compiles the C++ kernels of `longrnn.ops.cpu`, once per instruction set.

Everything else is in pyproject.toml. Without a compiler, or on a machine for which a library cannot
be compiled, the installation succeeds without it; `longrnn info` names the backend that runs.
"""

import platform
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup

SETS = {"generic": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    SETS |= {"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
FOLDER = Path("longrnn/ops/cpu")
TABLE = runpy.run_path(str(FOLDER / "signatures.py"))
(FOLDER / "signatures.h").write_text(TABLE["header"]())
HEADERS = sorted(str(path) for path in FOLDER.glob("*.h"))
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []

setup(
    ext_modules=[
        Extension(
            f"longrnn.ops.cpu._{name}",
            [str(FOLDER / "kernels.cpp")],
            depends=HEADERS,  # compiled again when they change, and part of the source distribution
            define_macros=[("LONGRNN_SOURCES", f'"{TABLE["digest"](FOLDER)}"')],
            extra_compile_args=["-O3", "-std=c++17", "-fno-math-errno", *OPENMP, *flags],
            extra_link_args=OPENMP,
            language="c++",
            optional=True,
        )
        for name, flags in SETS.items()
    ]
)
