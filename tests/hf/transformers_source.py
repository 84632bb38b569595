"""transformers' own common tests, loaded from its source distribution.

An installed transformers has no tests. `LONGRNN_TRANSFORMERS_SOURCE` names the folder of the
unpacked source distribution of the installed version; `make test` downloads it. Stand-ins replace
the modules that the common tests import and that the distribution lacks.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

VARIABLE = "LONGRNN_TRANSFORMERS_SOURCE"
INSTALLED = version("transformers")
COMMAND = (
    f"pip download --no-deps --no-binary transformers transformers=={INSTALLED} && "
    f"tar xf transformers-{INSTALLED}.tar.gz && "
    f"export {VARIABLE}=$PWD/transformers-{INSTALLED}"
)
PACKAGE = "transformers_common_tests"

# Values that differ from the defaults of every configuration, for the tester of configurations.
CONFIG_OPTIONS = {
    "return_dict": False,
    "output_hidden_states": True,
    "dtype": "float16",
    "architectures": ["LongRNNForCausalLM"],
    "id2label": {0: "negative", 1: "positive"},
    "label2id": {"negative": 0, "positive": 1},
    "problem_type": "regression",
    "chunk_size_feed_forward": 3,
}


STAND_INS: dict[str, dict[str, Any]] = {
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils.test_configuration_utils": {"config_common_kwargs": CONFIG_OPTIONS},
}


class Unavailable(Exception):
    """There is no folder with the tests of the installed version, or a package is missing."""


class CommonTests(NamedTuple):
    """What was loaded.

    Attributes:
        modeling: the module with the tests of all models.
        training: the mixin that trains on one batch.
        config: the tester of a configuration.
    """

    modeling: Any
    training: Any
    config: Any


def folder() -> Path:
    """The folder of the source.

    Raises:
        Unavailable: it is not given, has no tests, or is of another version.
    """
    given = os.environ.get(VARIABLE)
    if not given:
        raise Unavailable(f"{VARIABLE} is not set: {COMMAND}")
    path = Path(given)
    if not (path / "tests" / "test_modeling_common.py").is_file():
        raise Unavailable(f"{VARIABLE}={given} has no tests/test_modeling_common.py: {COMMAND}")
    code = path / "src" / "transformers" / "__init__.py"
    found = re.search(r'^__version__ = "(.+)"', code.read_text(), re.M) if code.is_file() else None
    if found is None or found[1] != INSTALLED:
        known = "of unknown version" if found is None else f"transformers {found[1]}"
        raise Unavailable(f"{VARIABLE}={given} is {known}, not {INSTALLED}: {COMMAND}")
    return path


def markers() -> list[str]:
    """The pytest markers of the tests in the folder; none without a folder."""
    try:
        tests = folder() / "tests"
    except Unavailable:
        return []
    import transformers.testing_utils

    files = [*tests.glob("test_*.py"), Path(transformers.testing_utils.__file__)]
    code = "\n".join(path.read_text() for path in files)
    return sorted(set(re.findall(r"\bmark\.([a-z]\w+)", code)))


def load() -> CommonTests:
    """Imports the common tests.

    Raises:
        Unavailable: see `folder`; or the package `parameterized`, which they import, is missing.
    """
    tests = folder() / "tests"
    if find_spec("parameterized") is None:
        raise Unavailable("transformers' tests import parameterized: pip install parameterized")
    import transformers.utils

    _module(PACKAGE, __path__=[str(tests)])
    for name, content in STAND_INS.items():
        _module(f"{PACKAGE}.{name}", **content)
    # The tester of configurations imports transformers in a way that needs the tests' __init__.py.
    direct = mock.Mock(return_value=transformers)
    with mock.patch.object(transformers.utils, "direct_transformers_import", direct):
        config = import_module(f"{PACKAGE}.test_configuration_common").ConfigTester
    training = import_module(f"{PACKAGE}.test_training_mixin").TrainingTesterMixin
    modeling = import_module(f"{PACKAGE}.test_modeling_common")
    return CommonTests(modeling, training, config)


def _module(name: str, **content: Any) -> None:
    """Makes a module that can be imported."""
    module = ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module
