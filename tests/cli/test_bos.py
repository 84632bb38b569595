"""Every command begins what it reads from an empty state with the BOS of the tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from longrnn import load_tokenizer
from longrnn.data import Instruct, Passkey, Text
from longrnn.errors import UserError
from longrnn.hf.tokenizer import HFTokenizer
from longrnn.models import RecurrentLM
from tests.cli.conftest import CLI
from tests.texts import BOOK, DATA, trained_bpe
from tests.training.runs import LSTM, saved

BOS = 0  # the id of <s>


def adding(template: str) -> HFTokenizer:
    """The trained BPE with `<s>` where a template puts it."""
    fast = Tokenizer.from_str(trained_bpe()._backend.to_str())
    if template:
        fast.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", BOS)]
        )
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An LSTM whose tokenizer adds BOS."""
    folder = tmp_path_factory.mktemp("bos") / "MODEL"
    saved(folder, LSTM | {"vocab_size": 600}, tokenizer="tokenizer.json")
    adding("<s> $A").save(folder)
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """The rows that models read from now on: the position of their first token, and their ids."""
    seen: list[tuple[int, list[int]]] = []
    hidden = RecurrentLM.hidden

    def recorded(model: RecurrentLM, tokens: Tensor, state: Any, **options: Any) -> Any:
        positions = [0] * len(tokens) if state is None else state.position.tolist()
        if tokens.shape[1]:
            seen.extend(zip(positions, tokens.tolist(), strict=True))
        return hidden(model, tokens, state, **options)

    monkeypatch.setattr(RecurrentLM, "hidden", recorded)
    return seen


@pytest.mark.parametrize("command", (DATA / "bos.txt").read_text().splitlines())
def test_bos_begins_what_is_read(
    command: str, checkpoint: Path, read: list[tuple[int, list[int]]], cli: CLI
) -> None:
    """It is the first token of every row from an empty state, and no other; `+no_bos` has none."""
    Path("book.txt").write_text(BOOK.read_text())
    for suffix, expected in ("", [BOS]), ("+no_bos", []):
        read.clear()
        words = [word.replace("MODEL", f"{checkpoint}{suffix}") for word in command.split()]
        assert cli(*words).code == 0
        begins = [ids for position, ids in read if position == 0]
        assert begins
        assert all(ids[:1] == expected for ids in begins if expected)
        assert all(BOS not in ids[(position == 0) * len(expected) :] for position, ids in read)


def test_ids_are_those_of_the_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer(checkpoint)
    theirs, text = tokenizer.tokenizer, BOOK.read_text()
    task = Passkey(tokenizer)
    tokens = task.sample(1, length=96).tokens[0].tolist()
    prompt = tokenizer.decode(tokens[:96])
    assert tokens[:96] == theirs(prompt, add_special_tokens=False).input_ids[:96]
    assert prompt.startswith("<s>Something")
    assert prompt.endswith("The passkey is")
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "qa.jsonl").write_text(json.dumps({"prompt": "2+2=", "completion": "4"}) + "\n")
    for data, kind, expected in (
        ("book.txt", Text, theirs(text).input_ids),
        ("qa.jsonl", Instruct, theirs("2+2=").input_ids + theirs("4").input_ids[1:]),
    ):
        corpus = kind(tokenizer, data=str(tmp_path / data)).corpus
        assert corpus.tokens.tolist() == expected
        without = kind(load_tokenizer(f"{checkpoint}+no_bos"), data=str(tmp_path / data)).corpus
        assert without.tokens.tolist() == expected[1:]
        scored = corpus.scored
    assert scored is not None
    assert scored.tolist() == [0] * (len(expected) - 1) + [1]


@pytest.mark.parametrize(
    ("template", "bos"), [("", None), ("<s> $A", BOS), ("<s> $A <s>", BOS), ("$A <s>", None)]
)
def test_a_tokenizer_begins_texts_as_its_files_or_its_name_say(
    template: str, bos: int | None, tmp_path: Path
) -> None:
    """The choice stays when it is saved, and each has a fingerprint of its own."""
    adding(template).save(tmp_path / "files")
    prints = set()
    for name, expected in ("files", bos), ("files+bos", BOS), ("files+no_bos", None):
        tokenizer: Any = load_tokenizer(str(tmp_path / name))
        assert tokenizer.bos_id == expected
        assert tokenizer.tokenizer("It").input_ids[0] == (41 if expected is None else BOS)
        tokenizer.save(tmp_path / "saved")
        assert load_tokenizer(tmp_path / "saved").fingerprint() == tokenizer.fingerprint()
        prints.add(tokenizer.fingerprint())
    assert len(prints) == (3 if "$A <s>" in template else 2)
    with pytest.raises(UserError, match="BOS"):
        load_tokenizer("bytes+bos")
