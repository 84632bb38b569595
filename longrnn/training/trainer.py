"""The training loop.

Notable choices:
- Everything random is a function of (seed, step), everything else is in the checkpoint: a run that
  was interrupted and resumed on a CPU ends bit for bit where an undisturbed one ends.
- What is logged is summed over processes once per step, together with the wish to stop, so that
  all processes stop after the same step.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from longrnn.config import dump_config, flat
from longrnn.errors import UserError
from longrnn.files import write_atomic
from longrnn.hf.loading import load
from longrnn.hf.tokenizer import HFTokenizer, load_tokenizer
from longrnn.models.checkpoint import load_model, save_model
from longrnn.models.recurrent import RecurrentLM
from longrnn.progress import Progress
from longrnn.state import LMState, detach, reset, tree_map
from longrnn.tasks import TASKS, Batch
from longrnn.training import checkpoint, sharding
from longrnn.training.config import TrainConfig
from longrnn.training.data import Source
from longrnn.training.objective import Objective
from longrnn.training.optim import freeze, learning_rate, set_learning_rate
from longrnn.training.processes import Interrupts, build_accelerator, start_trackers

# Keys that may change between the parts of one run without changing what it computes so far.
HARMLESS = {"output_dir", "save_steps", "save_total_limit", "logging_steps", "num_processes"}
HARMLESS |= {"report_to"}


class Trainer:
    """One run from its configuration to its final model.

    Args:
        config: the run.
        resume: whether to go on from the newest checkpoint in `config.output_dir`.
        quiet: write no progress.

    Raises:
        UserError: a configuration that does not fit, an output folder of another run, or another
            number of processes than was launched.
    """

    def __init__(self, config: TrainConfig, *, resume: bool = False, quiet: bool = False) -> None:
        self.config = config
        self.output_dir = Path(config.output_dir)
        self.accelerator = build_accelerator(config)
        self.tokenizer = load_tokenizer(config.tokenizer)
        self.task = TASKS.build(config.task, self.tokenizer)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        self.source = Source(self.task, config, rank, world)
        model = self._build_model()
        self.quiet = quiet or not self.accelerator.is_main_process
        learning_rate(0, config)  # an unknown schedule is refused before anything is written
        freeze(model, config.freeze)
        objective = Objective(model)
        self.objective, self.optimizer = sharding.prepare(self.accelerator, objective, config)
        self.source.check()  # as is a length that the task cannot make
        self._check_positions(model)
        if resume:
            checkpoint.check_steps(self.output_dir, config.max_steps)
        if self.accelerator.is_main_process:
            text = dump_config(config)
            checkpoint.claim(self.output_dir, text, resume=resume, differs=self._differs)
        self.accelerator.wait_for_everyone()

        self.step = 0
        self.tokens = 0
        self.pending: dict[str, list[float]] = {}  # what the next row of metrics averages
        rows = config.per_device_train_batch_size
        first = model.init_state(rows)
        self.states = [first] * config.gradient_accumulation_steps
        if resume:
            self._restore()
        start_trackers(self.accelerator, config, self.step)

    def _build_model(self) -> RecurrentLM:
        torch.manual_seed(self.config.seed)
        if self.config.init_from is None:
            model = RecurrentLM(self.config.model)
        else:
            model = load(self.config.init_from)
            self.config.model = model.config
        if model.vocab_size < self.task.vocab_size:
            raise UserError(
                f"the task uses {self.task.vocab_size} token ids and the model has "
                f"{model.vocab_size}: set model.vocab_size={self.task.vocab_size}"
            )
        return model.to(self.accelerator.device).train()

    def _check_positions(self, model: RecurrentLM) -> None:
        """Refuses a table of positions that ends before the rows or documents of the run."""
        there, needed = model.position.n_positions, self.source.longest()
        if there is not None and there < needed:
            raise UserError(
                f"the model has {there} positions and this run may reach {needed}: set "
                f"model.position.max_length={needed}, lower length.max, or use "
                "model.position={kind: sinusoidal}"
            )

    def train(self) -> RecurrentLM:
        """Runs to `max_steps`, and writes the final model into `output_dir`.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when the step was finished and saved.
        """
        config = self.config
        left = config.max_steps - self.step
        with (
            Interrupts() as interrupts,
            Progress("training", left, unit="tokens", quiet=self.quiet) as progress,
        ):
            while self.step < config.max_steps:
                begun, before = time.monotonic(), self.tokens
                values = self._train_step(stop=interrupts.asked)
                stop = values.pop("stop") > 0
                self.step += 1
                for name, value in values.items():
                    self.pending.setdefault(name, []).append(value)
                progress.advance(1, self.tokens - before, f"loss {values['loss']:.4f}")
                last = self.step == config.max_steps
                if self.step % config.logging_steps == 0 or last:
                    self._log((self.tokens - before) / (time.monotonic() - begun))
                if self.step % config.save_steps == 0 or last or stop:
                    self._save()
                if stop and not last:
                    raise KeyboardInterrupt
        model = self.accelerator.unwrap_model(self.objective).model
        weights = sharding.gathered(model.state_dict())
        if self.accelerator.is_main_process:
            self._write_model(model, weights, self.output_dir)
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()
        return model

    def _train_step(self, *, stop: bool) -> dict[str, float]:
        """One optimizer step; returns what to log, and `stop` above 0 if any process wishes it."""
        config, n_micro = self.config, self.config.gradient_accumulation_steps
        set_learning_rate(self.optimizer, self.step, config)
        sums: dict[str, Tensor] = {"stop": torch.tensor([float(stop), 1.0])}  # of values, of counts
        for micro in range(n_micro):
            batch = self.source.batch(self.step, micro).to(self.accelerator.device)
            # Gradients are reduced over processes once, with the last micro-batch.
            wait = micro < n_micro - 1
            sync = self.accelerator.no_sync(self.objective) if wait else nullcontext()
            with sync:
                with self.accelerator.autocast():
                    output = self.objective(batch, self._initial_state(batch, micro))
                self.accelerator.backward(output.loss / n_micro)
            if config.carry:
                self.states[micro] = detach(output.state)
            self.tokens += batch.tokens.numel() * self.accelerator.num_processes
            parts = {"loss": output.loss.detach().cpu()[None]}
            parts |= self.task.score(output.predictions.cpu(), batch.to(torch.device("cpu")))
            for name, values in parts.items():
                pair = torch.tensor([float(values.sum()), float(len(values))])
                sums[name] = sums.get(name, torch.zeros(2)) + pair
        norm = self.accelerator.clip_grad_norm_(self.objective.parameters(), config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        table = torch.stack(list(sums.values())).to(self.accelerator.device)
        totals = cast(Tensor, self.accelerator.reduce(table, "sum")).tolist()
        means = {n: t / count for n, (t, count) in zip(sums, totals, strict=True) if count}
        return means | {"grad_norm": float(norm if norm is not None else 0.0)}

    def _initial_state(self, batch: Batch, micro: int) -> LMState:
        model = self.accelerator.unwrap_model(self.objective).model
        zero = model.init_state(len(batch.tokens))
        return reset(self.states[micro], zero, batch.fresh) if self.config.carry else zero

    def _log(self, rate: float) -> None:
        means = {name: sum(values) / len(values) for name, values in self.pending.items()}
        self.pending = {}
        if not self.accelerator.is_main_process:
            return
        row = {
            "step": self.step,
            **means,
            "learning_rate": learning_rate(self.step - 1, self.config),
            "tokens": self.tokens,
            "tokens_per_second": rate,
        }
        with open(self.output_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        self.accelerator.log({k: v for k, v in row.items() if k != "step"}, step=self.step)

    def _save(self) -> None:
        folder = checkpoint.partial(self.output_dir, self.step)
        rank = self.accelerator.process_index
        carried = [tuple(state) for state in self.states] if self.config.carry else []
        plain = tree_map(lambda leaf: leaf.cpu(), _plain(carried))
        checkpoint.write_tensors(folder / f"carry-{rank}.pt", plain)
        model = self.accelerator.unwrap_model(self.objective).model
        weights = sharding.gathered(model.state_dict())
        optimizer = sharding.gathered(self.optimizer.state_dict())
        if self.accelerator.is_main_process:
            self._write_model(model, weights, folder)
            content = {
                "step": self.step,
                "tokens": self.tokens,
                "pending": self.pending,
                "world_size": self.accelerator.num_processes,
                "optimizer": optimizer,
                "random": torch.get_rng_state(),
            }
            checkpoint.write_tensors(folder / "training.pt", content)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            checkpoint.publish(self.output_dir, self.step, self.config.save_total_limit)
        self.accelerator.wait_for_everyone()

    def _write_model(self, model: RecurrentLM, weights: dict[str, Tensor], folder: Path) -> None:
        """A checkpoint with its tokenizer, so that it can be moved."""
        if isinstance(self.tokenizer, HFTokenizer):
            save_model(model, folder, tokenizer="tokenizer.json", weights=weights)
            self.tokenizer.save(folder)
        else:
            save_model(model, folder, weights=weights)

    def _restore(self) -> None:
        found = checkpoint.checkpoints(self.output_dir)
        if not found:
            self._cut_metrics(0)
            return
        folder = found[-1]
        content = checkpoint.read_tensors(folder / "training.pt")
        world = self.accelerator.num_processes
        if content["world_size"] != world:
            raise UserError(
                f"{folder} was written by {content['world_size']} processes and this run has "
                f"{world}: launch as many as before"
            )
        model = self.accelerator.unwrap_model(self.objective).model
        weights = load_model(folder).state_dict()
        model.load_state_dict(sharding.sharded_weights(weights, model.state_dict()))
        saved = sharding.sharded_optimizer(content["optimizer"], self.optimizer)
        self.optimizer.load_state_dict(saved)
        torch.set_rng_state(content["random"])
        self.step, self.tokens = content["step"], content["tokens"]
        self.pending = content["pending"]
        if self.config.carry:
            rank = self.accelerator.process_index
            saved = checkpoint.read_tensors(folder / f"carry-{rank}.pt")
            self.states = [_refill(s, v) for s, v in zip(self.states, saved, strict=True)]
        self._cut_metrics(self.step)

    def _cut_metrics(self, step: int) -> None:
        """Drops the rows of steps that will be run again."""
        path = self.output_dir / "metrics.jsonl"
        if not (self.accelerator.is_main_process and path.is_file()):
            return
        lines = path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        write_atomic(path, "".join(r for r in whole if json.loads(r)["step"] <= step))

    def _differs(self, recorded: str) -> str:
        """Which keys of a recorded configuration differ from this run's, harmless ones left out."""
        import yaml

        before, now = flat(yaml.safe_load(recorded)), flat(asdict(self.config))
        keys = [k for k in {**before, **now} if before.get(k) != now.get(k)]
        # Every schedule but `constant` has another learning rate at every step of a longer run.
        length = {"max_steps"} if self.config.lr_scheduler_type == "constant" else set()
        return ", ".join(
            f"{key}: {before.get(key)} there, {now.get(key)} here"
            for key in keys
            if key not in HARMLESS | length
        )


def _plain(tree: Any) -> Any:
    """Named tuples as lists, which a safe unpickler reads."""
    return [_plain(item) for item in tree] if isinstance(tree, (tuple, list)) else tree


def _refill(like: Any, values: Any) -> Any:
    """The structure of `like` with the tensors of `values` (as `_plain` made them)."""
    if isinstance(like, tuple):
        branches = [_refill(a, b) for a, b in zip(like, values, strict=True)]
        return type(like)(*branches) if hasattr(like, "_fields") else tuple(branches)
    return values.to(like.device)
