"""Seeded mutations of every kind of file and of command lines end cleanly or with one sentence.

Each case changes, removes or inserts bytes of one valid file (or one option), and runs a command in
this process. It must end with exit code 0, or with exit code 2 and one line on standard error; no
exception may reach the caller. A changed byte of a weight may change outputs if a file carries no
checksum, so outputs are compared only if nothing was changed.

"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from longrnn import load
from longrnn import state as states
from longrnn.errors import UserError
from longrnn.models.checkpoint import save_model
from tests.cli import conftest
from tests.cli.conftest import CLI, Outcome
from tests.contracts.builders import build_model, random_tokens
from tests.hf.foreign import causal, native, with_bytes
from tests.training.runs import tiny, write_config

pytestmark = [pytest.mark.core, pytest.mark.slow]

# What stands in a file where a number or a text stood.
NUMBERS = 'null -1 0 1e400 2147483648 "" [] {} true NaN "\\u0000" é'
WORDS = NUMBERS.split()
cli, models = conftest.cli, conftest.models


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


def assert_clean(result: Outcome) -> None:
    """Asserts exit code 0, or 2 with one sentence."""
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert (result.code, len(errors)) in ((0, 0), (2, 1)), result.err[-300:]
    assert "Traceback" not in result.err, result.err[-300:]


class Failures:
    """Runs every case of a test and reports all failures, not only the first."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def run(self, case: str, call: Callable[[], object]) -> None:
        try:
            call()
        except UserError as error:
            if "\n" in str(error) or not str(error):
                self.found.append(f"{case}: more than one line: {error}")
        except (Exception, pytest.fail.Exception) as error:
            self.found.append(f"{case}: {type(error).__name__}: {str(error)[:200]}")

    def check(self) -> None:
        assert not self.found, f"{len(self.found)} cases failed:\n" + "\n".join(self.found)


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


# Files of each layout, and how many mutants of each.
CHECKPOINTS = [
    ("ours", "config.json", 120),
    ("ours", "model.safetensors", 120),
    ("lstm", "config.json", 80),
    ("native", "config.json", 120),
    ("native", "pytorch_model.bin", 120),
    ("mamba2", "config.json", 60),
    ("mamba2", "model.safetensors", 40),
    ("llama", "config.json", 40),
    ("llama", "model.safetensors", 40),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("layout", "name", "count"), CHECKPOINTS)
def test_mutants_of_checkpoints(
    layout: str, name: str, count: int, valid: Path, tmp_path: Path
) -> None:
    folder, failures = tmp_path / layout, Failures()
    shutil.copytree(valid / layout, folder)
    content, tokens = (folder / name).read_bytes(), random_tokens(1, 4)
    expected = load(folder)(tokens).logits
    for seed in range(count):
        changed = mutant(content, random.Random(f"{layout}/{name}/{seed}"))
        (folder / name).write_bytes(changed)

        def call(changed: bytes = changed) -> None:
            logits = load(folder)(tokens).logits
            assert changed != content or torch.equal(logits, expected)

        failures.run(f"{layout}/{name}, seed {seed}", call)
    failures.check()


@pytest.mark.parametrize("kind", ["mamba2", "lstm"])
def test_mutants_of_states(kind: str, tmp_path: Path) -> None:
    model, failures = build_model(kind, "sinusoidal", dtype=torch.float32), Failures()
    path, tokens = tmp_path / "state", random_tokens(2, 4)
    with torch.no_grad():
        states.save(model(tokens).state, path, model=model)
    content = path.read_bytes()
    for seed in range(100):
        path.write_bytes(mutant(content, random.Random(f"{kind}/{seed}")))

        def call() -> None:
            state = states.load(path, model)
            rows = random_tokens(len(state.position), 4)
            assert model(rows, state).logits.shape[:2] == rows.shape

        failures.run(f"state of {kind}, seed {seed}", call)
    failures.check()


def test_mutants_of_training_configurations(cli: CLI, tmp_path: Path) -> None:
    """A missing checkpoint in init_from ends each run after its configuration was read."""
    path = write_config(tiny("reverse", tmp_path / "run", max_steps=1), tmp_path / "train.yaml")
    content, failures = path.read_bytes(), Failures()
    for seed in range(150):
        path.write_bytes(mutant(content, random.Random(f"train/{seed}")))
        failures.run(f"seed {seed}", lambda: assert_clean(cli("train", path, "init_from=nowhere")))
    failures.check()


def test_mutants_of_results(cli: CLI, models: Path, tmp_path: Path) -> None:
    """An evaluation with damaged rows resumes or is refused."""
    command = ["eval", "passkey", models / "text", "--lengths", "160", "--depths", "1"]
    command += ["--n", "1", "--quiet", "--output", tmp_path / "results"]
    assert cli(*command).code == 0
    failures = Failures()
    path = next((tmp_path / "results").rglob("*.jsonl"))
    content = path.read_bytes()
    for seed in range(60):
        path.write_bytes(mutant(content, random.Random(f"results/{seed}")))
        failures.run(f"seed {seed}", lambda: assert_clean(cli(*command)))
    failures.check()
