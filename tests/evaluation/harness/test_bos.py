"""`add_bos_token` gives the ids of lm-eval's `hf` type."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.checkpoints.tokenizer import load_tokenizer
from longrnn.errors import UserError
from longrnn.evaluation.harness import LongRNN
from longrnn.evaluation.options import HarnessOptions
from longrnn.evaluation.run import run
from longrnn.results import read_rows
from tests.evaluation.harness.conftest import (
    BOS,
    EOS,
    Setting,
    evaluate,
    hf_model,
    save_tokenizer,
)
from tests.evaluation.harness.test_lm import TASKS, assert_equal_responses


@pytest.mark.parametrize(
    ("template", "add_bos_token"),
    [
        ("", True),
        (f"{BOS} $A", None),
        pytest.param(f"{BOS} $A", False, marks=pytest.mark.slow),
        pytest.param(f"{BOS} $A {EOS}", True, marks=pytest.mark.slow),
    ],
)
def test_responses_are_those_of_the_hf_type(
    add_bos_token: bool | None, template: str, setting: Setting, tmp_path: Path
) -> None:
    """All kinds of requests see the same ids, with and without a BOS template."""
    folder = shutil.copytree(setting.checkpoint, tmp_path / "checkpoint")
    save_tokenizer(folder, template)
    options: dict[str, Any] = {"device": "cpu", "batch_size": 1, "add_bos_token": add_bos_token}
    ours, theirs = LongRNN(str(folder), quiet=True, **options), hf_model(str(folder), **options)
    assert ours.prefix_token_id == theirs.prefix_token_id
    found, expected = (evaluate(one, setting.tasks, *TASKS) for one in (ours, theirs))
    assert_equal_responses(found, expected)


def test_stored_scores_are_those_of_the_same_bos(setting: Setting, tmp_path: Path) -> None:
    """Results of a tokenizer that adds no BOS are not served to one that does."""
    options = HarnessOptions(tasks=["tiny_choice"], include_path=str(setting.tasks))
    for number, template in enumerate(("", f"{BOS} $A"), 1):
        save_tokenizer(tmp_path / "tokenizer", template)
        models = [OpenCheckpoint("one", setting.model, load_tokenizer(tmp_path / "tokenizer"))]
        run(models, [options.evaluation()], tmp_path / "out", quiet=True)
        assert len(read_rows(tmp_path / "out/rows.jsonl")[0]) == 5 * number


def test_bos_is_refused_without_a_bos_token(setting: Setting) -> None:
    for checkpoint in ("passkey-tiny", str(setting.checkpoint)):
        with pytest.raises(UserError, match="BOS"):
            LongRNN(checkpoint, device="cpu", add_bos_token=True)
