"""`longrnn info --verify`: compares files with the checksums recorded for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer

from longrnn.errors import UserError

FITS, DAMAGED, MISSING, UNKNOWN = "fits", "damaged", "missing", "no checksum"


def print_verified(name: str) -> None:
    """Prints one line per file: whether it fits its checksum.

    Args:
        name: a file, a folder, or a checkpoint name that `load` accepts.

    Raises:
        UserError: a file is damaged or missing, or none has a checksum.
    """
    from longrnn.hf.names import resolve

    root = Path(name) if Path(name).is_file() else resolve(name)
    found = dict(_verdicts(root))
    for path, verdict in found.items():
        typer.echo(f"{verdict:<13}{path}")
    bad = [str(path) for path, verdict in found.items() if verdict in (DAMAGED, MISSING)]
    if bad:
        raise UserError(
            f"{len(bad)} of {len(found)} files are damaged or missing ({', '.join(bad)}): copy or "
            "download them again"
        )
    if FITS not in found.values():
        raise UserError(
            f"no file of {root} has a recorded checksum to compare it with: `hf cache verify` "
            "compares downloads from the Hub"
        )


def _verdicts(root: Path) -> Iterator[tuple[Path, str]]:
    """Every file of a folder, or a single file, with its verdict."""
    if not root.is_dir():
        yield root, _verdict(root)
        return
    # Hidden files are locks, partly written files, and records of downloads from the Hub.
    visible = [
        path
        for path in sorted(root.rglob("*"))
        if not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    for path in visible:
        if path.is_dir():
            missing = [path / name for name in _listed(path) if not (path / name).exists()]
            yield from ((one, MISSING) for one in missing)
        else:  # a link in the Hub's cache may name a file that was deleted
            yield path, _verdict(path) if path.is_file() else MISSING
    yield from ((root / n, MISSING) for n in _listed(root) if not (root / n).exists())


def _verdict(path: Path) -> str:
    from longrnn.checksums import CHECKSUMS
    from longrnn.files import sha256
    from longrnn.results import is_store, read_rows

    if path.name == CHECKSUMS:
        return FITS if _listed(path.parent) else DAMAGED
    digest = _listed(path.parent).get(path.name)
    if digest is not None:
        return FITS if sha256(path) == digest else DAMAGED
    try:
        if is_store(path):
            if damaged := read_rows(path)[1]:
                raise UserError(f"{path}, lines {', '.join(map(str, damaged))} are damaged")
        elif not _is_intact_state(path):
            return UNKNOWN
    except UserError as error:
        typer.echo(f"warning: {error}", err=True)
        return DAMAGED
    return FITS


def _listed(folder: Path) -> dict[str, str]:
    """The checksums of the files in the folder of a checkpoint or corpus, by file name."""
    from longrnn.checksums import CHECKSUMS, read_checksums

    try:
        return read_checksums(folder) if (folder / CHECKSUMS).is_file() else {}
    except ValueError:
        return {}  # the file that lists them is reported as damaged


def _is_intact_state(path: Path) -> bool:
    """Whether a file is a saved state, whose own checksum then fits.

    Raises:
        UserError: the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    from longrnn import state
    from longrnn.checksums import verify_sealed

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        if path.suffix == ".safetensors":
            raise UserError(f"{path} is truncated or damaged ({error}): copy it again") from error
        return False
    if metadata.get("format") != state.FORMAT:
        return False
    verify_sealed(path, metadata)
    return True
