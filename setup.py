"""Build script that copies `eval/`, which is outside of the package, into the wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithEval(build_py):
    """Builds the package and copies `eval/` to `longrnn/bundled/`."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "longrnn" / "bundled"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("eval", target, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithEval})
