"""Loss by position equals a direct computation, on the same bytes for all models."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn.checkpoints.opened import OpenCheckpoint
from longrnn.errors import UserError
from longrnn.evaluation.options import CostOptions, PerplexityOptions
from longrnn.evaluation.run import run
from longrnn.evaluation.texts import read_documents, shared_places
from longrnn.hf.tokenizer import byte_level
from longrnn.inference import trie
from longrnn.intervals import ratio
from longrnn.models import LMOutput, base
from longrnn.text import ByteTokenizer
from tests.contracts.builders import KINDS_OF_CELLS, Scripted, build_model
from tests.evaluation.small_models import SHORT, PairTokenizer, cells, measure, rows, small_model
from tests.texts import trained_bpe

WORDS = [f"{i * 7919 % 1000} of {i * 104729 % 77} é. " for i in range(1200)]
BITS = "perplexity, bits per byte"


def texts(folder: Path) -> list[Path]:
    """Return two texts, of about 14,000 and 8,000 bytes."""
    (folder / "a.txt").write_text("".join(WORDS))
    (folder / "b.txt").write_text("".join(WORDS[::-1][:700]))
    return [folder / "a.txt", folder / "b.txt"]


def perplexity(folder: Path, **changes: Any) -> PerplexityOptions:
    options = {"texts": texts(folder), "lengths": [64, 256, 512], "windows": 3} | changes
    return PerplexityOptions(**options)


@pytest.mark.parametrize("mixer", KINDS_OF_CELLS)
@pytest.mark.parametrize("piece", [4096, 7])
def test_against_all_logits_at_once(
    mixer: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trie, "SCORED_TOKENS", piece)
    model = build_model(mixer, position="sinusoidal", vocab_size=256)
    options: dict[str, Any] = {"lengths": [50, 150], "windows": 2, "batch_size": 2}
    one = OpenCheckpoint("one", model, ByteTokenizer())
    outcome = measure(perplexity(tmp_path, **options), tmp_path / "r", one)
    assert len(outcome.results["one"]) > 2
    for item, row in outcome.results["one"]:
        tokens = item.spec.tokens()[None]
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits.double()
        expected = F.cross_entropy(logits[0], tokens[0, 1:], reduction="none")
        edges = [0, 16, 32, 50, 64, 128, 150]
        parts = [float(expected[a:b].sum()) for a, b in pairwise(edges)]
        assert row["nats"] == pytest.approx(parts, abs=1e-6)


@pytest.mark.parametrize("build", [ByteTokenizer, PairTokenizer, trained_bpe])
def test_columns_are_bits_over_bytes(build: Any, tmp_path: Path) -> None:
    tokenizer = build()
    one = small_model("one", tokenizer=tokenizer)
    outcome = measure(perplexity(tmp_path), tmp_path / "r", one)
    columns: dict[int, list[tuple[float, float]]] = {64: [], 256: [], 512: []}
    for path in texts(tmp_path):
        ids = torch.tensor([tokenizer.encode(path.read_text())])
        count, ends = (ids.shape[1] - 1) // 512, tokenizer.encode_with_ends(path.read_text())[1]
        for start in (count * k // 3 * 512 for k in range(3)):
            window = ids[:, start : start + 513]
            with torch.no_grad():
                logits = one.model(window[:, :-1]).logits.double()
            bits = F.cross_entropy(logits[0], window[0, 1:], reduction="none") / math.log(2)
            for at, (a, b) in zip(columns, ((0, 64), (64, 256), (256, 512)), strict=True):
                columns[at].append((float(bits[a:b].sum()), ends[start + b] - ends[start + a]))
    found = cells(outcome)
    for at, samples in columns.items():
        assert found[BITS, at, "one"].estimate == pytest.approx(ratio(samples), rel=1e-5)
    assert len(outcome.results["one"]) == 6


@pytest.mark.parametrize("other", [PairTokenizer, byte_level])
def test_models_with_different_tokenizers_score_the_same_bytes(other: Any, tmp_path: Path) -> None:
    models = [small_model("bytes"), small_model("pairs", tokenizer=other())]
    outcome = measure(perplexity(tmp_path), tmp_path / "r", *models)
    sizes: dict[str, list[Any]] = {}
    for name, found in outcome.results.items():
        sizes[name] = [
            [int(item.spec.document.byte_ends[end]) for end in item.spec.ends.values()]
            for item, _ in found
        ]
    assert sizes["bytes"] == sizes["pairs"]
    assert len(sizes["bytes"]) == 6
    for own in sizes["bytes"]:
        assert own[-1] - own[0] == pytest.approx(512, abs=2)
        assert own == sorted(set(own))
    assert cells(outcome)[BITS, 512, "pairs"].difference is not None


def test_places_of_two_tokenizers(tmp_path: Path) -> None:
    """Tokens of a BPE and of bytes that end at one byte, in characters of several bytes too."""
    text = "Ünïcödé: the grass is green, 你好! There and back again.\n\n  The sky is blue. " * 12
    (tmp_path / "a.txt").write_text(text)
    wide = build_model("gru", vocab_size=5000)
    one, other = (
        read_documents([tmp_path / "a.txt"], tokenizer, wide)[0]
        for tokenizer in (trained_bpe(), ByteTokenizer())
    )
    wanted = list(range(0, 300, 50))
    for places in shared_places([one, other], wanted), shared_places([other, one], wanted)[::-1]:
        ends = [
            document.byte_ends[torch.tensor(own)].tolist()
            for document, own in zip((one, other), places, strict=True)
            if document.byte_ends is not None
        ]
        assert ends[0] == ends[1] == sorted(set(ends[0]))
    assert shared_places([one, one], wanted) == [wanted, wanted]
    with pytest.raises(UserError, match="--lengths"):
        shared_places([one, other], list(range(9)))


def test_a_model_with_a_maximum_length(tmp_path: Path) -> None:
    """It has losses up to it; overlapping windows reach beyond."""
    short = small_model("short", position=SHORT)
    found = cells(measure(perplexity(tmp_path), tmp_path / "r", short))
    assert found[BITS, 256, "short"].estimate is not None
    assert "300" in str(found[BITS, 512, "short"])
    evaluation = perplexity(tmp_path, context=200, stride=100)
    further = cells(measure(evaluation, tmp_path / "r", short))
    assert further[BITS, 512, "short"].estimate is not None
    # The first 64 tokens are read from the empty state by both.
    assert further[BITS, 64, "short"].estimate == pytest.approx(found[BITS, 64, "short"].estimate)


class Counting(Scripted):
    """A uniform model that records the sizes of its calls and may be interrupted."""

    def __init__(self, fails_after: int = 1000) -> None:
        super().__init__(1000, lambda read: torch.zeros(1))
        self.calls: list[int] = []
        self.fails_after = fails_after

    def forward(self, tokens: Tensor, *others: Any, **named: Any) -> LMOutput:
        if len(self.calls) == self.fails_after:
            raise KeyboardInterrupt
        self.calls.append(tokens.numel())
        return super().forward(tokens, *others, **named)


def counted(folder: Path, model: Any, **changes: Any) -> None:
    twice = texts(folder) * 2  # what is given twice is measured once
    options = {"texts": twice, "lengths": [128], "batch_size": 1, "windows": 3} | changes
    evaluation = perplexity(folder, **options)
    measure(evaluation, folder / "r", OpenCheckpoint("counting", model, ByteTokenizer()))


def test_only_missing_windows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        counted(tmp_path, Counting(fails_after=2))
    written = (tmp_path / "r/rows.jsonl").read_bytes()
    model = Counting()
    counted(tmp_path, model)
    assert len(model.calls) == 4
    assert (tmp_path / "r/rows.jsonl").read_bytes().startswith(written)
    model = Counting()
    counted(tmp_path, model, lengths=[64, 128])
    assert model.calls == []
    monkeypatch.setattr(base, "MAX_LOGITS", 50_000)
    counted(tmp_path, model, lengths=[512], windows=1)
    assert (sum(model.calls), max(model.calls)) == (1024, 50)
    assert len(rows(tmp_path / "r")) == 8


def test_newlines(tmp_path: Path) -> None:
    """A text of newlines is one window; the losses by position partition it."""
    options = PerplexityOptions(newlines=True, lengths=[150])
    outcome = measure(options, tmp_path / "r", small_model("one"))
    ((item, row),) = outcome.results["one"]
    assert item.spec.edges == [0, 16, 32, 64, 128, 150]
    bits = {at: cell.estimate.mean for (name, at, _), cell in cells(outcome).items() if at != 150}
    total = 16 * bits[16] + 16 * bits[32] + 32 * bits[64] + 64 * bits[128]
    assert total * math.log(2) == pytest.approx(sum(row["nats"][:4]))
    each = math.exp(sum(row["nats"]) / 150)
    assert outcome.notes == [f"Perplexity per token over all windows: {each:,.2f} (one)."]


def test_the_perplexity_under_the_table_counts_each_text_once(tmp_path: Path) -> None:
    """A text that is given twice has no more weight, and a table without losses has no note."""
    once, again = texts(tmp_path), [*texts(tmp_path), tmp_path / "a.txt"]
    one, short = small_model("one"), small_model("short", position=SHORT)
    outcomes = [measure(perplexity(tmp_path, texts=t), tmp_path / "r", one) for t in (once, again)]
    assert outcomes[0].notes == outcomes[1].notes != []
    both = measure(perplexity(tmp_path), tmp_path / "r", one, short)
    assert both.notes == outcomes[0].notes, "not of other tokens"
    beyond = perplexity(tmp_path, lengths=[512]).evaluation()
    two = [CostOptions(lengths=[8]).evaluation(), beyond]
    assert run([short], two, tmp_path / "r", quiet=True)[1].notes == []


def test_tokens_without_bytes_are_refused(tmp_path: Path) -> None:
    one = small_model("one")
    (tmp_path / "c.txt").write_text("🙂" * 9)
    split = one._replace(tokenizer=byte_level())
    with pytest.raises(UserError, match="--lengths"):
        options = PerplexityOptions(texts=[tmp_path / "c.txt"], lengths=[1, 4])
        measure(options, tmp_path / "r", split)

    class NoOffsets(ByteTokenizer):
        def encode_with_ends(self, text: str) -> tuple[list[int], None]:
            return self.encode(text), None

    with pytest.raises(UserError, match="one.*fast tokenizer"):
        measure(perplexity(tmp_path), tmp_path / "r", one._replace(tokenizer=NoOffsets()))
