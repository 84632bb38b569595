"""Columns of a corpus: one number per token in memory-mapped files, verified when they are read.

A column is cut into files of equal size (shards): `tokens.bin`, `tokens.1.bin`, …. The SHA-256 of
each BLOCK bytes of all files together is in one more file.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from longrnn.errors import UserError
from longrnn.files import replacing

# Bytes per checksum, bytes of a checksum, and bytes of a shard, which is a multiple of BLOCK.
BLOCK, DIGEST, SHARD = 2**18, 32, 2**30
BUILD = "build it again with `longrnn data build`"


def file_names(stem: str, size: int, shard: int) -> list[str]:
    """The files of a column of `size` bytes; a `shard` of 0 stands for one file of any size."""
    count = -(-size // shard) if shard else 1
    return [_file_name(stem, number) for number in range(max(1, count))]


def file_sizes(stem: str, size: int, shard: int) -> dict[str, int]:
    """The bytes of each file of a column of `size` bytes."""
    names = file_names(stem, size, shard)
    return {name: min(shard or size, size - k * shard) for k, name in enumerate(names)}


class Column:
    """A column that is read.

    Args:
        folder: of the corpus; the files have the sizes of `file_sizes`.
        stem: of the names of the files.
        dtype: of one number, without byte order.
        size: bytes of all files.
        shard: bytes of every file but the last, or 0 for one file.
        blocks: the checksums of the blocks; None for those of an earlier version, which has none.
    """

    def __init__(
        self, folder: Path, stem: str, dtype: str, *, size: int, shard: int, blocks: bytes | None
    ) -> None:
        self._dtype = little(dtype)
        self._paths = [folder / name for name in file_names(stem, size, shard)]
        self._raw = [np.memmap(path, np.uint8, mode="r") for path in self._paths]
        self._size, self._shard, self._blocks = size, shard or size, blocks
        self._verified = bytearray(len(blocks or b"") // DIGEST)  # 1 for a verified block

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Numbers `start` up to `stop`.

        Raises:
            UserError: a block of them is damaged.
        """
        width = self._dtype.itemsize
        first, last = start * width, stop * width
        self._verify_blocks(first, last)
        return np.frombuffer(self._bytes(first, last), self._dtype)

    def _bytes(self, first: int, last: int) -> bytes:
        parts = []
        for number in range(first // self._shard, max(first, last - 1) // self._shard + 1):
            begin = number * self._shard
            if begin < self._size:
                parts.append(self._raw[number][max(0, first - begin) : last - begin].tobytes())
        return b"".join(parts)

    def _verify_blocks(self, first: int, last: int) -> None:
        """Verifies the blocks of a range of bytes that were not verified before."""
        if self._blocks is None or first >= last:
            return
        for block in range(first // BLOCK, (last - 1) // BLOCK + 1):
            if self._verified[block]:
                continue
            begin = block * BLOCK
            end = min(begin + BLOCK, self._size)
            found = hashlib.sha256(self._bytes(begin, end)).digest()
            if found != self._blocks[block * DIGEST : (block + 1) * DIGEST]:
                number, within = divmod(begin, self._shard)
                raise UserError(
                    f"{self._paths[number]} is damaged (bytes {within:,} to "
                    f"{within + BLOCK:,}): copy the folder again or {BUILD}"
                )
            self._verified[block] = 1


class ColumnWriter:
    """A column that is written, and continued after an interruption.

    Args:
        folder: an existing folder.
        stem: of the names of the files.
        dtype: of one number, without byte order.
        shard: bytes of every file but the last.
        numbers: how many are kept of those that the files hold already.
    """

    def __init__(self, folder: Path, stem: str, dtype: str, shard: int, numbers: int = 0) -> None:
        self._folder, self._stem, self._shard = folder, stem, shard
        self._dtype = little(dtype)
        self.size = numbers * self._dtype.itemsize
        kept = set(file_names(stem, self.size, shard))
        for path in folder.glob(f"{stem}*.bin"):
            if path.name not in kept:
                path.unlink()
        self._number = max(0, self.size - 1) // shard
        self._file = self._open()
        self._file.truncate(self.size - self._number * shard)
        self._file.seek(0, os.SEEK_END)

    def write(self, values: NDArray[Any]) -> None:
        """Adds numbers, and begins new files as needed."""
        data = memoryview(values.astype(self._dtype).tobytes())
        while data:
            room = (self._number + 1) * self._shard - self.size
            if not room:
                self.sync()
                self._file.close()
                self._number += 1
                self._file = self._open()
                continue
            self._file.write(data[:room])
            self.size += min(room, len(data))
            data = data[room:]

    def sync(self) -> None:
        """Makes what was written durable."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _open(self) -> BinaryIO:
        path = self._folder / _file_name(self._stem, self._number)
        return open(path, "r+b" if path.exists() else "w+b")


def write_blocks(folder: Path, names: list[str], target: str) -> None:
    """Writes the checksums of the blocks of the files of a column."""
    with replacing(folder / target) as blocks:
        for name in names:
            with open(folder / name, "rb") as file:
                while block := file.read(BLOCK):
                    blocks.write(hashlib.sha256(block).digest())


def little(dtype: str) -> np.dtype[Any]:
    """The little-endian form of a dtype, in which a corpus is stored."""
    return np.dtype(dtype).newbyteorder("<")


def _file_name(stem: str, number: int) -> str:
    return f"{stem}.{number}.bin" if number else f"{stem}.bin"
