"""`add_bos_token` gives the ids of lm-eval's `hf` type."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from longrnn.errors import UserError
from longrnn.evaluation.harness import LongRNN
from tests.evaluation.harness.conftest import WORDS, Setting, evaluate, hf_model, small_bpe
from tests.evaluation.harness.test_lm import TASKS, assert_equal_responses

BOS, EOS = "<s>", "</s>"


@pytest.mark.parametrize(
    ("template", "add_bos_token"),
    [
        ("", True),
        (f"{BOS} $A", None),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((f"{BOS} $A", False), (f"{BOS} $A {EOS}", True))
        ),
    ],
)
def test_responses_are_those_of_the_hf_type(
    add_bos_token: bool | None, template: str, setting: Setting, tmp_path: Path
) -> None:
    """All kinds of requests see the same ids, with and without a BOS template."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = small_bpe(WORDS, [EOS, BOS])  # the model was made with 0 as its EOS
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(EOS, 0), (BOS, 1)]
        )
    folder = shutil.copytree(setting.checkpoint, tmp_path / "checkpoint")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    wrapped.save_pretrained(folder)
    options: dict[str, Any] = {"device": "cpu", "batch_size": 1, "add_bos_token": add_bos_token}
    ours, theirs = LongRNN(str(folder), quiet=True, **options), hf_model(str(folder), **options)
    assert ours.prefix_token_id == theirs.prefix_token_id
    found, expected = (evaluate(one, setting.tasks, *TASKS) for one in (ours, theirs))
    assert_equal_responses(found, expected)


def test_bos_is_refused_without_a_bos_token(setting: Setting) -> None:
    """A tokenizer without BOS raises a UserError if BOS is requested."""
    for checkpoint in ("passkey-tiny", str(setting.checkpoint)):
        with pytest.raises(UserError, match="BOS"):
            LongRNN(checkpoint, device="cpu", add_bos_token=True)
