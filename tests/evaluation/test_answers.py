"""The evaluation `answers` measures what fine-tuning on prompts and answers trains."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.data.build import build
from longrnn.errors import UserError
from longrnn.evaluation.options import AnswerOptions
from longrnn.intervals import proportion, ratio
from longrnn.models import generate
from longrnn.text import ByteTokenizer, Reading
from tests.evaluation.small_models import SHORT, PairTokenizer, cells, measure, small_model

Document = list[tuple[list[int], bool]]


def generated(one: OpenCheckpoint, prompt: list[int], tokens: int) -> list[int]:
    return generate(one.model, torch.tensor([prompt]), max_new_tokens=tokens)[0][0]


def documents(one: OpenCheckpoint) -> list[Document]:
    """Prompts and answers in turn, some of them what the model generates."""
    first = [10, 20, 30]
    right = generated(one, first, 4)
    second = [*first, *right, 40, 50]
    return [
        [(first, False), (right, True)],
        [(first, False), (right, True), ([40, 50], False), (generated(one, second, 3), True)],
        [(first, False), (right, True), ([40, 50], False), ([1, 2], True)],
        [([7], True), ([8, 9], False), ([60] * 9, True), ([5], False)],
    ]


class Turns(ByteTokenizer):
    """Bytes as tokens; the content of a message is hexadecimal."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        turns = [(bytes.fromhex(one["content"]), one["role"] == "assistant") for one in messages]
        ids = [token for content, _ in turns for token in content]
        return ids, [is_answer for content, is_answer in turns for _ in content]


def corpus(folder: Path, written: list[Document]) -> str:
    """Write documents as `longrnn data build --instruct` does, and return the folder."""
    rows = folder.with_suffix(".jsonl")
    with rows.open("w") as file:
        for document in written:
            messages = [
                {"role": "assistant" if is_answer else "user", "content": bytes(ids).hex()}
                for ids, is_answer in document
            ]
            print(json.dumps({"messages": messages}), file=file)
    build([str(rows)], Turns(), folder, reading=Reading(instruct=True), quiet=True)
    return str(folder)


def expected(one: OpenCheckpoint, document: Document) -> tuple[float, int, bool]:
    """Loss, number and correctness of answer tokens from one forward pass over the document."""
    ids = torch.tensor([token for part, _ in document for token in part])
    is_answer = torch.tensor([flag for part, flag in document for _ in part])[1:]
    with torch.no_grad():
        logits = one.model(ids[None, :-1]).logits[0].double()
    nats = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[is_answer]
    right = (logits.argmax(-1) == ids[1:])[is_answer].all()
    return float(nats.sum()), len(nats), bool(right)


def test_losses_and_matches_are_those_of_a_forward_pass(tmp_path: Path) -> None:
    """Every answer is read after all that stands before it; a document is one sample."""
    one, other = small_model("one"), small_model("other", seed=1)
    written = documents(one)
    evaluation = AnswerOptions(data=corpus(tmp_path / "c", written)).evaluation()
    outcome = measure(evaluation, tmp_path / "r", one, other)
    rows = {item.key["document"]: row for item, row in outcome.results["one"]}
    for number, document in enumerate(written):
        nats, tokens, right = expected(one, document)
        assert rows[number]["nats"] == pytest.approx(nats, rel=1e-5)
        assert (rows[number]["tokens"], rows[number]["right"]) == (tokens, right)
    found = cells(outcome)
    assert found["answers, exact match", None, "one"].estimate == proportion(2, 4)
    pairs = [(row["nats"], row["tokens"]) for row in rows.values()]
    assert found["answers, nats per token", None, "one"].estimate == pytest.approx(ratio(pairs))
    theirs = {item.key["document"]: row for item, row in outcome.results["other"]}
    less = [(theirs[k]["nats"] - rows[k]["nats"], rows[k]["tokens"]) for k in range(4)]
    difference = found["answers, nats per token", None, "other"].difference
    assert difference == pytest.approx(ratio(less))


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    one = small_model("one")
    folder = corpus(tmp_path / "c", [[([1] * 400, False), ([2], True)], *documents(one)])
    with pytest.raises(UserError, match="tokenizers"):
        other = small_model("b", tokenizer=PairTokenizer())
        measure(AnswerOptions(data=folder).evaluation(), tmp_path / "r", one, other)
    short = small_model("short", position=SHORT)
    found = measure(AnswerOptions(data=folder).evaluation(), tmp_path / "r", one, short)
    assert all("300" in str(cell) for cell in found.cells if cell.model == "short")
    with pytest.raises(UserError, match="data is an empty list"):
        measure(AnswerOptions(data=[]), tmp_path / "r", one)
