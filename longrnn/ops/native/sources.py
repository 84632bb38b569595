"""The C++ sources of the kernels, and which ones a library was compiled from.

`setup.py` runs this file by its path, before torch is installed.
"""

from __future__ import annotations

import ctypes
from hashlib import sha256
from pathlib import Path

FOLDER = Path(__file__).parent


def digest(folder: Path = FOLDER) -> str | None:
    """16 hexadecimal digits of the SHA-256 of the sources; None where they are not installed."""
    files = sorted([*folder.glob("*.h"), *folder.glob("*.cpp")])
    return sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16] if files else None


def is_current(library: ctypes.CDLL) -> bool:
    """Whether a library was compiled from the sources that lie beside it, if there are any.

    After an update of a checkout the old libraries would read arguments of the new layout.
    """
    expected = digest()
    if expected is None:
        return True
    if not hasattr(library, "longrnn_sources"):
        return False
    library.longrnn_sources.restype = ctypes.c_char_p
    return library.longrnn_sources().decode() == expected
