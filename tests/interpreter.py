"""Makes Triton's interpreter, in which the kernels run on a CPU, about twice as fast.

At every call of a device function the interpreter replaces the functions of `triton.language` by
its own again, although the call of the kernel has done so: half the time of a small kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def speed_up() -> None:
    """Replaces the functions of `triton.language` once per call of a kernel, from now on.

    Does nothing for a version of Triton without the private functions that this changes.
    """
    from triton import language
    from triton.runtime import interpreter

    names = ("_patch_lang", "_LangPatchScope", "GridExecutor")
    if not all(hasattr(interpreter, name) for name in names):
        return
    patch, call = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: list[set[str]] = []  # modules, per kernel that is running

    def patch_once(function: Any) -> Any:
        modules = (language, language.core)
        used = {
            one.__name__
            for one in function.__globals__.values()
            if any(one is module for module in modules)
        }
        if replaced and used <= replaced[-1]:
            return interpreter._LangPatchScope()
        if replaced:
            replaced[-1] |= used
        return patch(function)

    def run(self: Any, *args: Any, **named: Any) -> Any:
        replaced.append(set())
        try:
            return call(self, *args, **named)
        finally:
            replaced.pop()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = run
