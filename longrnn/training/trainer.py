"""The training loop.

Notable choices:
- Random choices are functions of (seed, step), and everything else is in the checkpoint: on a CPU,
  a run that was interrupted and resumed ends bit for bit where an undisturbed one does.
- Metrics are summed over processes once per step, together with the request to stop, so that all
  processes stop after the same step.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from longrnn.errors import UserError
from longrnn.locks import Lock
from longrnn.progress import Progress
from longrnn.state import LMState
from longrnn.tasks import Batch
from longrnn.training import best_model, failures, models, publish, sharding, spikes
from longrnn.training.checks import check_model, check_positions, check_vocabulary
from longrnn.training.components import Component
from longrnn.training.config import TrainConfig
from longrnn.training.data import Source
from longrnn.training.extension import start_of_decay
from longrnn.training.folder import Found, append_metrics, claim, find
from longrnn.training.initial_states import INITIAL_STATES, Context
from longrnn.training.metrics import Sums
from longrnn.training.mitigated import (
    check_initial_state,
    record_mitigation,
    spec_of,
    under,
)
from longrnn.training.models import Trained
from longrnn.training.objective import Objective, StepOutput
from longrnn.training.optim import clip, fill, freeze, learning_rate, set_learning_rate
from longrnn.training.prefetch import Prefetch
from longrnn.training.processes import (
    Interrupts,
    build_accelerator,
    keep_alive,
    on_main,
    start_trackers,
)
from longrnn.training.saver import Saver, SaveSchedule
from longrnn.training.sources import build_task_together
from longrnn.training.spikes import SpikeGuard
from longrnn.training.throughput import Throughput
from longrnn.training.validation import Validation

# Attributes of a trainer that a checkpoint holds, beside weights, optimizer and carried states.
COUNTERS = ("step", "tokens", "pending", "skipped", "skipped_in_a_row")


class Trainer:
    """One run from its configuration to its final model.

    Args:
        config: the run.
        resume: whether to continue from the newest checkpoint in `config.output_dir`.
        quiet: print no progress.
        extend: whether the run in `config.output_dir` had fewer steps; it is resumed.

    Raises:
        UserError: the configuration is invalid, the output folder holds another run, or the number
            of processes is not that of the launch.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        resume: bool = False,
        quiet: bool = False,
        extend: bool = False,
    ) -> None:
        self.config = config
        self.output_dir = Path(config.output_dir)
        self.accelerator = build_accelerator(config)
        self.quiet = quiet or not self.accelerator.is_main_process
        # Held until `train` ends by the main process, the only one that writes shared files.
        self.lock = Lock.of_folder(self.output_dir, instead="choose another output_dir")
        processes = self.accelerator.num_processes
        how = {"resume": resume or extend, "extend": extend, "processes": processes}
        found = on_main(self.accelerator, partial(find, config, self.lock, **how))
        try:
            self._set_up(found)
        except BaseException:
            self.lock.release()
            raise

    def _set_up(self, found: Found) -> None:
        """Builds what trains, refuses what does not fit, and only then writes into the folder."""
        config = self.config
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        origin = found.checkpoint
        if origin is None and config.resume_from_checkpoint is not None:
            origin = Path(config.resume_from_checkpoint)
        config.tokenizer, self.tokenizer = models.tokenizer_of(config, origin)
        build = partial(
            build_task_together,
            self.accelerator,
            tokenizer=self.tokenizer,
            name=config.tokenizer or "",
            quiet=self.quiet,
        )
        self.task = build(config.task)
        self.source = Source(self.task, config, rank, world)
        model = under(self._build_model(origin), config.mitigation)
        record_mitigation(model, self.say)
        objective = Objective(model)
        context = Context(model.init_state, config.seed, rank, world, self.total)
        self.starts = INITIAL_STATES.build(config.initial_state, context)
        check_initial_state(model, config.initial_state["kind"])
        learning_rate(0, config)  # refuses an unknown schedule before anything is written
        fill(model, config.fill)
        freeze(model, config.freeze)
        self.objective, self.optimizer = sharding.prepare(self.accelerator, objective, config)
        self.validation: Validation | None = None
        if config.validation:
            held_out = build(config.validation)
            self.validation = Validation(config, model, self.task, held_out, rank, world)
            check_vocabulary(model.vocab_size, config, self.validation.task)
        self.spikes = SpikeGuard(config, model.vocab_size)
        validations = [self.validation] if self.validation is not None else []
        self.components: list[Component] = [self.spikes, *validations]
        self.source.check()  # likewise a length that the task cannot make
        check_positions(model, self.source)
        on_main(self.accelerator, lambda: claim(config, found))
        self.saver = Saver(config, self.accelerator, self.tokenizer, spec_of(model))
        self.schedule = SaveSchedule(
            self.saver,
            config.save_steps,
            decay_start=start_of_decay(config),
            resumed=found.checkpoint is not None,
        )
        keep_alive(self.accelerator, self.objective)

        self._adapters_checked = False
        self.step = 0
        self.tokens = 0
        self.skipped = self.skipped_in_a_row = 0  # steps skipped by `nonfinite: skip`
        self.pending: dict[str, list[float]] = {}  # values that the next row of metrics averages
        if origin is not None:
            self.restore(origin, branch=found.checkpoint is None)
        n_micro, device = config.gradient_accumulation_steps, self.accelerator.device
        self.throughput = Throughput(model, device, world, config.mixed_precision, self.say)
        self.batches = Prefetch(self.source.segments, n_micro, config.max_steps, device)
        start_trackers(self.accelerator, config, self.step)

    def _build_model(self, found: Path | None) -> Trained:
        torch.manual_seed(self.config.seed)
        model = models.build(self.config, found, say=self.say)
        check_model(model, self.config, self.task)
        model.gradient_checkpointing_enable(self.config.gradient_checkpointing)
        return model.to(self.accelerator.device).train()

    def say(self, line: str) -> None:
        """Prints a line, unless quiet."""
        if not self.quiet:
            print(line, file=sys.stderr)

    def train(self) -> Trained:
        """Trains to `max_steps`, and writes the final model into `output_dir`.

        Raises:
            KeyboardInterrupt: after Ctrl-C, once the step is finished and saved.
            Terminated: likewise after SIGTERM, or if another process was asked to stop.
        """
        try:
            return self._train()
        finally:
            self.batches.close()
            self.lock.release()

    def _train(self) -> Trained:
        config = self.config
        left = 0 if self._ended() else config.max_steps - self.step
        if not self.quiet and (layout := self.source.layout()):
            self.say(layout)
        with (
            Interrupts() as interrupts,
            Progress("training", left, unit="tokens", quiet=self.quiet) as progress,
        ):
            while not self._ended():
                before = self.tokens
                self.throughput.start()
                values = self._train_step(stop=interrupts.received is not None)
                self.throughput.stop()
                stop = values.pop("stop") > 0
                if values.pop("rolled_back", 0.0):
                    if stop:
                        interrupts.leave(f"{self.output_dir}: step {self.step} is done and saved")
                    continue
                self.step += 1
                for name, value in values.items():
                    self.pending.setdefault(name, []).append(value)
                note = f"loss {values['loss']:.4f}" if "loss" in values else "skipped"
                progress.advance(1, self.tokens - before, note)
                improved = best_model.evaluate(self)
                last = self._ended()
                if self.step % config.logging_steps == 0 or last:
                    self._log()
                self.schedule.after_step(
                    self.step,
                    self._save,
                    was_finite="loss" in values,
                    at_once=last or stop or improved,
                    last=last,
                )
                if stop and not last:
                    interrupts.leave(f"{self.output_dir}: step {self.step} is done and saved")
            best_model.load(self)
            self.saver.write_final(self.model)
        publish.finish(self)
        return self.model

    def _ended(self) -> bool:
        """Whether no step comes after those that are done."""
        early = self.validation is not None and self.validation.exhausted
        return early or self.step >= self.config.max_steps

    def _train_step(self, *, stop: bool) -> dict[str, float]:
        """Runs one optimizer step; returns its metrics, and `stop` above 0 to stop all processes.

        A skipped step returns `stop` alone. After a rollback there is `rolled_back`, and `step` is
        that of the checkpoint.
        """
        config, n_micro = self.config, self.config.gradient_accumulation_steps
        set_learning_rate(self.optimizer, self.step, config)
        sums = Sums(stop=torch.tensor([float(stop)]))
        done = self.step + 1
        is_logged = done % config.logging_steps == 0 or done == config.max_steps
        outputs: list[tuple[list[Batch], StepOutput]] = []
        for micro in range(n_micro):
            # Scores and counts read the batch on the host, which needs no copy from the device.
            on_host = self.batches.segments(self.data_step, micro)
            segments, start = self._placed(on_host, micro)
            # Gradients are reduced over processes once, after the last micro-batch.
            wait = micro < n_micro - 1
            sync = self.accelerator.no_sync(self.objective) if wait else nullcontext()
            with sync:
                with self.accelerator.autocast():
                    output = self.objective(segments, start)
                self.accelerator.backward(output.loss / n_micro)
            outputs.append((on_host, output._replace(loss=output.loss.detach())))
        norm = clip(self.accelerator, self.objective, config)
        # Read when the device has been given all this work.
        for on_host, output in outputs:
            sums.add({"loss": output.loss.cpu()[None]})
            for batch, predicted in zip(on_host, output.predictions, strict=True):
                self.tokens += batch.tokens.numel() * self.accelerator.num_processes
                self.throughput.add(batch)
                if is_logged:
                    sums.add(self.task.score(predicted.cpu(), batch))
        if config.peft is not None and not self._adapters_checked:
            models.check_adapters(self.model, self.total)  # at the first step
            self._adapters_checked = True
        was_nonfinite = failures.is_nonfinite(self, norm, sums.pairs["loss"])
        sums.add({"nonfinite": torch.tensor([float(was_nonfinite)])})
        means = sums.means(lambda table: self.total(table.to(self.accelerator.device)))
        if means.pop("nonfinite") > 0:
            failures.discard_step(self)
            return {"stop": means["stop"]}
        if self.spikes.is_spike(means["loss"]):
            spikes.handle(self, means["loss"])
            return {"stop": means["stop"], "rolled_back": 1.0}
        self.spikes.record(means["loss"])
        self.skipped_in_a_row = 0
        for micro, (_, output) in enumerate(outputs):
            self.starts.after(output.state, micro)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return means | {"grad_norm": float(norm if norm is not None else 0.0)}

    def micro_batch(self, micro: int) -> tuple[list[Batch], LMState]:
        """A micro-batch of this step on the device, and its initial state."""
        return self._placed(self.batches.segments(self.data_step, micro), micro)

    def _placed(self, on_host: list[Batch], micro: int) -> tuple[list[Batch], LMState]:
        segments = self.whole_objective().placed(on_host, self.accelerator.device)
        return segments, self.starts.before(segments[0], self.data_step, micro)

    @property
    def data_step(self) -> int:
        """The step whose batches come next: rollbacks leave some out."""
        return self.step + self.spikes.skipped_batches

    def total(self, part: Tensor) -> Tensor:
        """The sum of `part` over processes."""
        return cast(Tensor, self.accelerator.reduce(part, "sum"))

    def _log(self) -> None:
        means = {name: sum(values) / len(values) for name, values in self.pending.items()}
        self.pending = {}
        if self.config.nonfinite == "skip":
            means["skipped"] = self.skipped
        if self.config.on_spike == "rollback":
            means["skipped_batches"] = self.spikes.skipped_batches
        means["learning_rate"] = learning_rate(self.step - 1, self.config)
        self.record(means | self.throughput.row())

    def record(self, values: dict[str, float]) -> None:
        """Adds a row to the metrics of the run."""
        if not self.accelerator.is_main_process:
            return
        row = {"step": self.step, "tokens": self.tokens, **values}
        append_metrics(self.output_dir, row)
        self.accelerator.log({k: v for k, v in row.items() if k != "step"}, step=self.step)

    def whole_objective(self) -> Objective:
        """The objective without its wrapper for several devices."""
        return self.accelerator.unwrap_model(self.objective)

    @property
    def model(self) -> Trained:
        """The model in training."""
        return self.whole_objective().model

    def init_state(self, rows: int) -> LMState:
        """The zero state of `rows` rows."""
        return self.model.init_state(rows)

    def _save(self) -> None:
        failures.check_weights(self)
        counters = {name: getattr(self, name) for name in COUNTERS}
        counters["data"] = self.task.data_sha256()
        counters["components"] = {part.name: part.content() for part in self.components}
        self.saver.save(counters, self.model, self.optimizer, self.starts.content())

    def restore(self, folder: Path, *, branch: bool = False) -> None:
        """Continues from a checkpoint; `branch`: of another run, whose evaluations do not count."""
        counters, carried = self.saver.restore(folder, self.model, self.optimizer)
        if counters["data"] != self.task.data_sha256():
            raise UserError(
                f"the texts that {folder} was trained on have changed: put them back, or start "
                "again in another output_dir"
            )
        for name in COUNTERS:
            setattr(self, name, counters[name])
        self.starts.restore(carried)
        for part in self.components:
            if part is not self.validation or not branch:
                part.restore(counters["components"].get(part.name, {}))
        best_model.restore(self)
