"""Compiles the C++ kernels of `longrnn.ops.native`, and copies what `longrnn.bundled` finds.

Everything else is in pyproject.toml. The kernels are compiled once per instruction set. Without a
compiler, or on a machine for which a library cannot be compiled, the installation succeeds without
it; `longrnn info` says which backend runs.
"""

import platform
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

SETS = {"generic": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    SETS |= {"avx2": ["-march=x86-64-v3"], "avx512": ["-march=x86-64-v4"]}
FOLDER = Path("longrnn/ops/native")
HEADERS = sorted(str(path) for path in FOLDER.glob("*.h"))
SOURCES = runpy.run_path(str(FOLDER / "sources.py"))["digest"](FOLDER)
OPENMP = ["-fopenmp"] if sys.platform == "linux" else []
# Files of the checkout that `longrnn.bundled` finds inside the package in a wheel.
BUNDLED = ("eval/*/*.*", "configs/*/*.*")


class BuildPy(build_py):
    """Copies `eval/` and `configs/` into the wheel and the source distribution."""

    files = tuple(str(path) for pattern in BUNDLED for path in sorted(Path().glob(pattern)))

    def run(self):
        super().run()
        for file in () if self.editable_mode else self.files:
            target = Path(self.build_lib, "longrnn/_bundled", file)
            self.mkpath(str(target.parent))
            self.copy_file(file, str(target))

    def get_source_files(self):
        return [*super().get_source_files(), *self.files]


setup(
    cmdclass={"build_py": BuildPy},
    ext_modules=[
        Extension(
            f"longrnn.ops.native._{name}",
            [str(FOLDER / "kernels.cpp")],
            depends=HEADERS,  # compiled again when they change, and part of the source distribution
            define_macros=[("LONGRNN_SOURCES", f'"{SOURCES}"')],
            extra_compile_args=["-O3", "-std=c++17", "-fno-math-errno", *OPENMP, *flags],
            extra_link_args=OPENMP,
            language="c++",
            optional=True,
        )
        for name, flags in SETS.items()
    ],
)
