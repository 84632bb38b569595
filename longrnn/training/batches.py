"""The batches of a run: functions of its configuration, the step and the process alone."""

from longrnn import processes
from longrnn.data import Batch, Task, Text
from longrnn.errors import UserError
from longrnn.models import TrainableLM
from longrnn.training.config import TrainConfig


def segments(task: Task, config: TrainConfig, step: int, micro: int) -> list[Batch]:
    """The rows of this process for one micro-batch of a step, on the CPU.

    Consecutive segments of carried rows, `segments_per_step` of them or those of whole documents,
    or one batch of independent rows. The batch of all processes does not depend on their number.
    Carried rows are numbered over all micro-batches and processes, and stay in their process.
    """
    world, n_micro = processes.size(), config.gradient_accumulation_steps
    rows, count = config.per_device_train_batch_size, config.segments_per_step
    how = {"length": config.length.max, "seed": config.seed}
    if config.carries and count != "all":
        first, of = (micro * world + processes.rank()) * rows, n_micro * world * rows
        here = range(first, first + rows)
        indices = range(step * count, (step + 1) * count)
        return [task.batch(index, here, of=of, carried=True, **how) for index in indices]
    first, of, index = processes.rank() * rows, world * rows, step * n_micro + micro
    here = range(first, first + rows)
    if count == "all":
        return task.documents(index, here, of=of, **how)
    return [task.batch(index, here, of=of, carried=False, **how)]


def check_length(task: Task, config: TrainConfig, positions: int | None) -> None:
    """Refuses rows that the task cannot make, or that exceed the positions of the model.

    Raises:
        UserError: such rows.
    """
    if config.carries and not task.carries:
        raise UserError(
            f"the task {type(task).__name__} has no documents longer than one row: train it "
            "with initial_state={kind: zero}"
        )
    if isinstance(task, Text) and not task.answers and config.length.max > task.corpus.places:
        raise UserError(
            f"length.max is {config.length.max:,}, and all documents together have "
            f"{task.corpus.places:,} tokens to predict: set length.max to at most that, or give "
            "more text"
        )
    longest = segments(task, config, 0, 0)[0].tokens.shape[1]
    if positions is not None and (config.carries or positions < longest):
        rows = "documents of any length" if config.carries else f"rows of {longest} tokens"
        raise UserError(
            f"the model has {positions} positions and this run has {rows}: set a larger "
            "model.position.max_length, lower length.max, or use model.position={kind: sinusoidal}"
        )


def check_shards(task: Task, config: TrainConfig, model: TrainableLM) -> None:
    """Refuses rows of which a sharded model would read one stretch after another.

    Raises:
        UserError: rows of several documents, each of which begins with an initial state.
    """
    if not isinstance(task, Text) or config.segments_per_step == "all" or model.start is None:
        return
    if model.is_sharded and (config.carries or len(task.corpus.lengths) > 1):
        raise UserError(
            "a sharded model cannot read rows of several documents with an initial state, because "
            "its processes must call its blocks equally often: launch without shards (cpu2, gpu8)"
        )
