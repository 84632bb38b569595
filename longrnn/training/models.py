"""Builds the model of a run and writes it into folders that `load` reads.

Trained weights are float32, whatever the checkpoint holds: the small updates of an optimizer are
lost in a narrower dtype. accelerate handles mixed precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from longrnn.config import build_config
from longrnn.data import SequenceTask, Task
from longrnn.errors import UserError
from longrnn.hf import lora
from longrnn.hf.load import load, mitigated
from longrnn.hf.names import resolve, split_spec
from longrnn.hf.tokenizer import HFTokenizer, byte_level, load_tokenizer
from longrnn.mitigations.spec import split
from longrnn.models import RecurrentConfig, RecurrentLM
from longrnn.models.checkpoint import save_model
from longrnn.text import ByteTokenizer, Tokenizer
from longrnn.training.config import TrainConfig


def build(config: TrainConfig, task: Task, origin: Path | None = None) -> RecurrentLM:
    """Builds or loads the model that a run starts with, in float32 and under its mitigation.

    By default a checkpoint is trained under the mitigation that it was trained under before.

    Args:
        config: the run.
        task: which the model must fit.
        origin: the checkpoint to resume from; `init_from` is then read again for adapters only.

    Raises:
        UserError: the configuration or checkpoint does not fit.
    """
    recorded = None
    if config.init_from is None:
        options = {"vocab_size": task.vocab_size, **config.model}
        plain = RecurrentLM(build_config(RecurrentConfig, options, source="model"))
    else:
        begins = origin is None or config.peft is not None
        loaded = load(config.init_from if begins else str(origin))
        if not isinstance(loaded, RecurrentLM):
            raise UserError(
                f"init_from={config.init_from} is a Hugging Face model, and longrnn trains its own "
                "recurrent models: train this one with Hugging Face's Trainer"
            )
        plain, recorded = loaded.under(None).float(), loaded.mitigation
    check_vocabulary(plain.vocab_size, task)
    if config.peft is not None:
        plain.base_fingerprint = plain.fingerprint()  # type: ignore[assignment]
        adapters = config.peft.model_dump()
        lora.add_adapters(plain, alpha=2 * config.peft.r, **adapters)
    model = plain.under(recorded)
    if config.mitigation is not None:
        model = mitigated(plain, split(config.mitigation))
        assert isinstance(model, RecurrentLM)
    model.trained_under = None if model.mitigation is None else model.mitigation.describe()
    model.gradient_checkpointing_enable(config.gradient_checkpointing == "block")
    return model


def check_vocabulary(vocab_size: int, task: Task) -> None:
    """Refuses a model without the ids of a task, or with many more than the tokenizer.

    Raises:
        UserError: such a model.
    """
    ids, reads_text = task.vocab_size, not isinstance(task, SequenceTask)
    if vocab_size < ids or (reads_text and vocab_size > max(ids + 256, 1.05 * ids)):
        raise UserError(
            f"the task uses {ids:,} token ids and model.vocab_size is {vocab_size:,}: leave out "
            "tokenizer and model.vocab_size for those that fit, or start from another model"
        )


def tokenizer_of(config: TrainConfig, origin: Path | None = None) -> Tokenizer:
    """The tokenizer of a run; by default that of `init_from`, or bytes.

    Args:
        config: the run.
        origin: the checkpoint to resume from, which has the tokenizer beside it.

    Raises:
        UserError: it is missing or cannot be read.
    """
    if config.tokenizer == "bytes" or (config.tokenizer is None and config.init_from is None):
        return ByteTokenizer()
    if origin is not None and config.peft is None:
        source = origin
    else:
        source = config.tokenizer or resolve(split_spec(str(config.init_from))[0])
    try:
        tokenizer = load_tokenizer(source)
    except UserError as error:
        raise UserError(f"{error}; or give the run one with tokenizer=PATH") from error
    return ByteTokenizer() if tokenizer.fingerprint() == byte_level().fingerprint() else tokenizer


def save(
    model: RecurrentLM,
    folder: Path,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    base: str | None,
) -> None:
    """Writes a model with its tokenizer, so that the folder can be moved.

    Args:
        model: the model.
        folder: created if it does not exist.
        weights: the whole state dict.
        tokenizer: of the model.
        base: the checkpoint whose adapters are trained, if they are; only they are written.
    """
    spec = model.trained_under
    if lora.has_adapters(model):
        fingerprint = str(model.base_fingerprint)
        lora.save_adapter(
            model, folder, weights, base=str(base), base_fingerprint=fingerprint, mitigation=spec
        )
        return
    name = "bytes"
    if isinstance(tokenizer, HFTokenizer):
        tokenizer.save(folder)
        name = "tokenizer.json"
    save_model(model, folder, weights=weights, mitigation=spec, tokenizer=name)
