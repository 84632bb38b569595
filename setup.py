"""Compiles the C++ kernels of `longrnn.ops.cpu`, and copies what `longrnn.bundled` finds.

Everything else is in pyproject.toml. The kernels are compiled once per instruction set. Without a
compiler, or on a machine for which a library cannot be compiled, the installation succeeds without
it; `longrnn info` names the backend that runs.
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
FOLDER = Path("longrnn/ops/cpu")
TABLE = runpy.run_path(str(FOLDER / "signatures.py"))
GENERATED = Path("build/generated")
GENERATED.mkdir(parents=True, exist_ok=True)
(GENERATED / "signatures.h").write_text(TABLE["header"]())
for name in SETS:  # a source of its own, and so an object of its own, as they are compiled at once
    source = GENERATED / f"{name}.cpp"
    if not source.exists():
        source.write_text('#include "kernels.cpp"\n')
HEADERS = sorted(str(path) for path in FOLDER.glob("*.h"))
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
    options={"build_ext": {"parallel": True}},
    ext_modules=[
        Extension(
            f"longrnn.ops.cpu._{name}",
            [str(GENERATED / f"{name}.cpp")],
            include_dirs=[str(GENERATED), str(FOLDER)],
            # Compiled again when these change, and they are part of the source distribution.
            depends=[*HEADERS, str(FOLDER / "kernels.cpp"), str(FOLDER / "signatures.py")],
            define_macros=[("LONGRNN_SOURCES", f'"{TABLE["digest"](FOLDER)}"')],
            extra_compile_args=["-O3", "-std=c++17", "-fno-math-errno", *OPENMP, *flags],
            extra_link_args=OPENMP,
            language="c++",
            optional=True,
        )
        for name, flags in SETS.items()
    ],
)
