"""The training loop.

Notable choices:
- Random choices, dropout included, are functions of (seed, step), and everything else is in the
  checkpoint: on a CPU, a run that was interrupted and resumed ends bit for bit where an undisturbed
  one does.
- `Trainer` writes nothing until `train` is called: a dry run is the same set-up and two steps.
- Metrics are summed over processes once per step, together with the request to stop, so that all
  processes stop after the same step.
"""

import math
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

from longrnn import processes
from longrnn.config import RECORDED
from longrnn.console import say
from longrnn.data import TASKS, Batch
from longrnn.errors import DivergedError, Terminated, UserError
from longrnn.models import TrainableLM
from longrnn.progress import Progress
from longrnn.seeds import mix
from longrnn.training import checkpoint, models
from longrnn.training.batches import check_length, check_shards, segments
from longrnn.training.config import TrainConfig
from longrnn.training.distributed import gathered, interrupts, means, prepare, trackers
from longrnn.training.initial_states import INITIAL_STATES, Context
from longrnn.training.objective import StepOutput, objective_class
from longrnn.training.optim import learning_rate, set_learning_rate
from longrnn.training.repeat import check_repeats
from longrnn.training.run import append_metrics
from longrnn.training.validation import Validation
from longrnn.units import counted

# Keys of the configuration that determine which rows a process reads and what their states are.
ROW_KEYS = {
    *("task", "length", "seed", "initial_state", "segments_per_step", "mitigation"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "attention_window"),
}


class MicroBatch(NamedTuple):
    """What a step has done with some of its rows.

    Attributes:
        segments: consecutive segments of the rows, on the CPU.
        output: of the forward pass; its loss has no gradient any more.
    """

    segments: list[Batch]
    output: StepOutput


class Trainer:
    """One run.

    Args:
        config: the run.
        accelerator: of `longrnn.training.distributed.build_accelerator`.
        origin: the checkpoint to continue from; None for a new run.
        quiet: print no progress.

    Raises:
        UserError: the configuration is invalid, or its parts do not fit together.
    """

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        origin: Path | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        self.config, self.accelerator = config, accelerator
        self.output_dir = Path(config.output_dir)
        self.quiet = quiet or not processes.is_main()
        self.tokenizer = models.tokenizer_of(config, origin)
        self.task = TASKS.build(config.task, self.tokenizer)
        torch.manual_seed(config.seed)
        model = models.build(config, self.task, origin)
        model.to(self.accelerator.device).train()
        check_length(self.task, config, model.max_length)
        if config.carries and getattr(self.task, "max_repeat", 1) > 1:
            check_repeats(model)
        self.validation: Validation | None = None
        if isinstance(config.validation, Mapping):
            held_out = TASKS.build(config.validation, self.tokenizer)
            models.check_vocabulary(model.vocab_size, held_out)
            self.validation = Validation(config, model.max_length, self.task, held_out)
        mean: Any = accelerator.reduce  # by default over processes
        context = Context(model.init_state, config.seed, processes.rank(), mean)
        self.starts = INITIAL_STATES.build(config.initial_state, context)
        recomputes = config.gradient_checkpointing == "segment"
        objective = objective_class(config.objective)(model, recomputes=recomputes)
        self.objective, self.optimizer = prepare(accelerator, objective, config)
        check_shards(self.task, config, model)
        self.step = self.tokens = 0
        self.skipped = 0  # steps left out by `nonfinite: skip`
        self.timed_tokens, self.seconds = 0, 0.0  # of the steps since the last row of metrics
        self.pending: dict[str, list[float]] = {}  # values that the next row of metrics averages
        if origin is not None:
            self._restore(origin)

    @property
    def model(self) -> TrainableLM:
        """The model in training."""
        return self.accelerator.unwrap_model(self.objective).model

    def say(self, line: str) -> None:
        """Prints a line, unless quiet."""
        if not self.quiet:
            say(line, error=True)

    def fit_steps(self, minutes: float) -> None:
        """Sets the steps to what fits into a time, by the speed of two steps that train nothing.

        Of fewer steps at most a tenth are those of the warm-up.

        Args:
            minutes: of all processes together.
        """
        seconds = 0.0
        for _ in range(2):  # the first one is slower
            begun = time.monotonic()
            for micro in range(self.config.gradient_accumulation_steps):
                self._forward_backward(micro)
            self.optimizer.zero_grad()
            seconds = time.monotonic() - begun
        steps = processes.on_main(lambda: max(1, int(60 * minutes / seconds)))
        warmup, decay = min(self.config.warmup_steps or 0, steps // 10), self.config.decay_steps
        decay = None if decay is None else min(decay, steps - warmup)
        fitted = {"max_steps": steps, "warmup_steps": warmup, "decay_steps": decay}
        self.config = self.config.model_copy(update=fitted)
        self.say(f"{minutes:.1f} minutes allow {counted(steps, 'step')} of {seconds:.2g} seconds")

    def train_step(self, *, stop: bool = False) -> dict[str, float]:
        """Runs one optimizer step; returns its metrics, and `stop` above 0 to stop all processes.

        A skipped step returns `stop` alone.
        """
        torch.manual_seed(mix(self.config.seed, "step", self.step, processes.rank()))  # of dropout
        set_learning_rate(self.optimizer, self.step, self.config)
        count, limit = self.config.gradient_accumulation_steps, self.config.max_grad_norm
        micro_batches = [self._forward_backward(micro) for micro in range(count)]
        norm = self.accelerator.clip_grad_norm_(self.objective.parameters(), limit)
        gradient = 0.0 if norm is None else float(norm)
        metrics = self._measure(micro_batches, gradient, stop=stop)
        if metrics.pop("nonfinite") > 0:
            self._leave_out()
            return {"stop": metrics["stop"]}
        for micro, (_, output) in enumerate(micro_batches):
            self.starts.after(output.state, micro)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {**metrics, "grad_norm": gradient}

    def _forward_backward(self, micro: int) -> MicroBatch:
        """Adds the gradients of a micro-batch."""
        count = self.config.gradient_accumulation_steps
        on_host = segments(self.task, self.config, self.step, micro)
        on_device = [batch.to(self.accelerator.device) for batch in on_host]
        is_initial = self.starts.is_initial
        start = None if is_initial else self.starts.before(on_device[0], self.step, micro)
        # Gradients are reduced over processes once, after the last micro-batch.
        is_last = micro == count - 1
        with nullcontext() if is_last else self.accelerator.no_sync(self.objective):
            with self.accelerator.autocast():
                output = self.objective(on_device, start)
            self.accelerator.backward(output.loss / count)
        return MicroBatch(on_host, output._replace(loss=output.loss.detach()))

    def _measure(
        self, micro_batches: Sequence[MicroBatch], gradient: float, *, stop: bool
    ) -> dict[str, float]:
        """Counts the tokens of a step, and returns its metrics as means over processes.

        They are the loss, `stop` and `nonfinite`, which are above 0 where a process has reason, and
        the scores of the task in steps that are logged.
        """
        losses = torch.stack([output.loss for _, output in micro_batches]).float().cpu()
        is_finite = math.isfinite(gradient) and bool(losses.isfinite().all())
        flags = {"stop": stop, "nonfinite": not is_finite}
        values = {"loss": [losses]}
        values |= {name: [torch.tensor([flag])] for name, flag in flags.items()}
        is_logged = self._is_due(self.config.logging_steps, self.step + 1)
        for on_host, output in micro_batches:
            self.tokens += sum(batch.tokens.numel() for batch in on_host) * processes.size()
            predictions = output.predictions if is_logged else []
            for batch, predicted in zip(on_host, predictions, strict=False):
                for name, each in self.task.score(predicted.cpu(), batch).items():
                    values.setdefault(name, []).append(each)
        return means(self.accelerator, values)

    def train(self) -> None:
        """Trains to `max_steps`, and writes the final model into `output_dir`.

        Raises:
            KeyboardInterrupt: after Ctrl-C, once the step is finished and saved.
            Terminated: likewise after SIGTERM, or if another process was asked to stop.
            DivergedError: a step is not finite.
        """
        config = self.config
        if reads := self.task.summary(config.length.max):
            self.say(reads)
        left = config.max_steps - self.step
        with (
            trackers(self.accelerator, config),
            interrupts() as received,
            Progress("training", left, unit="tokens", quiet=self.quiet) as progress,
        ):
            while self.step < config.max_steps:
                begun, counted = time.monotonic(), self.tokens
                values = self.train_step(stop=bool(received))
                self.seconds += time.monotonic() - begun
                self.timed_tokens += self.tokens - counted
                self.step += 1
                stop = values.pop("stop") > 0
                for name, value in values.items():
                    self.pending.setdefault(name, []).append(value)
                note = f"loss {values['loss']:.4f}" if "loss" in values else "skipped"
                progress.advance(1, self.tokens - counted, note)
                if self.validation is not None and self._is_due(config.eval_steps, self.step):
                    whole = self.accelerator.unwrap_model(self.objective)
                    self._record(self.validation.evaluate(whole))
                if self._is_due(config.logging_steps, self.step):
                    self._log()
                if stop or self._is_due(config.save_steps, self.step):
                    self._save()
                if stop and self.step < config.max_steps:
                    # SIGTERM, or another process received the signal.
                    kind = KeyboardInterrupt if received[:1] == [signal.SIGINT] else Terminated
                    raise kind(f"{self.output_dir}: step {self.step} is done and saved")
            if self.pending:  # the checkpoint has all steps, the last of which was not logged
                self._log()
            weights = gathered(self.model.state_dict())
            processes.on_main(
                lambda: models.save(self.model, self.output_dir, weights, self.tokenizer)
            )

    def _is_due(self, every: int, step: int) -> bool:
        """Whether a step is one of `every` steps, or the last one."""
        return step % every == 0 or step == self.config.max_steps

    def _leave_out(self) -> None:
        """Leaves a step that is not finite out, or ends the run."""
        self.optimizer.zero_grad()
        self.starts.forget()  # carried states may be the cause, and belong to the step before
        self.skipped += 1
        where = f"step {self.step + 1}: the loss or its gradient is not finite"
        if self.config.nonfinite == "skip":
            self.say(f"warning: {where}, and the step is skipped")
            return
        saved = checkpoint.checkpoints(self.output_dir)
        healthy = f"the last healthy checkpoint is {saved[-1]}" if saved else "no step was saved"
        is_recorded = (self.output_dir / RECORDED).is_file()  # not by a dry run
        resume = f"--resume {self.output_dir} and " if is_recorded else ""
        raise DivergedError(
            f"{where}; {healthy}: go on with {resume}learning_rate="
            f"{self.config.learning_rate / 2:g}, or with nonfinite=skip"
        )

    def _log(self) -> None:
        row = {name: sum(values) / len(values) for name, values in self.pending.items()}
        self.pending = {}
        if self.config.nonfinite == "skip":
            row["skipped"] = self.skipped
        row["learning_rate"] = learning_rate(self.step - 1, self.config)
        if self.seconds:
            row["tokens_per_second"] = self.timed_tokens / self.seconds
        self.timed_tokens, self.seconds = 0, 0.0
        self._record(row)

    def _record(self, values: dict[str, float]) -> None:
        """Adds a row to the metrics of the run."""
        if processes.is_main():
            row = {"step": self.step, "tokens": self.tokens, **values}
            append_metrics(self.output_dir, row)
            self.accelerator.log({k: v for k, v in row.items() if k != "step"}, step=self.step)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, which a checkpoint holds beside weights, optimizer and initial states."""
        # The data may be elsewhere when a run is resumed; its content is compared.
        rows = self.config.model_dump(mode="json", include=ROW_KEYS, exclude={"task": {"data"}})
        counters = {"step": self.step, "tokens": self.tokens, "skipped": self.skipped}
        return counters | {"pending": self.pending, "data": self.task.data_sha256, "rows": rows}

    def _save(self) -> None:
        checkpoint.save(
            self.output_dir,
            self.state_dict(),
            self.model,
            self.optimizer,
            carried=self.starts.content(),
            tokenizer=self.tokenizer,
            keep=self.config.save_total_limit,
        )

    def _restore(self, folder: Path) -> None:
        values, carried = checkpoint.restore(folder, self.model, self.optimizer)
        if values["data"] != self.task.data_sha256:
            raise UserError(
                f"the data is not that which {folder} was trained on: put it back, or start a new "
                f"run from there with init_from={folder}"
            )
        if values["step"] > self.config.max_steps:
            raise UserError(
                f"{folder} has {values['step']} steps, and max_steps={self.config.max_steps} is "
                "less: set at least as many, or continue an earlier checkpoint elsewhere"
            )
        self.step, self.tokens = values["step"], values["tokens"]
        self.pending, self.skipped = values["pending"], values["skipped"]
        if values["rows"] == self.state_dict()["rows"]:
            rows = self.config.per_device_train_batch_size
            with checkpoint.refuse_misfit(folder):
                # A step that was skipped, and no other, leaves nothing.
                if self.starts.remembers and not (carried or self.skipped):
                    raise ValueError("it has no carried states")
                self.starts.restore(carried, rows, self.config.gradient_accumulation_steps)
        elif carried:
            self.say("the rows are not those of the checkpoint: its carried states are not used")
