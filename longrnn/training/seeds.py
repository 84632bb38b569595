"""Seeds for what is random in a run."""

from __future__ import annotations

import hashlib


def mix(*parts: int | str) -> int:
    """One 63-bit seed from several numbers and names."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
