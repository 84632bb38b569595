"""Where the tasks and suites of `eval/` lie, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def bundled() -> Path:
    """The folder with `tasks/` (YAML of lm-eval) and `suites/` (YAML of `longrnn compare`).

    A wheel carries it inside the package, a checkout has it beside the package.
    """
    inside = PACKAGE / "bundled"
    return inside if inside.is_dir() else PACKAGE.parent / "eval"
