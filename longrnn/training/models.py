"""Builds the model of a run and writes it into folders that `load` reads.

Trained weights are float32, whatever the checkpoint holds: the small updates of an optimizer are
lost in a narrower dtype. accelerate handles mixed precision.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from longrnn import state as states
from longrnn.checkpoints import adapters
from longrnn.checkpoints.folder import check_weights, read_config
from longrnn.checkpoints.layouts import layout_of, save_model
from longrnn.checkpoints.load import load, mitigated
from longrnn.checkpoints.names import (
    INITIAL_STATE,
    CheckpointName,
    base_folder,
    resolve,
    split_spec,
)
from longrnn.checkpoints.tokenizer import load_tokenizer
from longrnn.checksums import remove_checksums
from longrnn.data import SequenceTask, Task
from longrnn.errors import UserError
from longrnn.hf.tokenizer import HFTokenizer, byte_level
from longrnn.mitigations.spec import NONE, split
from longrnn.models import RecurrentConfig, RecurrentLM, TrainableLM
from longrnn.models.base import require_cells
from longrnn.options import validated
from longrnn.text import ByteTokenizer, Tokenizer
from longrnn.training.config import TrainConfig
from longrnn.training.optim import fill

# How the names of the parameters of a learned initial state begin.
LEARNED = "learned."


def build(config: TrainConfig, task: Task, origin: Path | None = None) -> TrainableLM:
    """Builds or loads the model that a run starts with, in float32 and under its mitigation.

    By default a checkpoint is trained under the mitigation that it was trained under before.

    Args:
        config: the run.
        task: which the model must fit.
        origin: the checkpoint to resume from, whose weights the model gets; `init_from` is then
            read again for adapters only.

    Raises:
        UserError: the configuration or checkpoint does not fit.
    """
    loaded: Any = None
    if config.init_from is None:
        options = {"vocab_size": task.vocab_size, **config.model}
        plain = RecurrentLM(validated(RecurrentConfig, options, "model"))
        model: Any = mitigated(plain, split(config.mitigation or NONE))
    else:
        begins = origin is None or config.freezes
        name = CheckpointName.parse(config.init_from if begins else str(origin))
        if config.mitigation is not None:
            name = name._replace(mitigation=tuple(split(config.mitigation)))
        loaded = load(name)
        model = _trainable(loaded, config.init_from)
    check_vocabulary(model.vocab_size, task)
    if config.freezes:
        model.base_name = str(config.init_from)
        folder = base_folder(split_spec(model.base_name)[0])
        model.base_layout = layout_of(read_config(folder))
    if config.peft is not None:
        adapters.add_adapters(model, **config.peft.model_dump())
    elif config.learns_state:
        model.base_fingerprint = model.weights_fingerprint()
        model.requires_grad_(False)
    model = _with_window(model, loaded, config)
    if config.learns_state:
        _learn_start(model, origin, is_alone=config.peft is None)
    if origin is None:
        fill(model, config.fill)
    elif loaded is None or config.freezes:
        _load_weights(model, origin)
    model.trained_under = model.spec
    model.gradient_checkpointing_enable(config.gradient_checkpointing == "block")
    return model


def _learn_start(model: TrainableLM, origin: Path | None, *, is_alone: bool) -> None:
    """Makes the recurrent part of the initial state parameters, in the dtype of the weights.

    Args:
        model: changed in place.
        origin: the checkpoint to resume from, which has the state.
        is_alone: whether the weights stay those of its checkpoint.
    """
    if is_alone:
        model.start_fingerprints = states.fingerprints(model)
    if origin is None:
        model.start = states.detach(model.init_state(1))
    else:
        model.start = states.load_start(origin / INITIAL_STATE, model, is_own=True)
    dtype = model.head.weight.dtype
    leaves = states.recurrent(model.start.layers)
    model.learned = nn.ParameterList([leaf[0].to(dtype) for leaf in leaves])


def _trainable(loaded: Any, name: str) -> Any:
    """A loaded model in float32."""
    if isinstance(loaded, RecurrentLM):
        return loaded.float()
    require_cells(loaded, f"init_from={name}")
    from longrnn.hf.hybrid.trainable import trainable

    return trainable(loaded)


def _load_weights(model: TrainableLM, folder: Path) -> None:
    """Loads the weights that were trained of a model from a checkpoint of its run."""
    is_adapted = adapters.has_adapters(model)
    read = adapters.read_weights(model, folder) if is_adapted else load(folder).state_dict()
    target = {n: like for n, like in model.state_dict().items() if not n.startswith(LEARNED)}
    expected = {name: like for name, like in target.items() if name in read or not is_adapted}
    try:
        check_weights(expected, read)
    except ValueError as error:
        raise UserError(
            f"{folder} does not fit the model of this run ({error}): leave the model as it was, "
            f"or start a new run from it with init_from={folder}"
        ) from error
    model.load_state_dict(read, strict=False)


def _with_window(model: Any, loaded: Any, config: TrainConfig) -> Any:
    """A model in whose attention a state of bounded size can be carried.

    Args:
        model: without a window.
        loaded: what `init_from` names, which may have one.
        config: the run.

    Raises:
        UserError: a window of a model without attention, or one that is not valid for it.
    """
    size, sinks = config.attention_window, 0
    attends = getattr(model, "attends_to_all", False)
    if attends and size is None:
        given = loaded.attention_window
        default = (config.length.max if config.carries else None), 0
        size, sinks = default if given is None else given
    if size is not None:
        if not attends:
            raise UserError(
                f"attention_window={size} needs a Hugging Face hybrid whose attention has no "
                "window in init_from: leave it out"
            )
        return model.with_attention_window(size, sinks)
    if config.carries and not isinstance(model, RecurrentLM) and model.max_length is not None:
        return model.beyond()  # its attention has a window of its own
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
    source = config.tokenizer if origin is None or config.peft is not None else origin
    if source is None:
        named = CheckpointName.parse(str(config.init_from))
        source = named._replace(checkpoint=str(resolve(named.checkpoint))).tokenizer
    try:
        tokenizer = load_tokenizer(source)
    except UserError as error:
        raise UserError(f"{error}; or give the run one with tokenizer=PATH") from error
    return ByteTokenizer() if tokenizer.fingerprint() == byte_level().fingerprint() else tokenizer


def save(
    model: TrainableLM, folder: Path, weights: Mapping[str, Tensor], tokenizer: Tokenizer
) -> None:
    """Writes a model with its tokenizer, so that the folder can be moved; of additions, only them.

    Args:
        model: the model.
        folder: created if it does not exist.
        weights: the whole state dict.
        tokenizer: of the model.
    """
    learned = [weight[None] for name, weight in weights.items() if name.startswith(LEARNED)]
    if model.start is not None:
        start = model.start
        if learned:
            start = start._replace(layers=states.with_recurrent(start.layers, learned))
        remove_checksums(folder)
        states.save(start, folder / INITIAL_STATE, recorded=model.start_fingerprints)
    weights = {name: w for name, w in weights.items() if not name.startswith(LEARNED)}
    if adapters.has_adapters(model):
        adapters.save_adapter(model, folder, weights)
        return
    if not isinstance(model, RecurrentLM):
        from longrnn.hf.hybrid.trainable import save_hybrid

        save_hybrid(model, folder, weights, tokenizer, model.trained_under)  # type: ignore[arg-type]
        return
    name = "bytes"
    if isinstance(tokenizer, HFTokenizer):
        tokenizer.save(folder)
        name = "tokenizer.json"
    save_model(model, folder, weights=weights, tokenizer=name)
