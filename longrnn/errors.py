"""The errors that a user can cause, the search for the name they meant, and SIGTERM."""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec

# An error lists at most this many known names.
LISTED = 16


class UserError(ValueError):
    """Bad input. The message is one sentence that contains the remedy.

    The command line prints it without a traceback and exits with code 2; in Python it is a
    `ValueError`.
    """


class LengthError(UserError):
    """A row is longer than any that a task, or its data, has; a shorter one may exist."""


class DivergedError(UserError):
    """A training run that ended because its loss, gradient or weights are not finite."""


class Terminated(BaseException):
    """The process was asked to end by SIGTERM; what was finished is kept.

    Like KeyboardInterrupt it is not an Exception, so that no handler of errors catches it. The
    command line prints how to go on and exits with code 0.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause naming the known name nearest to `name`, or all of a few where none is near."""
    names = sorted(known)
    if not names:
        return "leave it out, as none is known here"
    if close := get_close_matches(name, names, n=1, cutoff=0.5):
        return f"did you mean {close[0]!r}?"
    if len(names) > LISTED:
        some = get_close_matches(name, names, n=LISTED // 2, cutoff=0)
        return f"{len(names)} are known, such as {', '.join(some)}"
    return f"known: {', '.join(names)}"


def require(package: str, purpose: str) -> None:
    """Check that an optional package is installed.

    Args:
        package: its name, under which it is imported and pip installs it.
        purpose: what needs it.

    Raises:
        UserError: it is not installed.
    """
    if find_spec(package) is None:
        raise UserError(
            f"{purpose} needs the package {package}, which is not installed: pip install {package}"
        )
