"""Where documents come from: text files, tables, and datasets on disk or on the Hub.

Whatever is read here is read once and in order, piece by piece: no file and no dataset is loaded as
a whole, and a dataset of the Hub is streamed.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from longrnn.corpus import HEADER
from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.hf.names import is_hub_name
from longrnn.text import TEXT_SUFFIXES, files_below

# The formats of tables, as `datasets` names them, by suffix.
TABLES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# Of these, .json is left out in folders, where it is as often a configuration.
FOLDER_TABLES = set(TABLES) - {".json"}
# Files by which a folder of `Dataset.save_to_disk` and of `DatasetDict.save_to_disk` is known.
SAVED = ("state.json", "dataset_dict.json")


class Selection(NamedTuple):
    """Which part of a dataset is read.

    Attributes:
        split: such as `train`.
        subset: its configuration, for datasets that have several.
        revision: a branch, tag or commit of the Hub.
    """

    split: str = "train"
    subset: str | None = None
    revision: str | None = None


class Origin(ABC):
    """One source of documents.

    Attributes:
        name: as the user gave it.
        files: the files that are read; empty for those that are not known.
    """

    name: str
    files: Sequence[Path] = ()

    def rows(self, skip: int) -> Iterator[Mapping[str, Any]]:
        """Yields the rows of a table without the first `skip`.

        Raises:
            UserError: this is a text without rows, or cannot be read.
        """
        raise UserError(
            f"{self.name} is a text and rows with prompts and answers are needed: give a .jsonl, "
            ".json, .csv or .parquet file, or a dataset"
        )

    def size(self) -> int | None:
        """Bytes of all files; None where that is not known."""
        return sum(path.stat().st_size for path in self.files) if self.files else None

    def identity(self) -> list[Any]:
        """What changes whenever the content does, as far as that can be seen without reading it."""
        stats = [(path, path.stat()) for path in self.files]
        return [self.name, *([str(p.resolve()), s.st_size, s.st_mtime_ns] for p, s in stats)]


class TextFile(Origin):
    """A UTF-8 text file, one document or several with a separator."""

    def __init__(self, path: Path) -> None:
        self.name, self.path, self.files = str(path), path, [path]


class Table(Origin):
    """A file with one document per row."""

    def __init__(self, path: Path) -> None:
        self.name, self.path, self.files = str(path), path, [path]

    def rows(self, skip: int) -> Iterator[Mapping[str, Any]]:
        kind = TABLES[self.path.suffix.lower()]
        with reading(f"{self.name} cannot be read as {kind}", "write it again"):
            yield from _streamed(skip, kind, data_files=str(self.path), split="train")


class Dataset(Origin):
    """What `datasets.load_dataset` reads: a name on the Hub, or a folder of tables."""

    def __init__(self, name: str, selection: Selection, files: Sequence[Path] = ()) -> None:
        self.name, self.selection, self.files = name, selection, files

    def identity(self) -> list[Any]:
        return [*super().identity(), *self.selection]

    def rows(self, skip: int) -> Iterator[Mapping[str, Any]]:
        remedy = "check split, subset and revision"
        if not self.files:
            remedy += ", the name and the network; or download it and give its folder"
        split, subset, revision = self.selection
        with reading(f"the dataset {self.name} cannot be read", remedy):
            options = {"split": split, "name": subset}
            options |= {} if revision is None else {"revision": revision}
            yield from _streamed(skip, self.name, **options)


class SavedDataset(Origin):
    """A folder that `save_to_disk` of the `datasets` library wrote."""

    def __init__(self, folder: Path, split: str) -> None:
        self.name, self.folder, self.split = str(folder), folder, split
        self.files = sorted(path for path in folder.rglob("*") if path.is_file())

    def identity(self) -> list[Any]:
        return [*super().identity(), self.split]

    def rows(self, skip: int) -> Iterator[Mapping[str, Any]]:
        with reading(f"{self.name} cannot be read as a dataset", "save it again"):
            found = _library().load_from_disk(str(self.folder))
            if hasattr(found, "keys"):
                if self.split not in found:
                    raise UserError(
                        f"{self.name} has no split {self.split!r}: set split to one of "
                        f"{', '.join(found)}"
                    )
                found = found[self.split]
            for index in range(skip, len(found)):
                yield found[index]


def origins(data: Sequence[str | Path], selection: Selection) -> list[Origin]:
    """The sources that files, folders and names of datasets stand for.

    A folder of `save_to_disk` is one dataset; a folder with tables is what `load_dataset` makes of
    it; any other folder stands for the text files in it and below, in the order of their paths.

    Raises:
        UserError: one of them does not exist, or is a folder without anything to read.
    """
    return [origin for one in data for origin in _origins(str(one), selection)]


def _origins(given: str, selection: Selection) -> list[Origin]:
    path = Path(given).expanduser()
    if path.is_file():
        return [Table(path) if path.suffix.lower() in TABLES else TextFile(path)]
    if not path.is_dir():
        if path.exists() or not is_hub_name(given):
            raise UserError(
                f"no file {given}: give files or folders of UTF-8 text or tables, a folder of "
                "save_to_disk, or the name of a dataset on the Hub such as organisation/name"
            )
        return [Dataset(given, selection)]
    if (path / HEADER).is_file():
        raise UserError(f"{path} is tokenized already: give it alone, as the corpus to train on")
    if any((path / name).is_file() for name in SAVED):
        return [SavedDataset(path, selection.split)]
    tables = files_below(path, FOLDER_TABLES)
    if tables:
        return [Dataset(given, selection, tables)]
    texts = files_below(path, TEXT_SUFFIXES)
    if not texts:
        raise UserError(
            f"no file to train on in {path}: a folder is searched for "
            f"{', '.join([*TEXT_SUFFIXES, *sorted(FOLDER_TABLES)])}; "
            "rename the files, or name each of them"
        )
    return [TextFile(text) for text in texts]


@contextmanager
def reading(what: str, remedy: str) -> Iterator[None]:
    """Within this context, an error of datasets or pyarrow becomes a `UserError`."""
    try:
        yield
    except (UserError, OSError) as error:
        # datasets raises ConnectionError and FileNotFoundError for names on the Hub.
        if isinstance(error, UserError) or error.errno is not None:
            raise
        raise UserError(f"{what} ({one_line(error)}): {remedy}") from error
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{what} ({reason}): {remedy}") from error


def _streamed(skip: int, path: str, **options: Any) -> Iterator[Mapping[str, Any]]:
    """Yields rows of `datasets.load_dataset` without the first `skip`."""
    found = _library().load_dataset(path, streaming=True, **options)
    yield from found.skip(skip) if skip else found


def _library() -> Any:
    """The datasets library, which then reports errors through its exceptions alone."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "tables and datasets need the datasets library, which is not installed: pip install "
            "datasets"
        ) from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets
