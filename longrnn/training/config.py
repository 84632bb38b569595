"""The schema of `configs/train/*.yaml`.

Names are those of Hugging Face's `TrainingArguments` where one exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from longrnn.errors import UserError
from longrnn.models.recurrent import GRANULARITIES, RecurrentConfig
from longrnn.ranges import LARGEST_FLOAT32, check_ranges, choice, count, number, within
from longrnn.training.config_checks import check_features
from longrnn.training.initial_states import uses_streams
from longrnn.units import TokenCount

SAMPLING = ("fixed", "log_uniform")
TRACKERS = ("none", "tensorboard", "wandb", "trackio")
NONFINITE = ("stop", "skip")
ON_SPIKE = ("stop", "rollback", "ignore")
BEST = ("loss", "loss_inside", "loss_longest")
PRECISIONS = ("no", "bf16", "fp16")
# The names of checkpoints have eight digits.
MOST_STEPS = 99_999_999


@dataclass
class LengthConfig:
    """Lengths of the training rows, in tokens.

    Attributes:
        max: the longest row.
        min: the shortest row, used by `log_uniform`.
        sampling: `fixed` (always the longest) or `log_uniform` (from `min` to the longest).
        grow_steps: steps over which the longest row grows, log-linearly, from `min` to `max`; 0 to
            use `max` from the first step on.
    """

    max: TokenCount = count(256)
    min: TokenCount = count(1)
    sampling: str = choice("fixed", SAMPLING)
    grow_steps: int = count(0, at_least=0)


@dataclass
class PeftConfig:
    """Adapters (LoRA) that are trained instead of the weights of `init_from`.

    Attributes:
        r: rank.
        alpha: adapters are scaled by alpha / r.
        targets: last names of the linear modules that get one.
        full: last names of parameters or modules that are trained as a whole, such as `A_log`,
            `dt_bias` and `conv1d`; saved in the adapter.
        merge: whether the merged model is written into `output_dir`/merged at the end.
    """

    r: int = count(8)
    alpha: float = number(16.0, above=0)
    targets: list[str] = field(default_factory=lambda: ["in_proj", "out_proj"])
    full: list[str] = field(default_factory=list)
    merge: bool = False


@dataclass
class TrainConfig:
    """The configuration of one training run.

    Attributes:
        output_dir: where checkpoints, metrics and the final model go.
        model: the recurrent model to build; not given together with `transformer`, nor with
            `init_from`, unless it equals the model of that checkpoint. Loading `init_from` sets it.
        transformer: builds a Hugging Face causal language model: `{"model_type": "llama",
            "hidden_size": 128, …}`, the options of its configuration. Its rows have no initial
            state.
        task: `{"kind": name in longrnn.tasks, option: value, …}`; passkey by default.
        tokenizer: `bytes` or a path; used by tasks that read text. By default that of `init_from`,
            and `bytes` without `init_from`.
        init_from: a checkpoint to start from. Its weights are trained in float32, whatever their
            dtype in the file. A resumed run continues from its own checkpoint and ignores it.
        length: lengths of rows; where a state is carried, `length.max` is that of a segment.
        initial_state: the state from which rows start: `{"kind": "zero" | "carry" | "pass" |
            "fitted_noise" | "random_noise", option: value, …}`, see
            `longrnn.training.initial_states`.
        segments_per_step: with a carried state (truncated BPTT): consecutive segments through
            which the gradient of one optimizer step flows; the next step starts from their last
            state, detached.
        per_device_train_batch_size: rows per process and micro-batch.
        batch_tokens: if set, the number of rows is reduced so that rows · length stays below it.
        num_processes: if set, a launch with another number of processes is refused.
        shard_size: with FSDP2: the processes over which the model is divided; the other processes
            hold copies of these shards (HSDP). By default all.
        optim: `adamw` or `adam`.
        learning_rate_scale: factors of the learning rate by pattern of parameter names, such as
            `{"*.dt_bias": 10}`; the last match counts.
        weight_decay: applies to matrices, kernels and embeddings; never to A_log, dt_bias, D, norms
            and biases.
        fill: values that parameters are set to before the first step, by pattern, such as
            `{"blocks.0.*.A_log": 3}`; the last match counts.
        freeze: patterns of parameter names that are not trained, such as `["embedding.*"]`.
        lr_scheduler_type: `constant`, `linear`, `cosine`, `cosine_with_min_lr`, or
            `warmup_stable_decay`.
        min_lr: of `cosine_with_min_lr`: the learning rate at the end.
        min_lr_rate: instead of `min_lr`: its share of `learning_rate`.
        max_steps: optimizer steps; a resumed run may change it if the schedule is `constant`, and
            `longrnn train --extend-to` raises it with any schedule.
        warmup_steps: linear warm-up from 0; at most `max_steps`.
        decay_steps: of `warmup_stable_decay`: linear decay to 0 at the end, after the warm-up. The
            checkpoint before the decay is kept beside `save_total_limit` others.
        resume_from_checkpoint: a checkpoint of another run, from which this one continues in its
            own `output_dir`, with weights, optimizer and streams. Only the schedule and what does
            not change the model may differ from that run.
        max_grad_norm: gradients of a larger norm are scaled down to it; .inf for no limit.
        max_grad_value: if set, entries of the gradient are then clipped to ± this.
        nonfinite: what to do at a step whose loss or gradient is NaN or infinite: `stop`, or `skip`
            it, which leaves weights and optimizer unchanged.
        mitigation: a mitigation under which the model is trained and validated: a text such as
            `sliding_window(window=8192)`, a mapping with `kind`, or a list. Saved with the model,
            whose evaluation as `CHECKPOINT+trained` applies it.
        peft: trains adapters on `init_from` instead of its weights, see `PeftConfig`.
        on_spike: what to do at a step whose loss is more than `spike_threshold` times the lowest
            running median of the run: `stop`; `rollback` to the newest checkpoint and leave out
            the batches since then; or `ignore`. Such a step never reaches the weights.
        spike_threshold: see `on_spike`; the median counts as at least 0.2 · ln(vocabulary).
        validation: held-out data, as a task: `{"kind": "text", "files": […]}`. Its rows start from
            the zero state. By default there is no validation.
        eval_steps: steps between evaluations; there is one after the last step too.
        eval_length: tokens of a validation row; by default 16 · `length.max`, or as many as the
            model has positions, halved until the validation data has such rows; with prompts and
            answers, so many that a row holds any document.
        eval_samples: number of validation rows.
        per_device_eval_batch_size: validation rows per process at a time.
        metric_for_best_model: `loss` (over all positions), `loss_inside` (those up to
            `length.max`), or `loss_longest` (those of the last `eval_loss_to_N` in the metrics).
        load_best_model_at_end: whether the final model is that of the best evaluation, which is
            saved, and kept beside `save_total_limit` other checkpoints.
        early_stopping_patience: if set, the run ends after so many evaluations without improvement.
        mixed_precision: `no`, `bf16` or `fp16`.
        gradient_checkpointing: what the backward pass computes again instead of keeping it: `no`;
            `block` (or true), each block of the model; or `segment`, all blocks of a segment of
            tokens at once, which keeps only states. Gradients have the same bits in all three.
        save_steps: steps between checkpoints; the last step always saves.
        save_total_limit: number of checkpoints kept.
        logging_steps: steps between rows of metrics.jsonl.
        report_to: `none`, or a tracker that gets the same rows: `tensorboard` (in
            `output_dir`/tensorboard), `wandb` or `trackio`.
        push_to_hub: whether the final model, its card and its metrics are uploaded at the end.
        hub_model_id: where, `organisation/name`; by default the name of `output_dir`.
        hub_private_repo: whether that repository is private, if it is new.
    """

    output_dir: str = "runs/train"
    model: RecurrentConfig | None = None
    transformer: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=lambda: {"kind": "passkey"})
    tokenizer: str | None = None
    init_from: str | None = None
    length: LengthConfig = field(default_factory=LengthConfig)
    initial_state: dict[str, Any] = field(default_factory=lambda: {"kind": "zero"})
    segments_per_step: int = count(1)
    seed: int = count(0, at_least=-(2**63), at_most=2**64 - 1)  # what torch.manual_seed takes
    max_steps: int = count(1000, at_most=MOST_STEPS)
    per_device_train_batch_size: int = count(16)
    batch_tokens: TokenCount | None = count(None)
    gradient_accumulation_steps: int = count(1)
    num_processes: int | None = count(None)
    shard_size: int | None = count(None, at_least=2)
    optim: str = "adamw"
    learning_rate: float = number(2e-3, above=0)
    learning_rate_scale: dict[str, float] = field(
        default_factory=dict,
        metadata=within(above=0, remedy="to train nothing of it, name it in freeze"),
    )
    adam_beta1: float = number(0.9, at_least=0, below=1)
    adam_beta2: float = number(0.95, at_least=0, below=1)
    adam_epsilon: float = number(1e-8, above=0)
    weight_decay: float = number(0.0, at_least=0)
    fill: dict[str, float] = field(
        default_factory=dict,
        metadata=within(at_least=-LARGEST_FLOAT32, at_most=LARGEST_FLOAT32),
    )
    freeze: list[str] = field(default_factory=list)
    lr_scheduler_type: str = "cosine"
    warmup_steps: int = count(100, at_least=0)
    decay_steps: int = count(0, at_least=0)
    min_lr: float | None = number(None, at_least=0)
    min_lr_rate: float | None = number(None, at_least=0, at_most=1)
    resume_from_checkpoint: str | None = None
    max_grad_norm: float = number(1.0, above=0, infinite=True)
    max_grad_value: float | None = number(None, above=0, infinite=True)
    nonfinite: str = choice("stop", NONFINITE)
    mitigation: Any = None
    peft: PeftConfig | None = None
    on_spike: str = choice("stop", ON_SPIKE)
    spike_threshold: float = number(10.0, above=1)
    validation: dict[str, Any] = field(default_factory=dict)
    eval_steps: int = count(500)
    eval_length: TokenCount | None = count(None)
    eval_samples: int = count(16)
    per_device_eval_batch_size: int = count(8)
    metric_for_best_model: str = choice("loss", BEST)
    load_best_model_at_end: bool = False
    early_stopping_patience: int | None = count(None)
    mixed_precision: str = choice("no", PRECISIONS)
    gradient_checkpointing: str = choice("no", GRANULARITIES, true="block")
    save_steps: int = count(500)
    save_total_limit: int = count(2)
    logging_steps: int = count(20)
    report_to: str = choice("none", TRACKERS)
    push_to_hub: bool = False
    hub_model_id: str | None = None
    hub_private_repo: bool = False

    # Keys of earlier versions, and what to write for them.
    FORMER: ClassVar[dict[str, str]] = {
        "carry": "write initial_state={kind: carry} for true, or initial_state={kind: zero}",
    }

    def __post_init__(self) -> None:
        """Refuses values out of range, and keys that contradict one another."""
        check_ranges(self)
        if self.length.min > self.length.max:
            raise UserError(
                f"length.min {self.length.min} must be between 1 and length.max {self.length.max}: "
                "lower length.min, or raise length.max"
            )
        self._check_schedule()
        check_features(self)
        self._check_streams()
        if self.batch_tokens is not None and self.batch_tokens < self.length.max:
            raise UserError(
                f"batch_tokens={self.batch_tokens} is less than one row of length.max="
                f"{self.length.max} tokens: raise batch_tokens, or lower length.max"
            )
        if self.init_from is not None and self.transformer:
            raise UserError(
                f"init_from={self.init_from} brings its own model: leave out transformer"
            )
        if self.transformer and self.model not in (None, RecurrentConfig()):
            raise UserError("transformer already describes the model: leave out model")
        if self.init_from is None:
            self.tokenizer = self.tokenizer or "bytes"
            if not self.transformer:
                self.model = self.model or RecurrentConfig()

    def _check_schedule(self) -> None:
        """Refuses a warm-up or decay that does not fit into the run."""
        if self.warmup_steps > self.max_steps:
            raise UserError(
                f"the warm-up of warmup_steps={self.warmup_steps} is longer than the run of "
                f"max_steps={self.max_steps}: set warmup_steps={self.max_steps // 10} or so"
            )
        if not self.decay_steps:
            return
        if self.lr_scheduler_type != "warmup_stable_decay":
            raise UserError(
                f"decay_steps={self.decay_steps} does not apply to lr_scheduler_type="
                f"{self.lr_scheduler_type}: leave it out, or set "
                "lr_scheduler_type=warmup_stable_decay"
            )
        if self.warmup_steps + self.decay_steps > self.max_steps:
            raise UserError(
                f"warmup_steps={self.warmup_steps} and decay_steps={self.decay_steps} are together "
                f"longer than the run of max_steps={self.max_steps}: set decay_steps="
                f"{self.max_steps - self.warmup_steps} or less"
            )

    def _check_streams(self) -> None:
        """Refuses keys that do not apply to streams, or only apply to streams."""
        if not uses_streams(self.initial_state):
            if self.segments_per_step > 1:
                raise UserError(
                    "segments_per_step above 1 needs rows that continue from segment to "
                    "segment: set initial_state={kind: carry}"
                )
        elif self.length.sampling != "fixed" or self.length.grow_steps or self.batch_tokens:
            raise UserError(
                "with a carried state every row has segments of length.max tokens: leave out "
                "length.sampling, length.grow_steps and batch_tokens"
            )
