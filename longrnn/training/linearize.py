"""Trains a recurrent memory for a transformer that others trained: `longrnn linearize`.

In the output folder, `start` is the transformer under a window of attention with memories that
return 0, `attention` the run in which each memory learns what the window removes from the
attention beside it, and `teacher` the run in which all of them learn to predict what the
transformer predicts, beside adapters of the attention if wanted. The weights of the transformer
stay what they were.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from longrnn.checkpoints.folder import read_config
from longrnn.checkpoints.load import load
from longrnn.checkpoints.names import ADAPTER, CheckpointName, resolve
from longrnn.checkpoints.tokenizer import load_tokenizer
from longrnn.checksums import complete_folder
from longrnn.config import RECORDED, load_config, read_recorded
from longrnn.errors import UserError
from longrnn.hf.attention_window import AttentionWindow
from longrnn.hf.foreign import MITIGATION_KEY
from longrnn.hf.hybrid.layers import MEMORIES_KEY
from longrnn.hf.hybrid.model import HybridLM
from longrnn.hf.hybrid.trainable import write_hybrid
from longrnn.hf.memory import with_memory
from longrnn.hf.tokenizer import HFTokenizer, byte_level
from longrnn.hf.windowed import checked_window
from longrnn.locks import locked
from longrnn.mitigations.spec import ATTENTION_WINDOW, NONE
from longrnn.models import RecurrentLM
from longrnn.processes import on_main
from longrnn.training.config import TrainConfig, changes, configured
from longrnn.training.distributed import build_accelerator
from longrnn.training.train import train

BUNDLED = "linearize"
CONFIG = "config.json"
# The key of the configuration in `start` under which the transformer is recorded.
BASE_KEY = "longrnn_base"
START, STAGES = "start", ("attention", "teacher")
# The modules that get adapters.
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Linearized(NamedTuple):
    """What `linearize` makes.

    Attributes:
        trained: the folder of the transformer with its memory.
        names: what to compare, as `load` takes it, by its name in a report: the transformer, the
            window alone, the memory, and what shows whether it remembers or knows the style of
            the text: limited to what the window reads too, and beside full attention.
        config: of the last stage.
        minutes: that the stages took in this call.
    """

    trained: str
    names: dict[str, str]
    config: TrainConfig
    minutes: float


def linearize(
    model: str,
    data: Sequence[str],
    output: Path,
    *,
    window: int = 64,
    sinks: int = 4,
    length: int = 1024,
    layers: Sequence[int] | None = None,
    keys: int = 0,
    budget: float | None = None,
    lora: int | None = None,
    overrides: Sequence[str] = (),
    quiet: bool = True,
) -> Linearized:
    """Gives a transformer a recurrent memory and trains it; what is there already is continued.

    Args:
        model: a causal Hugging Face model with the layers of a LLaMA, as `longrnn.load` takes it.
        data: documents to train on; without any, `overrides` have a task.
        output: folder of the runs.
        window: how many tokens attention reads.
        sinks: how many first tokens it reads beside them.
        length: tokens of a row, which the teacher reads whole.
        layers: numbers of those with a memory; None for all.
        keys: rows of each batch with keys (`longrnn.data.keyed`).
        budget: minutes for both stages, which then have as many steps as fit. The first one has
            half of them, and the second one what is left; a stage that was begun by another call
            keeps its steps. None for `max_steps` each.
        lora: rank of adapters of the attention, which the second stage trains too; None for none.
        overrides: `key=value`, for both stages.
        quiet: print no progress.

    Raises:
        UserError: a model or data that does not fit, or an interrupted run of other options.
    """
    start, limited = output / START, f"{ATTENTION_WINDOW}{AttentionWindow(window, sinks)}"
    values = load_config(BUNDLED) | {"length": {"max": length}}
    if data:
        kind = {"kind": "keyed_text", "keys": keys} if keys else {"kind": "text"}
        values["task"] = {**kind, "data": list(data)}
    configs, before = [], start
    for stage in STAGES:
        values |= {"objective": stage, "init_from": str(before), "output_dir": str(output / stage)}
        if lora is not None and stage == STAGES[-1]:
            values["peft"] = {"r": lora, "targets": ATTENTION, "full": ["mamba"]}
            values["learning_rate_scale"] = values["learning_rate_scale"] | {"*.lora_*": 1}
        configs.append(configured(values, overrides, source="longrnn linearize"))
        before = output / stage
    build_accelerator(configs[0])  # joins the processes of a launch

    with ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(locked(output, instead="choose another --output"))
            if not start.exists():
                sizes = {"window": window, "sinks": sinks, "length": length}
                write_start(model, start, **sizes, layers=layers)
            found, given = read_config(start), None if layers is None else list(layers)
            for what, key, wanted in (
                ("of the transformer", BASE_KEY, base_path(model)),
                ("with", MITIGATION_KEY, limited),
                ("with memories in the layers", MEMORIES_KEY, given),
            ):
                if found.get(key) != wanted:
                    raise UserError(
                        f"{output} has a run {what} {found.get(key) or 'of all'}, not "
                        f"{wanted or 'of all'}: give that, or another --output"
                    )

        on_main(begin)
        begun, spent, passed = time.monotonic(), 0.0, 0.0
        for number, config in enumerate(configs):
            is_begun, is_done = on_main(partial(progress_of, config, any_steps=budget is not None))
            left = None if budget is None else (budget - spent) / (len(configs) - number)
            if is_begun and not is_done:
                train(resume=config.output_dir, quiet=quiet)
            elif not is_done:
                train(config, minutes=left, quiet=quiet)
            passed = (time.monotonic() - begun) / 60
            spent = max(passed, spent + (left or 0.0)) if is_begun else passed
    trained = configs[-1].output_dir
    names = {
        "transformer": model,
        "window": str(start),
        "memory": trained,
        "memory of the window": f"{trained}+{limited}+sliding_window(window={window})",
        "memory, full attention": f"{trained}+none",
    }
    return Linearized(trained, names, configs[-1], passed)


def progress_of(config: TrainConfig, *, any_steps: bool) -> tuple[bool, bool]:
    """Whether a run has begun, and whether it has written its final model.

    Args:
        config: of the run.
        any_steps: whether a run with another number of steps is meant too.

    Raises:
        UserError: its folder has a run with another configuration.
    """
    folder = Path(config.output_dir)
    recorded = read_recorded(folder)
    if not recorded:
        return False, False
    before = configured(recorded | {"output_dir": str(folder)}, source=str(folder / RECORDED))
    if any_steps:
        config = configured(config, [f"max_steps={before.max_steps}"])
    if differing := changes(before, config):
        raise UserError(
            f"{folder} has a run with other options ({differing[0]}): give those, or another "
            "--output"
        )
    return True, (folder / CONFIG).is_file() or (folder / ADAPTER).is_file()


def base_path(model: str) -> str:
    """The folder or file of a transformer, without dtype and mitigation."""
    return str(resolve(CheckpointName.parse(model).checkpoint).resolve())


def write_start(
    model: str,
    folder: Path,
    *,
    window: int,
    sinks: int,
    length: int,
    layers: Sequence[int] | None = None,
) -> None:
    """Writes a transformer under a window, with memories that return 0, and its tokenizer.

    Args:
        model: see `linearize`.
        folder: appears complete, or not at all.
        window: see `linearize`.
        sinks: likewise.
        length: likewise; values stay in the memories for a window to eight times that.
        layers: see `linearize`.

    Raises:
        UserError: see `linearize`.
    """
    name = CheckpointName.parse(model)._replace(mitigation=(NONE,), dtype=torch.float32)
    loaded: Any = load(name)
    if isinstance(loaded, RecurrentLM) or loaded.cells:
        raise UserError(f"{model} has recurrent layers already: give a transformer")
    checked_window(loaded, window, sinks)
    if loaded.max_length is not None and length > loaded.max_length:
        raise UserError(
            f"{model} was made for at most {loaded.max_length:,} tokens, and cannot teach rows of "
            f"{length:,}: give a smaller --length"
        )
    tokenizer = load_tokenizer(name.tokenizer)
    whole = with_memory(loaded.model, shortest=window, longest=8 * length, layers=layers)
    setattr(whole.config, BASE_KEY, base_path(model))
    hybrid = HybridLM(whole).with_attention_window(window, sinks)
    with complete_folder(folder, "choose another folder") as draft:
        write_hybrid(hybrid, draft, hybrid.spec)
        (tokenizer if isinstance(tokenizer, HFTokenizer) else byte_level()).save(draft)
