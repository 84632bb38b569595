"""The modules of users that `--import` names: what they register, and how a run records them.

A run records in its train.yaml what was imported and what that registered. Nothing is ever imported
because a folder says so: a folder whose names are not registered is refused, with the missing
option.
"""

import importlib
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longrnn import files
from longrnn.config import RECORDED, read_recorded
from longrnn.errors import UserError
from longrnn.options import validated
from longrnn.registry import Registry

OPTION = "--import"
# What was imported in this process, as it was given, and what each registered, as `task mine`.
IMPORTED: dict[str, list[str]] = {}


def import_given(words: Sequence[str]) -> list[str]:
    """Import what `--import` names anywhere in a command line, and return the other words.

    Raises:
        UserError: see `import_module`.
    """
    others, ahead = [], list(words)
    while ahead:
        word = ahead.pop(0)
        name, equals, value = word.partition("=")
        if word == "--":
            return [*others, word, *ahead]
        if name == OPTION and (equals or ahead):
            import_module(value if equals else ahead.pop(0))
        else:
            others.append(word)
    return others


def import_options() -> list[str]:
    """Return the words that give another process of longrnn the same imports."""
    return [word for given in IMPORTED for word in (OPTION, given)]


def import_module(given: str) -> None:
    """Import a module or file of a user, and note what it registers.

    Args:
        given: the path of a `.py` file, or the name of a module. Python looks in the folder of the
            file, or in the current folder, after all other places.

    Raises:
        UserError: there is no such module, or it raises an error.
    """
    if given in IMPORTED:
        return
    path = Path(given)
    is_file = path.suffix == ".py"
    folder, name = (path.resolve().parent, path.stem) if is_file else (Path.cwd(), given)
    if is_file and not path.is_file():
        raise UserError(f"{OPTION} {given}: there is no such file, give an existing .py file")
    if not is_file and not all(map(str.isidentifier, given.split("."))):
        raise UserError(
            f"{OPTION} {given!r} is not the name of a module: give one, or a file that ends in .py"
        )
    sys.path.append(str(folder))
    importlib.invalidate_caches()
    if is_file:
        _refuse_shadowed(path, name)
    known = set(_registered())
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{OPTION} {given}: there is no such module, give a .py file or the name of a "
                "module that Python finds from this folder"
            ) from error
        message = f"{type(error).__name__} in {_place(error)} ({files.one_line(error)})"
        raise UserError(
            f"{OPTION} {given} raises {message}: correct it, or leave the option out"
        ) from error
    IMPORTED[given] = [name for name in _registered() if name not in known]


def refuse_missing(recorded: Any, source: str) -> None:
    """Check that what a run imported is registered in this process.

    Args:
        recorded: what was imported, with the names that it registered.
        source: the file that says so.

    Raises:
        UserError: nothing of an import is registered.
    """
    known = set(_registered())
    for given, names in validated(dict[str, list[str]], recorded, f"{source}, imports").items():
        if names and known.isdisjoint(names):
            raise UserError(
                f"{source} needs {', '.join(names)} of {given}, and no folder makes longrnn "
                f"import a module: add {OPTION} {given}, or import it in Python first"
            )


def refuse_missing_of(checkpoint: Path) -> None:
    """Check the same for a checkpoint, whose train.yaml is in its folder or in that of its run.

    Raises:
        UserError: see `refuse_missing`, or the file is damaged.
    """
    for folder in (checkpoint, checkpoint.resolve().parent):
        if (folder / RECORDED).is_file():
            refuse_missing(read_recorded(folder).get("imports", {}), str(folder / RECORDED))
            return


def hash_of_users(kinds: Iterable[type]) -> str:
    """Return a hash of the files of those classes that are not of longrnn; empty without any."""
    modules = sorted({kind.__module__ for kind in kinds if not _is_ours(kind)})
    paths = (getattr(sys.modules.get(name), "__file__", None) for name in modules)
    return "".join(files.sha256(Path(path)) for path in paths if path is not None)


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "longrnn"


def _registered() -> list[str]:
    """Return what modules of users have registered, such as `task mine`."""
    return [
        f"{registry.family} {name}"
        for registry in Registry.every
        for name, member in registry.items()
        if not _is_ours(member)
    ]


def _refuse_shadowed(path: Path, name: str) -> None:
    """Refuse a file whose name, as that of a module, means another file to Python."""
    try:
        found = find_spec(name)
    except (ImportError, ValueError):  # a name with a point, or of a module without a file
        found = None
    if found is None or found.origin is None or Path(found.origin).resolve() != path.resolve():
        raise UserError(
            f"{OPTION} {path}: {name!r} cannot be its name as a module, or is that of another "
            "module: rename the file"
        )


def _place(error: BaseException) -> str:
    """Return the file and line of a user that importing has reached."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}, line {error.lineno}"
    machinery = ("<frozen", importlib.__file__, __file__)
    calls = traceback.extract_tb(error.__traceback__)
    users = [call for call in calls if not call.filename.startswith(machinery)]
    return f"{users[0].filename}, line {users[0].lineno}" if users else "an unknown place"
