"""Checkpoints of the Hugging Face hub, through its own cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from longrnn.checksums import MODEL_FILES, PICKLES
from longrnn.errors import UserError
from longrnn.files import one_line

# What the Hub calls the content of a file: its SHA-256, or git's SHA-1 where it is small.
ETAG = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(name: str) -> bool:
    """Whether `name` reads like `organisation/model`, and not like a folder beside one that is."""
    return NAME.fullmatch(name) is not None and not os.path.exists(Path(name).parent)


def download(name: str, revision: str | None = None) -> Path:
    """The folder in the hub's cache with the files of `name`, downloaded where they are missing.

    Args:
        name: `organisation/model`.
        revision: a branch, tag or commit; None for the main branch.

    Raises:
        UserError: the hub has no such model or revision, or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*MODEL_FILES]))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, revision=revision, allow_patterns=[*PICKLES])
        return folder
    except HFValidationError as error:
        raise UserError(
            f"no folder {name}, and it is not a valid name of a model on the Hugging Face Hub "
            f"({one_line(error)}): give the path of a folder, or organisation/model"
        ) from error
    except GatedRepoError as error:
        raise UserError(
            f"{name} wants its terms to be accepted first: do so on the hub and log in with "
            "`hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision!r}: see its page on the hub") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"no checkpoint {name!r}, neither a folder nor a model of the hub that you may read: "
            "check the name, or log in with `hf auth login`"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"no folder {name}, and the Hugging Face hub cannot be reached for the model of that "
            f"name: download it elsewhere with `hf download {name}` and give its folder, or copy "
            "the cache and point HF_HOME to it"
        ) from error


def published_digest(path: Path) -> str | None:
    """The checksum that the Hub published for a downloaded file, where it is recorded beside it.

    The Hub's cache has it as the name of the file that the one in a snapshot links to; a folder
    that `hf download --local-dir` wrote has it in `.cache/huggingface/download`.

    Returns:
        64 hexadecimal digits (SHA-256) or 40 (git's SHA-1), see `longrnn.checksums.fits`.
    """
    if path.is_symlink():
        blob = Path(os.readlink(path))
        if blob.parent.name == "blobs" and ETAG.fullmatch(blob.name):
            return blob.name
    for root in path.absolute().parents:
        name = f"{path.absolute().relative_to(root)}.metadata"
        metadata = root / ".cache/huggingface/download" / name
        if metadata.is_file():
            _, etag, *_ = [*metadata.read_text(errors="replace").splitlines(), "", ""]
            return etag if ETAG.fullmatch(etag) else None
    return None
