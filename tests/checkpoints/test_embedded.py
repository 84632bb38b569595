"""The embedded checkpoints have the size, origin and accuracy that the README states."""

from pathlib import Path
from typing import Any

import pytest

from longrnn.checkpoints.load import load
from longrnn.checkpoints.names import embedded
from longrnn.evaluation.run import evaluate
from longrnn.training.config import configured
from tests.texts import BOOK

ROOT = Path(__file__).parents[2]
NAMES = (
    "passkey-tiny",
    "passkey-tiny-short",
    "collapse-tiny",
    "recall-collapse",
    "recall-tiny",
    "recall-tiny-numbered",
)


def accuracy(name: str, length: int, output: Path, **options: Any) -> float:
    """Share of keys recalled over five depths."""
    cells = evaluate(name, {"kind": "passkey", "lengths": [length], "n": 4, **options}, output)
    (estimate,) = (cell.estimate for cell in cells if cell.column.drawn)
    assert estimate is not None
    return estimate.mean


@pytest.mark.parametrize("name", NAMES)
def test_sizes(name: str) -> None:
    assert sum(p.numel() for p in load(name).parameters()) <= 1_000_000
    assert (embedded()[name] / "model.safetensors").stat().st_size <= 4_000_000


@pytest.mark.parametrize("name", NAMES)
def test_trained_by_the_configuration_in_the_tree(name: str) -> None:
    recorded = configured(embedded()[name] / "train.yaml")
    offered = configured(ROOT / f"configs/train/{name.replace('-', '_')}.yaml")
    recorded.output_dir = offered.output_dir
    if offered.init_from is not None:
        # Those of the checkpoint it starts from.
        offered.model, offered.tokenizer = recorded.model, recorded.tokenizer
    assert recorded == offered


def test_one_holds_where_the_other_has_collapsed(tmp_path: Path) -> None:
    some: dict[str, Any] = {"n": 1, "depths": [0.1, 0.5, 0.9]}
    assert accuracy("passkey-tiny-short", 16384, tmp_path / "short", **some) <= 0.5
    assert accuracy("passkey-tiny", 16384, tmp_path / "tiny", **some) == 1


@pytest.mark.parametrize(
    ("name", "n_keys", "least"),
    [
        ("recall-tiny", 1, 0.6),
        ("recall-tiny-numbered", 1, 0.9),
        ("recall-tiny-numbered", 4, 0.8),
        ("recall-tiny-numbered", 8, 0.8),
    ],
)
def test_they_recall_a_key_in_a_novel(name: str, n_keys: int, least: float, tmp_path: Path) -> None:
    """After 2,048 tokens that are not the filler of training; a guess is right in 1e-5."""
    some: dict[str, Any] = {"depths": [0, 0.5, 1], "filler": BOOK, "n_keys": n_keys}
    assert accuracy(name, 2048, tmp_path, **some) >= least
