"""`add_bos_token` gives the ids of lm-eval's `hf` type."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from longrnn.errors import UserError
from longrnn.evaluation import harness
from tests.evaluation.harness.conftest import WORDS, Setting, hf_model
from tests.models.test_mamba2_transformers import VOCAB

LongRNN: Any = harness.LongRNN  # its decorator hides its parameters
BOS, EOS = "<s>", "</s>"
TEXTS = ["the sun is red", "", f"{BOS}an old tree", f"{EOS}and so", " as rain ran on "]


def checkpoint(setting: Setting, folder: Path, template: str) -> Path:
    """Return the tiny checkpoint with a tokenizer that has BOS, with or without a BOS template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[BOS, EOS], show_progress=False)
    tokenizer.train_from_iterator([WORDS], trainer)
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore
            single=template, special_tokens=[(BOS, 0), (EOS, 1)]
        )
    shutil.copytree(setting.checkpoint, folder)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    wrapped.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("template", ["", f"{BOS} $A", f"{BOS} $A {EOS}"])
@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_ids_are_those_of_the_hf_type(
    add_bos_token: bool | None, template: str, setting: Setting, tmp_path: Path
) -> None:
    """Every way to encode gives equal ids, with and without a BOS template."""
    folder = str(checkpoint(setting, tmp_path / "checkpoint", template))
    options: dict[str, Any] = {"device": "cpu", "batch_size": 1, "add_bos_token": add_bos_token}
    theirs, ours = hf_model(folder, **options), LongRNN(folder, quiet=True, **options)
    assert ours.prefix_token_id == theirs.prefix_token_id
    for text in TEXTS:
        for special in (None, True, False):
            assert ours.tok_encode(text, special) == theirs.tok_encode(text, special)
        if text:
            pair = text, " and more"
            assert ours._encode_pair(*pair) == theirs._encode_pair(*pair)
            batch = theirs.tok_batch_encode([text])[0][0].tolist()
            assert ours._encode_prompt(text) == batch
        ids = ours.tok_encode(text, True)
        assert ours.tok_decode(ids) == theirs.tok_decode(ids)
    if add_bos_token:
        assert ours.tok_encode("the sun")[0] == 0


def test_a_tokenizer_that_is_given_stays_as_it_is(setting: Setting, tmp_path: Path) -> None:
    """The option does not change a given tokenizer object, as in the `hf` type."""
    from longrnn.hf.tokenizer import HFTokenizer, load_tokenizer

    folder = checkpoint(setting, tmp_path / "checkpoint", "")
    loaded = load_tokenizer(folder)
    assert isinstance(loaded, HFTokenizer)
    theirs = hf_model(
        str(folder), tokenizer=loaded.tokenizer, device="cpu", batch_size=1, add_bos_token=True
    )
    ours = LongRNN(setting.model, tokenizer=loaded, add_bos_token=True, quiet=True)
    assert ours.tok_encode("the sun") == theirs.tok_encode("the sun")


def test_bos_is_refused_without_a_bos_token(setting: Setting) -> None:
    """A tokenizer without BOS raises a UserError if BOS is requested."""
    with pytest.raises(UserError, match="BOS"):
        LongRNN("passkey-tiny", device="cpu", add_bos_token=True)
    with pytest.raises(UserError, match="BOS"):
        LongRNN(str(setting.checkpoint), device="cpu", add_bos_token=True)
