"""The model card of a run, and what is uploaded of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from longrnn.errors import UserError
from tests.training.runs import metrics, tiny, train
from tests.training.test_validation import VALIDATED


class Hub:
    """Stands in for `HfApi`, and records what it is given."""

    calls: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self, name: str, **options: Any) -> Any:
        self.calls.append((name, options))
        return SimpleNamespace(repo_id=f"someone/{name}")

    def upload_folder(self, **options: Any) -> None:
        from huggingface_hub.utils import filter_repo_objects

        folder = Path(options["folder_path"])
        names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
        patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
        options["names"] = sorted(filter_repo_objects(names, **patterns))
        self.calls.append(("upload", options))


def test_the_card_says_how_and_where(tmp_path: Path) -> None:
    """README.md has the data, the steps, and the loss by position of the final model."""
    train(tiny("fitted_noise", tmp_path / "run", **VALIDATED))
    card = (tmp_path / "run/README.md").read_text()
    (row,) = [row for row in metrics(tmp_path / "run") if row["step"] == 8 and "eval_loss" in row]
    assert card.startswith("---\nlibrary_name: longrnn\n")
    assert f"{row['eval_loss_to_64']:.4f}" in card
    assert f"{row['eval_loss_to_300']:.4f}" in card
    assert '"kind": "fitted_noise"' in card


def test_a_card_without_validation_says_so(tmp_path: Path) -> None:
    """Without a validation the card claims nothing beyond the training length."""
    train(tiny("passkey", tmp_path, max_steps=1))
    assert "180" in (tmp_path / "README.md").read_text()


def test_the_final_model_is_uploaded_without_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`push_to_hub` uploads model, card, configuration and metrics, and nothing else."""
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    hub = {"push_to_hub": True, "hub_model_id": "mine", "hub_private_repo": True}
    train(tiny("passkey", tmp_path / "run", max_steps=1, **hub))
    (name, options), (_, upload) = Hub.calls
    assert (name, options) == ("mine", {"private": True, "exist_ok": True})
    assert upload["repo_id"] == "someone/mine"
    wanted = ["README.md", "checksums.json", "config.json", "metrics.jsonl", "model.safetensors"]
    assert upload["names"] == [*wanted, "train.yaml"]


def test_a_failed_upload_leaves_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the Hub cannot be reached, the error says where the model is."""

    def fail(self: Hub, name: str, **options: Any) -> Any:
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "create_repo", fail)
    with pytest.raises(UserError):
        train(tiny("passkey", tmp_path / "run", max_steps=1, push_to_hub=True))
    assert (tmp_path / "run/model.safetensors").is_file()
