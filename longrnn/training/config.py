"""What a training run is: the schema of `configs/train/*.yaml`.

Names are those of Hugging Face's training arguments where one exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from longrnn.errors import UserError, nearest
from longrnn.models.recurrent import RecurrentConfig
from longrnn.training.initial_states import uses_lanes
from longrnn.units import check_seed

SAMPLING = ("fixed", "log_uniform")
TRACKERS = ("none", "tensorboard")
NONFINITE = ("stop", "skip")


@dataclass
class LengthConfig:
    """Lengths of the training rows, in tokens.

    Attributes:
        max: the longest.
        min: the shortest, used by `log_uniform`.
        sampling: `fixed` (always the longest) or `log_uniform` (from `min` to the longest).
        grow_steps: steps over which the longest grows, log-linearly, from `min` to `max`; 0 for
            `max` from the first step on.
    """

    max: int = 256
    min: int = 1
    sampling: str = "fixed"
    grow_steps: int = 0


@dataclass
class TrainConfig:
    """One run.

    Attributes:
        output_dir: where checkpoints, metrics and the final model go.
        model: what is built; ignored where `init_from` or `transformer` is given.
        transformer: builds a causal language model of transformers: `{"model_type": "llama",
            "hidden_size": 128, …}`, the options of its configuration. Its rows start from nothing.
        task: `{"kind": name of longrnn.tasks, option: value, …}`; passkey where nothing is said.
        tokenizer: `bytes`, or a path; read by tasks made of text.
        init_from: a checkpoint to start from.
        length: lengths of rows; where a state is carried, `length.max` is that of a segment.
        initial_state: from what rows start: `{"kind": "zero" | "carry" | "pass" | "fitted_noise" |
            "random_noise", option: value, …}`, see `longrnn.training.initial_states`.
        segments_per_step: of truncated BPTT, with a carried state: consecutive segments through
            which gradients go back in one optimizer step; the next step starts from their last
            state, detached.
        per_device_train_batch_size: rows of one process in one micro-batch.
        batch_tokens: where set, rows are reduced so that rows · length stays below it.
        num_processes: where set, any other number of processes is refused.
        optim: `adamw` or `adam`.
        learning_rate_scale: factors of the learning rate by pattern of parameter names, such as
            `{"*.dt_bias": 10}`; where several match, the last counts.
        weight_decay: of matrices, kernels, embeddings; never of A_log, dt_bias, D, norms, biases.
        fill: numbers that parameters are set to before the first step, by pattern, such as
            `{"blocks.0.*.A_log": 3}`; where several match, the last counts.
        freeze: patterns of parameter names that are not trained, such as `["embedding.*"]`.
        lr_scheduler_type: `constant`, `cosine`, or `warmup_stable_decay`.
        max_steps: optimizer steps; a resumed run may change it where the schedule is `constant`.
        warmup_steps: linear warm-up from 0.
        decay_steps: of `warmup_stable_decay`: linear decay to 0 at the end.
        max_grad_norm: norm that the gradient of a step is scaled down to; .inf for none.
        max_grad_value: where set, entries of the gradient are then cut to ± this.
        nonfinite: what to do at a step whose loss or gradient is NaN or infinite: `stop`, or `skip`
            it, with weights and optimizer as if it had not been.
        mixed_precision: `no`, `bf16` or `fp16`.
        save_steps: between checkpoints; the last step always saves.
        save_total_limit: checkpoints kept.
        logging_steps: between rows of metrics.jsonl.
        report_to: `none`, or `tensorboard` for the same rows in `output_dir`/tensorboard too.
    """

    output_dir: str = "runs/train"
    model: RecurrentConfig = field(default_factory=RecurrentConfig)
    transformer: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=lambda: {"kind": "passkey"})
    tokenizer: str = "bytes"
    init_from: str | None = None
    length: LengthConfig = field(default_factory=LengthConfig)
    initial_state: dict[str, Any] = field(default_factory=lambda: {"kind": "zero"})
    segments_per_step: int = 1
    seed: int = 0
    max_steps: int = 1000
    per_device_train_batch_size: int = 16
    batch_tokens: int | None = None
    gradient_accumulation_steps: int = 1
    num_processes: int | None = None
    optim: str = "adamw"
    learning_rate: float = 2e-3
    learning_rate_scale: dict[str, float] = field(default_factory=dict)
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    fill: dict[str, float] = field(default_factory=dict)
    freeze: list[str] = field(default_factory=list)
    lr_scheduler_type: str = "cosine"
    warmup_steps: int = 100
    decay_steps: int = 0
    max_grad_norm: float = 1.0
    max_grad_value: float | None = None
    nonfinite: str = "stop"
    mixed_precision: str = "no"
    save_steps: int = 500
    save_total_limit: int = 2
    logging_steps: int = 20
    report_to: str = "none"

    # Keys of earlier versions, and what to write for them.
    FORMER: ClassVar[dict[str, str]] = {
        "carry": "write initial_state={kind: carry} for true, or initial_state={kind: zero}",
    }

    def __post_init__(self) -> None:
        """Refuses values out of range."""
        positive = ("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps")
        positive += ("save_steps", "save_total_limit", "logging_steps", "segments_per_step")
        for name in positive:
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        check_seed(self.seed)
        if self.learning_rate <= 0 or self.max_grad_norm <= 0:
            raise UserError("learning_rate and max_grad_norm must be above 0")
        if self.max_grad_value is not None and not self.max_grad_value > 0:
            raise UserError(f"max_grad_value must be above 0, not {self.max_grad_value}")
        for pattern, value in self.fill.items():
            if not math.isfinite(value):
                raise UserError(f"fill[{pattern!r}] must be finite, not {value}")
        for pattern, factor in self.learning_rate_scale.items():
            if not 0 < factor < float("inf"):
                raise UserError(
                    f"learning_rate_scale[{pattern!r}] must be above 0 and finite, not {factor}: "
                    "to train nothing of it, name it in freeze"
                )
        if self.length.sampling not in SAMPLING:
            remedy = nearest(self.length.sampling, SAMPLING)
            raise UserError(f"unknown length.sampling {self.length.sampling!r}: {remedy}")
        if not 1 <= self.length.min <= self.length.max:
            raise UserError(
                f"length.min {self.length.min} must be between 1 and length.max {self.length.max}"
            )
        if self.length.grow_steps < 0:
            raise UserError(f"length.grow_steps must be at least 0, not {self.length.grow_steps}")
        self._check_lanes()
        if self.report_to not in TRACKERS:
            raise UserError(
                f"unknown report_to {self.report_to!r}: {nearest(self.report_to, TRACKERS)}"
            )
        if self.nonfinite not in NONFINITE:
            remedy = nearest(self.nonfinite, NONFINITE)
            raise UserError(f"unknown nonfinite {self.nonfinite!r}: {remedy}")
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            raise UserError(f"mixed_precision {self.mixed_precision!r}: use no, bf16 or fp16")

    def _check_lanes(self) -> None:
        """Refuses what lanes cannot have, and what only lanes can have."""
        if not uses_lanes(self.initial_state):
            if self.segments_per_step > 1:
                raise UserError(
                    "segments_per_step above 1 needs rows that go on from segment to segment: set "
                    "initial_state={kind: carry}"
                )
        elif self.length.sampling != "fixed" or self.length.grow_steps or self.batch_tokens:
            raise UserError(
                "with a carried state every row has segments of length.max tokens: leave out "
                "length.sampling, length.grow_steps and batch_tokens"
            )
