"""Copies `eval/` into the wheel: data that stands beside the package in a checkout."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithEval(build_py):
    """The package, and `eval/` as `longrnn/bundled/`."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "longrnn" / "bundled"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("eval", target, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithEval})
