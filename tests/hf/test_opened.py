"""`CHECKPOINT+MITIGATION` means the same wherever a checkpoint is named."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import longrnn
from longrnn.errors import UserError
from longrnn.hf.load import load, load_recurrent
from longrnn.hf.names import DTYPE_NAMES, embedded, split_spec
from longrnn.hf.opened import open_checkpoint
from longrnn.hf.tokenizer import load_tokenizer
from longrnn.mitigations import Mitigated, mitigation

SPEC = "sliding_window(window=50)"


def test_load_understands_a_mitigation() -> None:
    """`longrnn.load` and `load_tokenizer` take what the command line takes."""
    model = longrnn.load(f"passkey-tiny+{SPEC}")
    assert model.mitigation is not None
    expected = Mitigated(load_recurrent("passkey-tiny"), mitigation(SPEC))
    assert model.fingerprint() == expected.fingerprint()
    assert longrnn.load_tokenizer(f"passkey-tiny+{SPEC}").fingerprint() == "bytes"
    with pytest.raises(UserError, match=r"give passkey-tiny\+none"):
        load_recurrent(f"passkey-tiny+{SPEC}")
    with pytest.raises(UserError, match="sliding_window"):
        load("passkey-tiny+sliding_windw")


def test_a_path_with_a_plus_that_exists_wins(tmp_path: Path) -> None:
    """The name of a folder may contain a plus, and a mitigation may follow it."""
    both = tmp_path / "a+forget_more"
    shutil.copytree(embedded()["passkey-tiny"], both)
    shutil.copytree(embedded()["passkey-tiny"], tmp_path / "a")
    assert load(both).mitigation is None
    assert load_tokenizer(both).fingerprint() == "bytes"
    assert split_spec(f"{both}+{SPEC}") == (str(both), SPEC)
    assert load(f"{both}+{SPEC}").mitigation is not None
    assert load(f"{tmp_path / 'a'}+{SPEC}").mitigation is not None


@pytest.mark.parametrize("name", sorted(DTYPE_NAMES))
def test_a_dtype_may_follow_a_checkpoint(name: str) -> None:
    """In every function that loads a checkpoint by its name, with and without a mitigation."""
    source, dtype = f"passkey-tiny+{name}", DTYPE_NAMES[name]
    models: list[Any] = [load(source), load(f"{source}+{SPEC}"), load(source, dtype=dtype)]
    models.append(open_checkpoint(source, SPEC).model)
    for model in models:
        assert next(model.parameters()).dtype == dtype
    opened = open_checkpoint(f"{source}+{SPEC}")
    assert (opened.checkpoint, opened.mitigation) == ("passkey-tiny", SPEC)
    other = "float64" if name == "float32" else "float32"
    with pytest.raises(UserError, match="dtype"):
        load(source, dtype=DTYPE_NAMES[other])
    with pytest.raises(UserError, match="dtype"):
        load(f"{source}+float16")
