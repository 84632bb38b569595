"""The texts that tests read, so that no test depends on a document or on the source of a test."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"
BOOK = DATA / "book.txt"  # from Tom Sawyer
TEXTS = [str(path) for path in sorted((DATA / "texts").iterdir())]  # from Moby-Dick, 0.8 to 7 KB
