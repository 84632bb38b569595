"""Every command gives the same bits per byte for the same bytes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from longrnn.hf.tokenizer import HFTokenizer
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.models.checkpoint import save_model
from tests.cli.conftest import CLI

HALF = 40_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two uniform models, of bytes and of BPE tokens, and digits before prose."""
    root, rng = tmp_path_factory.mktemp("bits"), random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(3000)]
    prose = " " + " ".join(rng.choices(words, k=HALF // 3))
    (root / "book.txt").write_text("".join(rng.choices("0123456789", k=HALF)) + prose[:HALF])
    for name, vocab_size in (("bytes", 256), ("bpe", 4096)):
        config = RecurrentConfig(vocab_size, d_model=4, n_layers=1, mixer={"kind": "lstm"})
        model = RecurrentLM(config)
        torch.nn.init.zeros_(model.head.weight)
        save_model(model, root / name)
    bpe(prose).save(root / "bpe")
    return root


def bpe(text: str) -> HFTokenizer:
    """A byte-level BPE tokenizer that keeps every digit separate."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    fast.decoder = decoders.ByteLevel()  # type: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator([text], trainer)
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))


@pytest.mark.parametrize(("name", "bits"), [("bytes", "8.000"), ("bpe", "12.000")])
def test_one_model(name: str, bits: str, folder: Path, cli: CLI) -> None:
    """`eval perplexity` divides by the bytes that were scored, in all and at every position."""
    done = cli(
        "eval", "perplexity", folder / name, "--text", folder / "book.txt", "--length", "30k",
        "--train-length", "1k", "--by-position", "--quiet",
    )  # fmt: skip
    assert done.code == 0, done.err
    windows = 2 if name == "bytes" else 1
    assert f"{bits} [{bits}, {bits}] bits per byte" in done.out or (
        windows == 1 and f"{bits} bits per byte" in done.out
    )
    rows = [line for line in done.out.splitlines() if line.startswith("│")]
    assert len(rows) == 16
    assert all(bits in line for line in rows)


def test_models_in_pairs(folder: Path, cli: CLI, tmp_path: Path) -> None:
    """`eval perplexity A B` finds +4 bits where the reference needs 8 and the other 12."""
    done = cli(
        "eval", "perplexity", folder / "bytes", folder / "bpe", "--text", folder / "book.txt",
        "--length", str(HALF), "--output", tmp_path / "out", "--quiet",
    )  # fmt: skip
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "out/paired.jsonl").read_text().splitlines()]
    found = [lines[1][key] for key in ("mean_first", "mean_second", "difference")]
    assert found == pytest.approx([8, 12, 4], abs=1e-5)


@pytest.mark.parametrize("order", [("bytes", "bpe"), ("bpe", "bytes")])
def test_models_in_a_suite(order: tuple[str, str], folder: Path, cli: CLI, tmp_path: Path) -> None:
    """`compare` scores the same bytes for both models, whichever is the reference."""
    suite = tmp_path / "bits.yaml"
    suite.write_text(
        "evaluations:\n"
        f"  - {{kind: perplexity, texts: ['{folder / 'book.txt'}'], lengths: [1k, 4k], windows: 1}}"
    )
    names = [folder / name for name in order]
    done = cli("compare", *names, suite, "--output", tmp_path / "out", "--quiet")
    assert done.code == 0, done.err
    cells = [
        json.loads(line) for line in (tmp_path / "out/comparison.jsonl").read_text().splitlines()
    ]
    assert len(cells) == 4
    for cell in cells:
        expected = {"bytes": 8, "bpe": 12}[cell["model"]]
        assert cell["estimate"]["mean"] == pytest.approx(expected, abs=1e-5)
        if cell["model"] == order[1]:
            less = 4 if order[1] == "bpe" else -4
            assert cell["difference"]["mean"] == pytest.approx(less, abs=1e-5)
