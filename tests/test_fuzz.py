"""Seeded mutations of every kind of file end cleanly or with one sentence.

Each case changes, removes or inserts bytes of one valid file. LONGRNN_MUTANTS is their number for
each file.
"""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from longrnn import load
from longrnn.checkpoints.layouts import save_model
from longrnn.checksums import CHECKSUMS, write_checksums
from longrnn.data.build import build
from longrnn.data.stream import DOCUMENTS, HEADER, SCORED, TOKENS, Corpus
from longrnn.errors import UserError
from longrnn.text import ByteTokenizer, Reading
from tests.cli import conftest
from tests.cli.conftest import CLI, Outcome
from tests.contracts.builders import build_model, random_tokens
from tests.hf.foreign import causal, native, with_bytes
from tests.training.runs import tiny, write_config

pytestmark = pytest.mark.core

MUTANTS = int(os.environ.get("LONGRNN_MUTANTS", "4"))

# What stands in a file where a number or a text stood.
NUMBERS = 'null -1 0 1e400 2147483648 "" [] {} true NaN "\\u0000" é'
WORDS = NUMBERS.split()
cli = conftest.cli


def mutant(content: bytes, rng: random.Random) -> bytes:
    """Returns `content` with one to three random changes."""
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(content) + 1)
        kind = rng.randrange(6)
        if kind == 0:  # one bit
            content = content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]
        elif kind == 1:  # an end that is missing
            content = content[:place]
        elif kind == 2:  # a piece that is missing
            content = content[:place] + content[place + rng.randint(1, 40) :]
        elif kind == 3:  # a piece that stands twice
            content = content[:place] + content[max(0, place - rng.randint(1, 40)) :]
        elif kind == 4:  # bytes from elsewhere
            content = content[:place] + rng.randbytes(rng.randint(1, 16)) + content[place:]
        else:  # another value behind a colon
            colons = [i for i, byte in enumerate(content[:4000]) if byte == ord(":")]
            if colons:
                place = rng.choice(colons) + 1
                ends = [i for i in (content.find(c, place) for c in (b",", b"}", b"\n")) if i > 0]
                end = min(ends, default=len(content))
                content = content[:place] + rng.choice(WORDS).encode() + content[end:]
    return content


def mutants(path: Path) -> Iterator[None]:
    """Yields while a file has mutated content; the body must end, or raise a sentence."""
    content = path.read_bytes()
    for seed in range(MUTANTS):
        path.write_bytes(mutant(content, random.Random(f"{path.name}/{seed}")))
        yield
    path.write_bytes(content)


def assert_clean(result: Outcome) -> None:
    """Asserts exit code 0, or 2 with one sentence."""
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert (result.code, len(errors)) in ((0, 0), (2, 1)), result.err[-300:]
    assert "Traceback" not in result.err, result.err[-300:]


def assert_one_line(error: UserError) -> None:
    assert len(str(error).splitlines()) == 1, error


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint for each layout."""
    root = tmp_path_factory.mktemp("valid")
    save_model(build_model("mamba2", dtype=torch.float32, vocab_size=256), root / "ours")
    save_model(build_model("lstm", "random", dtype=torch.float32, vocab_size=256), root / "lstm")
    native(root / "native")
    with_bytes(causal("mamba2", vocab_size=256), root / "mamba2")
    with_bytes(causal("llama", vocab_size=256), root / "llama")
    return root


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["ours", "lstm", "native", "mamba2", "llama"])
@pytest.mark.parametrize("name", ["config.json", "weights"])
def test_mutants_of_checkpoints(layout: str, name: str, valid: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(valid / layout, tmp_path / layout)
    weights = "pytorch_model.bin" if layout == "native" else "model.safetensors"
    for _ in mutants(folder / (weights if name == "weights" else name)):
        try:
            assert load(folder)(random_tokens(1, 4)).logits.shape[:2] == (1, 4)
        except UserError as error:
            assert_one_line(error)


@pytest.mark.parametrize("name", [HEADER, TOKENS, DOCUMENTS, SCORED, CHECKSUMS])
def test_mutants_of_corpora(name: str, tmp_path: Path) -> None:
    """Their checksums are made again, so that their content itself is checked."""
    corpus, table = tmp_path / "corpus", tmp_path / "table.jsonl"
    table.write_text('{"prompt": "2+2=", "completion": "4"}\n' * 3)
    build([str(table)], ByteTokenizer(), corpus, reading=Reading(instruct=True), quiet=True)
    for _ in mutants(corpus / name):
        if name != CHECKSUMS:
            write_checksums(corpus, ("*",))
        try:
            opened = Corpus(corpus)
            opened.window(np.arange(opened.places), "")
        except UserError as error:
            assert_one_line(error)


def test_mutants_of_training_configurations(cli: CLI, tmp_path: Path) -> None:
    """A missing checkpoint in init_from ends each run after its configuration was read."""
    path = write_config(tiny("reverse", tmp_path / "run", max_steps=1), tmp_path / "train.yaml")
    for _ in mutants(path):
        assert_clean(cli("train", path, "init_from=nowhere"))


def test_mutants_of_the_metrics_of_a_run(cli: CLI, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_config(tiny("reverse", run), run / "train.yaml")
    path = run / "metrics.jsonl"
    path.write_text('{"step": 1, "tokens": 8, "loss": 2.5}\n{"step": 2, "tokens": 16}\n')
    for _ in mutants(path):
        assert_clean(cli("report", run))
    for row in ('{"step": 1}', '{"step": 1e400, "tokens": 1}', '{"step": 1, "tokens": 1, "a": ""}'):
        path.write_text(f"{row}\n")
        assert cli("report", run).code == 2
