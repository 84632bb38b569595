"""The model card of a run, and its upload to the Hugging Face Hub."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longrnn.errors import UserError
from longrnn.files import one_line, write_atomic
from longrnn.training.config import TrainConfig
from longrnn.training.metrics import read_metrics
from longrnn.training.processes import on_main

if TYPE_CHECKING:
    from longrnn.training.trainer import Trainer

CARD = "README.md"
# What is uploaded: the final model, how it was trained, and its metrics; never checkpoints.
UPLOADED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", CARD, "train.yaml"]
UPLOADED += ["metrics.jsonl"]
BY_POSITION = "eval_loss_to_"


def finish(trainer: Trainer) -> None:
    """Writes the card of a run that has ended, closes its trackers, and uploads what it asks for.

    Raises:
        UserError: the upload failed.
    """
    accelerator = trainer.accelerator
    on_main(accelerator, partial(write_card, trainer))
    with redirect_stdout(sys.stderr):  # trackers print there
        accelerator.end_training()
    if trainer.config.push_to_hub:
        trainer.say(f"uploaded: {on_main(accelerator, partial(push, trainer.config))}")


def write_card(trainer: Trainer) -> None:
    """Writes `README.md`: what the model is, how it was trained, and where it holds."""
    config, folder = trainer.config, trainer.output_dir
    rows = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
    best = trainer.validation.best if trainer.validation is not None else None
    final = best.step if best is not None and config.load_best_model_at_end else trainer.step
    parameters = sum(p.numel() for p in trainer.model.parameters())
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    table = {
        "task": json.dumps(config.task, sort_keys=True),
        "SHA-256 of the data": trainer.task.data_sha256() or "none (generated)",
        "initial state of the rows": json.dumps(config.initial_state, sort_keys=True),
        "training length": f"{config.length.max:,} tokens",
        "steps": f"{final:,} of {trainer.step:,}" if final != trainer.step else f"{final:,}",
        "tokens read": f"{trainer.tokens:,}",
        "optimizer": f"{config.optim}, learning rate {config.learning_rate:g}, "
        f"{config.lr_scheduler_type}",
        "precision": "float32" if config.mixed_precision == "no" else config.mixed_precision,
        "mitigation": trainer.saver.mitigation or "none",
        "seed": str(config.seed),
        "parameters": f"{parameters:,}, of which {trained:,} were trained",
    }
    if config.init_from is not None:
        table = {"started from": str(config.init_from), **table}
    lines = [*_header(config), f"# {folder.resolve().name}", "", "Trained with longrnn.", ""]
    lines += ["## How it was trained", "", "| | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in table.items()]
    lines += ["", "All settings are in `train.yaml`.", "", "## Where it holds", ""]
    lines += _validity(config, rows, final)
    write_atomic(folder / CARD, "\n".join(lines) + "\n")


def _header(config: TrainConfig) -> list[str]:
    lines = ["---", "library_name: peft" if config.peft else "library_name: longrnn"]
    lines += ["pipeline_tag: text-generation", "tags:", "- longrnn", "- long-context"]
    base = config.init_from
    if base is not None and base.count("/") == 1 and not Path(base).exists():
        lines.append(f"base_model: {base}")
    return [*lines, "---", ""]


def _validity(config: TrainConfig, rows: list[dict[str, Any]], step: int) -> list[str]:
    """The loss by position of the final model; a sentence where it was not measured."""
    found = [row for row in rows if row["step"] == step and "eval_loss" in row]
    if not found:
        return [
            "It was not validated during training: nothing is known of lengths beyond "
            f"{config.length.max:,} tokens. `longrnn eval perplexity` measures it."
        ]
    edges = sorted(int(name.removeprefix(BY_POSITION)) for name in found[-1] if BY_POSITION in name)
    data = json.dumps(config.validation, sort_keys=True)
    lines = [
        f"Loss on {config.eval_samples} held-out rows ({data}) by position in the document, "
        "from the zero state:",
        "",
        "| positions | nats per token | |",
        "| --- | --- | --- |",
    ]
    start = 0
    for edge in edges:
        where = "trained length" if edge <= config.length.max else "beyond it"
        lines.append(
            f"| {start:,} to {edge:,} | {found[-1][f'{BY_POSITION}{edge}']:.4f} | {where} |"
        )
        start = edge
    if not edges:
        return [f"{lines[0][:-1]}: {found[-1]['eval_loss']:.4f} nats per token."]
    return [*lines, "", f"Beyond {edges[-1]:,} tokens nothing was measured."]


def push(config: TrainConfig) -> str:
    """Uploads the final model of a run with its card; returns where it is.

    Raises:
        UserError: the Hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi

    folder = config.output_dir
    name = config.hub_model_id or Path(folder).resolve().name
    try:
        api = HfApi()
        created = api.create_repo(name, private=config.hub_private_repo, exist_ok=True)
        api.upload_folder(
            repo_id=created.repo_id,
            folder_path=folder,
            allow_patterns=UPLOADED,
            ignore_patterns=["checkpoint-*", "merged/*", "wandb/*"],
            commit_message="Model trained with longrnn",
        )
    except Exception as error:  # the client raises many kinds of errors
        raise UserError(
            f"the model is in {folder} and could not be uploaded as {name} ({one_line(error)}): "
            "log in with `hf auth login`, then give the command again with --resume"
        ) from error
    return str(created)
