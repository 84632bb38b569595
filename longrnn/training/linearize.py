"""Trains a recurrent memory for a transformer that others trained: `longrnn linearize`.

In the output folder, `start` is the transformer under a window of attention with memories that
return 0, `attention` the run in which each memory learns what the window removes from the
attention beside it, and `teacher` the run in which all of them learn to predict what the
transformer predicts, beside adapters of the attention if wanted. The weights of the transformer
stay what they were. With `replace`, memories stand in the place of the attention of some layers,
and the others read every token.
"""

import time
from collections.abc import Callable, Mapping, Sequence
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
from longrnn.console import say
from longrnn.data import TASKS
from longrnn.errors import UserError
from longrnn.hf.attention_window import AttentionWindow
from longrnn.hf.foreign import MITIGATION_KEY
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.hf.hybrid.layers import MEMORIES_KEY
from longrnn.hf.hybrid.model import HybridLM
from longrnn.hf.hybrid.trainable import write_hybrid
from longrnn.hf.memory import with_memory
from longrnn.hf.replaced import restorations, with_replaced
from longrnn.hf.tokenizer import HFTokenizer, byte_level
from longrnn.hf.windowed import checked_window
from longrnn.locks import locked
from longrnn.mitigations.spec import ATTENTION_WINDOW, NONE
from longrnn.models import RecurrentLM
from longrnn.processes import on_main
from longrnn.training.config import TrainConfig, changes, configured
from longrnn.training.distillation import BASE_KEY
from longrnn.training.distributed import build_accelerator
from longrnn.training.memory_recipe import MemoryRecipe
from longrnn.training.objective import token_weights
from longrnn.training.train import train

BUNDLED = "linearize"
CONFIG = "config.json"
# The keys of the configuration in `start` with the number of replaced layers, and with what was
# measured of each layer.
REPLACED_KEY, MEASURED_KEY = "longrnn_replaced", "longrnn_restorations"
# Rows on which it is measured.
MEASURED_ROWS = 4
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
    overrides: Sequence[str] = (),
    quiet: bool = True,
    **options: Any,
) -> Linearized:
    """Gives a transformer a recurrent memory and trains it; what is there already is continued.

    Args:
        model: a causal Hugging Face model with the layers of a LLaMA, as `longrnn.load` takes it.
        data: documents to train on; without any, `overrides` have a task.
        output: folder of the runs.
        overrides: `key=value`, for both stages.
        quiet: print no progress.
        options: see `MemoryRecipe`. Of a `budget` the first stage has half, and the second one what
            is left; a stage that was begun by another call keeps its steps.

    Raises:
        UserError: a model or data that does not fit, or an interrupted run of other options.
    """
    recipe = MemoryRecipe(**options)
    layers, replace, budget = recipe.layers, recipe.replace, recipe.budget
    window = AttentionWindow(recipe.window, recipe.sinks)
    if layers is not None and replace is not None:
        raise UserError("--layers have memories beside attention, --replace in its place: give one")
    start, limited = output / START, f"{ATTENTION_WINDOW}{window}"
    values = load_config(BUNDLED) | {"length": {"max": recipe.length}}
    if data:
        kind = {"kind": "keyed_text", "keys": recipe.keys} if recipe.keys else {"kind": "text"}
        values["task"] = {**kind, "data": list(data)}
    configs, before = [], start
    for stage in STAGES:
        values |= {"objective": stage, "init_from": str(before), "output_dir": str(output / stage)}
        if recipe.lora is not None and stage == STAGES[-1]:
            values["peft"] = {"r": recipe.lora, "targets": ATTENTION, "full": ["mamba"]}
            values["learning_rate_scale"] = values["learning_rate_scale"] | {"*.lora_*": 1}
        configs.append(configured(values, overrides, source="longrnn linearize"))
        before = output / stage
    if replace is None and configs[0].mitigation is not None:
        given = f"mitigation={configs[0].mitigation}"
        raise UserError(f"{given} would take the place of --window and --sinks: leave it out")
    build_accelerator(configs[0])  # joins the processes of a launch

    with ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(locked(output, instead="choose another --output"))
            if not start.exists():
                base = Base(model, window, recipe.length)
                add: Any = partial(with_memory, layers=layers)
                if replace is not None:
                    add = partial(replaced, base, replace, configs[0].task, quiet=quiet)
                write_start(base, start, add)
            found = read_config(start)
            for what, key, wanted in (
                ("transformer", BASE_KEY, base_path(model)),
                ("attention", MITIGATION_KEY, limited if replace is None else None),
                ("layers with a memory", MEMORIES_KEY, layers),
                ("number of replaced layers", REPLACED_KEY, replace),
            ):
                if found.get(key) != wanted:
                    raise UserError(
                        f"the {what} of the run in {output} is {found.get(key, 'the default')}, "
                        f"not {'the default' if wanted is None else wanted}: give that, or another "
                        "--output"
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
    names = {"transformer": model, "without attention": str(start), "replaced": trained}
    if replace is None:
        names = {
            "transformer": model,
            "window": str(start),
            "memory": trained,
            "memory of the window": f"{trained}+{limited}+sliding_window(window={recipe.window})",
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
        fitted = ("max_steps", "warmup_steps", "decay_steps")
        config = config.model_copy(update={name: getattr(before, name) for name in fitted})
    if differing := changes(before, config):
        raise UserError(
            f"{folder} has a run with other options ({differing[0]}): give those, or another "
            "--output"
        )
    return True, (folder / CONFIG).is_file() or (folder / ADAPTER).is_file()


def base_path(model: str) -> str:
    """The folder or file of a transformer, without dtype and mitigation."""
    return str(resolve(CheckpointName.parse(model).checkpoint).resolve())


class Base(NamedTuple):
    """A transformer that gets memories.

    Attributes:
        name: as `linearize` takes it.
        window: of its attention.
        length: tokens of a row.
    """

    name: str
    window: AttentionWindow
    length: int

    def checkpoint(self) -> CheckpointName:
        """Its name, in float32 and without a mitigation."""
        return CheckpointName.parse(self.name)._replace(mitigation=(NONE,), dtype=torch.float32)


def write_start(base: Base, folder: Path, add: Callable[..., Any]) -> None:
    """Writes a transformer with memories that return 0, and its tokenizer.

    Args:
        base: the transformer.
        folder: appears complete, or not at all.
        add: adds the memories, as `with_memory` does; values stay in them for a window to eight
            times the length of a row.

    Raises:
        UserError: see `linearize`.
    """
    name, length = base.checkpoint(), base.length
    loaded: Any = load(name)
    if isinstance(loaded, RecurrentLM) or loaded.cells:
        raise UserError(f"{base.name} has recurrent layers already: give a transformer")
    window = checked_window(loaded, base.window.size or 0, base.window.sinks)
    if loaded.max_length is not None and length > loaded.max_length:
        raise UserError(
            f"{base.name} was made for at most {loaded.max_length:,} tokens, and cannot teach rows "
            f"of {length:,}: give a smaller --length"
        )
    tokenizer = load_tokenizer(name.tokenizer)
    whole = add(loaded.model, shortest=window.size, longest=8 * length)
    setattr(whole.config, BASE_KEY, base_path(base.name))
    hybrid: Any = HybridLM(whole)
    if getattr(whole.config, REPLACED_KEY, None) is None:
        hybrid = hybrid.with_attention_window(*window)
    with complete_folder(folder, "choose another folder") as draft:
        write_hybrid(hybrid, draft, hybrid.spec)
        (tokenizer if isinstance(tokenizer, HFTokenizer) else byte_level()).save(draft)


def replaced(
    base: Base,
    count: int,
    task: Mapping[str, Any],
    transformer: Any,
    *,
    quiet: bool,
    **half_lives: int,
) -> Any:
    """Returns a transformer without the attention of the layers that need it least; lists all.

    Args:
        base: its name, window and length.
        count: number of layers.
        task: whose rows are read.
        transformer: the Hugging Face model.
        quiet: print no list.
        half_lives: see `with_replaced`.

    Raises:
        UserError: it has fewer layers, or see `with_replaced`.
    """
    rows = TASKS.build(dict(task), load_tokenizer(base.checkpoint().tokenizer))
    batch = rows.sample(MEASURED_ROWS, length=base.length)
    weights = token_weights(batch, torch.float32)
    model = open_hugging_face(transformer)
    gains = restorations(model, batch.tokens, batch.targets, weights, base.window)
    if count > len(gains):
        raise UserError(f"{base.name} has {len(gains)} layers: give --replace at most that")
    order = sorted(range(len(gains)), key=gains.__getitem__)
    if not quiet:
        say("nats per token by which full attention in one layer lowers the loss, the least first:")
        say(*(f"    layer {number}: {gains[number]:.4f}" for number in order))
    whole = with_replaced(transformer, sorted(order[:count]), **half_lives)
    setattr(whole.config, REPLACED_KEY, count)
    setattr(whole.config, MEASURED_KEY, gains)
    return whole
