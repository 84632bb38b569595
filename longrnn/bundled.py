"""The files of `eval/` and `configs/`, in a checkout and in an installed wheel."""

import os
from pathlib import Path

from longrnn.errors import UserError, nearest

PACKAGE = Path(__file__).resolve().parent


def bundled(path: str) -> Path:
    """Return the path of a file or folder of `eval/` or `configs/`, such as `eval/suites`.

    A wheel contains them inside the package, a checkout beside it.
    """
    inside = PACKAGE / "_bundled"
    return (inside if inside.is_dir() else PACKAGE.parent) / path


def names(folder: str) -> list[str]:
    """Return the names of the YAML files of a bundled folder, without `.yaml`."""
    return sorted(path.stem for path in bundled(folder).glob("*.yaml"))


def find(name_or_path: str | Path, folder: str) -> Path:
    """Return the path of a YAML file, given by its path or by the name of a bundled file.

    Args:
        name_or_path: `quick` or `mine/quick.yaml`; a file of that name has precedence.
        folder: the bundled folder with the names, such as `eval/suites`.

    Raises:
        UserError: neither.
    """
    path, known = Path(name_or_path), names(folder)
    # `Path.is_file` and `Path.exists` raise for a name that is too long for a file.
    if str(path) in known and not os.path.isfile(path):
        return bundled(f"{folder}/{path}.yaml")
    if os.path.exists(path):
        return path
    raise UserError(
        f"{str(path)!r} is neither a file nor the name of a bundled file: "
        f"{nearest(str(path), known)}"
    )


def text_path(name_or_path: str | Path) -> Path:
    """Return the path of a text, given by its path or by the name of a bundled file.

    Args:
        name_or_path: `bundled:moby_dick`, or a path.

    Raises:
        UserError: no bundled text has this name, or a path is not UTF-8, as reports are.
    """
    try:
        str(name_or_path).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the path {str(name_or_path)!r} is not UTF-8: rename the file") from error
    prefix, _, name = str(name_or_path).partition(":")
    if prefix != "bundled":
        return Path(name_or_path)
    known = {
        path.stem.removesuffix("_excerpt"): path for path in bundled("eval/data").glob("*.txt")
    }
    if name not in known:
        raise UserError(f"there is no bundled text {name!r}: {nearest(name, known)}")
    return known[name]
