"""The drawings in the docstrings of tasks, read back."""

import inspect
import re


def drawing(task: type) -> dict[str, list[str]]:
    """The lines `name   x y z` of a class's docstring, as lists of their signs.

    A name is followed by two spaces or more; each column of two characters behind it holds one
    sign, so that an empty column counts as a sign too.
    """
    lines = inspect.cleandoc(task.__doc__ or "").splitlines()
    found = [re.match(r" *(tokens|targets|answer)  +", line) for line in lines]
    rows = [(match[1], line) for match, line in zip(found, lines, strict=True) if match]
    begin = max(len(match[0]) for match in found if match)
    width = max(len(line) for _, line in rows)
    return {name: list(line.ljust(width)[begin::2]) for name, line in rows}
