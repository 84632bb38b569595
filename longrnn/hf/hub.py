"""Downloads checkpoints from the Hugging Face Hub into the cache of `huggingface_hub`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from longrnn.checksums import MODEL_FILES, PICKLES
from longrnn.errors import UserError
from longrnn.files import one_line

# Checksums that the Hub publishes: SHA-256 of a large file, or git's SHA-1 of a small one.
ETAG = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form `organisation/model` and `organisation` is not a local folder."""
    return NAME.fullmatch(name) is not None and not os.path.exists(Path(name).parent)


def download(name: str, revision: str | None = None) -> Path:
    """Return the folder in the Hub's cache with the files of a model; download missing files.

    Args:
        name: `organisation/model`.
        revision: a branch, tag or commit; None for the main branch.

    Raises:
        UserError: the Hub has no such model or revision, or cannot be reached.
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
            f"the terms of {name} must be accepted first: accept them on the Hub and log in with "
            "`hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{name} has no revision {revision!r}: see its page on the Hub") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"no checkpoint {name!r}, neither a folder nor a model on the Hub that you may read: "
            "check the name, or log in with `hf auth login`"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"no folder {name}, and the Hugging Face Hub cannot be reached for the model of that "
            f"name: download it elsewhere with `hf download {name}` and give its folder, or copy "
            "the cache and point HF_HOME to it"
        ) from error


def published_digest(path: Path) -> str | None:
    """Return the checksum that the Hub published for a downloaded file; None if it is not recorded.

    In the Hub's cache, a file of a snapshot is a link to a file that is named by its checksum. In a
    folder that `hf download --local-dir` wrote, it is in `.cache/huggingface/download`.

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
