"""Registers longrnn's models with transformers, without importing it.

transformers looks its classes up in two modules, which it imports when they are first needed. If
they are loaded, the classes are registered at once; if not, when they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODULES = (
    "transformers.models.auto.configuration_auto",
    "transformers.models.auto.modeling_auto",
)


def _register_config(module: ModuleType) -> None:
    from longrnn.hf.auto.config import LongRNNConfig

    module.AutoConfig.register("longrnn", LongRNNConfig, exist_ok=True)


def _register_model(module: ModuleType) -> None:
    from longrnn.hf.auto.config import LongRNNConfig
    from longrnn.hf.auto.model import LongRNNForCausalLM

    module.AutoModelForCausalLM.register(LongRNNConfig, LongRNNForCausalLM, exist_ok=True)


REGISTER: dict[str, Callable[[ModuleType], None]] = dict(
    zip(MODULES, (_register_config, _register_model), strict=True)
)


def register() -> None:
    """Registers the classes, now or as soon as transformers is used. It may be called again."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name, work in REGISTER.items():
        if name in sys.modules:
            work(sys.modules[name])


class _Finder(MetaPathFinder):
    """Finds the modules of `REGISTER` where the other finders do, and adds the registration."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in REGISTER:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, REGISTER[fullname])
                return spec
        return None


class _Loader(Loader):
    """Loads a module with another loader, and then registers the classes."""

    def __init__(self, loader: Loader, work: Callable[[ModuleType], None]) -> None:
        self._loader, self._work = loader, work

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._work(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
