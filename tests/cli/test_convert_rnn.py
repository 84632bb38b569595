"""`longrnn convert --from`: weights of an RNN of another library, with its tokenizer."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from longrnn import load_tokenizer
from longrnn.errors import UserError
from tests.checkpoints.test_rnn_weights import BASIC, tensorflow_weights
from tests.cli.conftest import CLI, refused
from tests.refusals import naming


def test_a_file_of_tensors_opens_with_its_characters(tmp_path: Path, cli: CLI) -> None:
    """The tokenizer has the characters of the file beside the weights, and refuses all others."""
    np.savez(tmp_path / "model.npz", **tensorflow_weights(4, (), True))
    characters = {character: index for index, character in enumerate("abcdefgh \n-—é")}
    (tmp_path / "vocab.json").write_text(json.dumps(characters))
    more = {"characters": "vocab.json", "replace": {"–": "--", "\r": ""}}
    (tmp_path / "names.yaml").write_text(yaml.safe_dump(BASIC | more))
    options = ("--to", "ours", "--from", "tensorflow", "--names", "names.yaml")
    assert cli("convert", "model.npz", "ours", *options) == (0, "ours\n", "")
    tokenizer = load_tokenizer(tmp_path / "ours")
    assert tokenizer.vocab_size == len(characters)
    text = "a–b\r\n é—"
    assert tokenizer.decode(tokenizer.encode(text)) == "a--b\n é—"
    # An en dash has three bytes and became two tokens; a token has the bytes before it too.
    assert tokenizer.encode_with_ends(text)[1] == [1, 4, 4, 5, 7, 8, 10, 13]
    with pytest.raises(UserError, match=naming("xyz", "replace")):
        tokenizer.encode_many(["abc", "zxy"])
    (tmp_path / "book.txt").write_text("a bad cab" * 10, encoding="utf-8")
    assert cli("eval", "perplexity", "ours", "--text", "book.txt", "--lengths", "16").code == 0
    refused(cli, "convert", "ours", "hf", "--to", "hf", says=("lstm",))
