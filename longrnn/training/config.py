"""The options of a training run: what `configs/train/*.yaml` may hold.

Names are those of Hugging Face's `TrainingArguments` where one exists. Each key is documented here
alone, below it; `longrnn train --help-config` prints these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, FiniteFloat, model_validator

from longrnn.cells import MIXERS
from longrnn.config import flat, load_config, overridden
from longrnn.data import TASKS
from longrnn.errors import UserError, nearest
from longrnn.imports import IMPORTED, refuse_missing
from longrnn.mitigations import mitigation
from longrnn.models import RecurrentConfig
from longrnn.options import Count, Options, Seed, Share, Tokens, validated
from longrnn.positions import POSITIONS
from longrnn.registry import Registry, keyword_options
from longrnn.training.initial_states import INITIAL_STATES

HELD_OUT = "held_out"
# YAML 1.1 reads the word `no` as a boolean.
No = BeforeValidator(lambda value: "no" if value is False else value)
Recomputed = BeforeValidator(lambda value: {True: "block", False: "no"}.get(value, value))
Rate = Annotated[FiniteFloat, Field(ge=0)]
# With the default of every option that is left out.
TaskOptions = Annotated[dict[str, Any], AfterValidator(TASKS.complete)]
StateOptions = Annotated[dict[str, Any], AfterValidator(INITIAL_STATES.complete)]
# Mappings with a `kind`, and the registry with the options of each.
REGISTRIES: dict[str, Registry[Any]] = {
    "model.position": POSITIONS,
    "model.mixer": MIXERS,
    "task": TASKS,
    "validation": TASKS,
    "initial_state": INITIAL_STATES,
}


def _part(value: Any) -> Any:
    if isinstance(value, str) and value != HELD_OUT:
        raise UserError(f"{value!r} is not a task as a mapping: {nearest(value, [HELD_OUT])}")
    return value


def _valid_model(options: dict[str, Any]) -> dict[str, Any]:
    validated(RecurrentConfig, options, "model")
    return options


def _described(given: Any) -> str | None:
    return given if given in (None, "none") else str(mitigation(given))


def _with_imported(recorded: dict[str, list[str]]) -> dict[str, list[str]]:
    return recorded | IMPORTED


class RowLength(Options):
    """The length of training rows."""

    max: Tokens = 256
    """Tokens of a row; of a carried state, of a segment."""


class Adapters(Options):
    """Adapters (LoRA) that are trained instead of the weights of `init_from`; alpha is 2 r."""

    r: Count = 8
    """Rank."""
    targets: list[str] = Field(["in_proj", "out_proj"], min_length=1)
    """Last or whole names of the linear modules that get an adapter, in the architecture of
    `init_from`."""
    full: list[str] = Field([])
    """Last names of parameters or modules that are trained as a whole, such as `A_log`, `dt_bias`
    and `conv1d`; saved in the adapter."""


class TrainConfig(Options, validate_default=True):
    """The configuration of one training run."""

    output_dir: str = Field("runs/train", min_length=1)
    """Where checkpoints, metrics and the final model go."""
    model: Annotated[dict[str, Any], AfterValidator(_valid_model)] = Field({})
    """The recurrent model to build, by the keys of `RecurrentConfig`; `vocab_size` is that of the
    task by default. Not with `init_from`."""
    task: TaskOptions = Field({"kind": "passkey"})
    """What to train on: `{kind: NAME, option: value, …}`."""
    tokenizer: str | None = None
    """`bytes`, a checkpoint or a path; for tasks that read text. By default that of `init_from`, or
    `bytes`."""
    init_from: str | None = None
    """A checkpoint to start from; its weights are trained in float32."""
    length: RowLength = Field(default_factory=RowLength)
    """Lengths of rows."""
    initial_state: StateOptions = Field({"kind": "zero"})
    """From which state rows start: `{kind: zero | learned | carry | pass | fitted_noise |
    random_noise, option: value, …}`; `learned` trains it for `init_from`, whose weights stay."""
    attention_window: Tokens | None = None
    """Only for hybrids: how many tokens attention reads, the last ones; saved with the model. By
    default `length.max` with a carried state, so that no distance is larger than in the first
    segment and memory does not grow; otherwise all tokens of the row."""
    objective: Literal["tokens", "attention", "teacher"] = "tokens"
    """What the loss is: that of the next token; or, of a checkpoint of `longrnn linearize`, the
    share of what the window removes from attention that its memories lack, or the cross-entropy
    with the predictions of the transformer."""
    segments_per_step: Count | Literal["all"] = 1
    """Only with a carried state (truncated BPTT): consecutive segments through which the gradient
    of one step flows; `all`: those of a whole document, one document per row and step."""
    seed: Seed = 0
    """Of the run."""
    max_steps: Annotated[int, Field(ge=1, lt=10**8)] = 1000
    """Optimizer steps."""
    per_device_train_batch_size: Count = 16
    """Rows per process and micro-batch."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches per step."""
    learning_rate: Rate = Field(2e-3, gt=0)
    """The largest learning rate of the schedule."""
    learning_rate_scale: dict[str, Rate] = Field({})
    """Factors of the learning rate by pattern of parameter names, such as `{'*.dt_bias': 10}`; 0
    freezes, and the last match counts."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """Of AdamW; beta1 is 0.9."""
    adam_epsilon: Rate = Field(1e-8, gt=0)
    """Of AdamW."""
    weight_decay: Rate = 0.0
    """Of matrices, kernels and embeddings; not of A_log, dt_bias, D, norms, biases."""
    fill: dict[str, FiniteFloat] = Field({})
    """Values that parameters are set to before the first step, by pattern, such as
    `{'blocks.0.*.A_log': 3}`; the last match counts."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the decay after the warm-up."""
    warmup_steps: int | None = Field(None, ge=0)
    """Linear warm-up from 0; a tenth of the steps by default, and at most 100."""
    decay_steps: Count | None = None
    """The last steps, in which the learning rate decays; before them it is constant (warm-up,
    stable, decay). All steps after the warm-up by default."""
    min_lr_rate: Share = 0.0
    """Learning rate at the end, as a share of `learning_rate`."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Larger gradients are scaled down to this norm; .inf for no limit."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """At a step whose loss or gradient is not finite: stop, or skip it and count."""
    mitigation: Annotated[Any, AfterValidator(_described)] = None
    """A mitigation under which the model is trained and validated, such as
    `sliding_window(window=8192)`, or `none`; saved with the model. By default that of
    `init_from`."""
    peft: Adapters | None = None
    """Trains adapters on `init_from`."""
    validation: Annotated[TaskOptions | Literal["held_out"] | None, BeforeValidator(_part)] = None
    """Held-out data, as a task; or `held_out`: a part of the documents of `task`, which then
    trains on the others. Its rows start from the zero state."""
    eval_steps: Count = 500
    """Steps between validations."""
    eval_length: Tokens | None = None
    """Tokens of a validation row, at most what the model and the data have; by default 16 ·
    `length.max`."""
    eval_samples: Count = 16
    """Validation rows."""
    mixed_precision: Annotated[Literal["no", "bf16"], No] = "no"
    """Dtype of products."""
    gradient_checkpointing: Annotated[Literal["no", "block", "segment"], Recomputed] = "no"
    """Whether the backward pass computes each block, or each segment of a step, again instead of
    keeping its activations. Gradients have the same bits."""
    save_steps: Count = 500
    """Steps between checkpoints."""
    save_total_limit: Count = 2
    """Checkpoints kept."""
    logging_steps: Count = 20
    """Steps between rows of metrics.jsonl."""
    imports: Annotated[dict[str, list[str]], AfterValidator(_with_imported)] = Field({})
    """What `--import` named, and what each module registered. The run records it; a configuration
    that has it needs the same `--import`, as nothing is imported because a file says so."""
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """A tracker that gets the same rows."""

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        """Refuses keys that contradict one another, and divides the documents."""
        if self.validation == HELD_OUT:
            if "part" not in self.task:
                raise UserError(
                    f"validation={HELD_OUT} divides documents, which {self.task['kind']} does not "
                    "have: give another validation, as a mapping {kind: NAME, option: value, …}"
                )
            self.validation = {**self.task, "part": HELD_OUT}
            self.task = {**self.task, "part": "training"}
        stable = self.max_steps - (self.decay_steps or 0)
        if self.warmup_steps is None:
            self.warmup_steps = max(0, min(100, self.max_steps // 10, stable))
        if self.warmup_steps > stable:
            decay = f" with decay_steps={self.decay_steps}" if self.decay_steps else ""
            raise UserError(
                f"warmup_steps={self.warmup_steps}{decay} exceeds max_steps={self.max_steps}: set "
                "fewer, or leave them out"
            )
        if self.gradient_checkpointing == "segment" and self.segments_per_step == 1:
            raise UserError(
                "gradient_checkpointing=segment with segments_per_step=1 would compute the whole "
                "step again: set segments_per_step to all or a number, or choose block"
            )
        if self.segments_per_step != 1 and not self.carries:
            raise UserError(
                f"segments_per_step={self.segments_per_step} needs rows that continue: set "
                "initial_state.kind=carry, or segments_per_step=1"
            )
        if self.objective != "tokens" and self.initial_state["kind"] != "zero":
            raise UserError(
                f"objective={self.objective} compares whole rows: set initial_state.kind=zero"
            )
        if self.init_from is not None and self.model:
            raise UserError(
                f"init_from={self.init_from} brings its own model: leave out the keys of model"
            )
        if self.freezes and (self.init_from is None or self.fill):
            raise UserError(
                "peft and a learned initial state are trained for a checkpoint, whose weights "
                "stay: set init_from to that checkpoint, and leave out fill"
            )
        return self

    @property
    def freezes(self) -> bool:
        """Whether the weights of `init_from` stay, and something added to them is trained."""
        return self.peft is not None or self.learns_state

    @property
    def learns_state(self) -> bool:
        """Whether the initial state is trained."""
        return self.initial_state["kind"] == "learned"

    @property
    def carries(self) -> bool:
        """Whether rows continue from step to step."""
        return INITIAL_STATES[self.initial_state["kind"]].streams


def configured(
    config: TrainConfig | Mapping[str, Any] | str | Path,
    overrides: Sequence[str] = (),
    *,
    source: str = "configuration",
) -> TrainConfig:
    """A configuration with overrides, which drop the options that have no meaning with them.

    A changed kind drops the options that it does not have, rows that do not continue drop
    `segments_per_step`, and fewer steps than those of the warm-up or decay drop these.

    Args:
        config: a configuration, its values, or a file, given by its path or as the name of
            a bundled one.
        overrides: `key=value` with dotted keys.
        source: what errors call it.

    Raises:
        UserError: no such file, or as `longrnn.options.validated`.
    """
    if isinstance(config, TrainConfig):
        if not overrides:
            return config
        config = config.model_dump(mode="json")
    elif isinstance(config, str | Path):
        config, source = load_config(config), str(config)
    values = overridden(config, overrides)
    refuse_missing(values.get("imports", {}), source)
    _drop_meaningless(values, {override.partition("=")[0] for override in overrides})
    return validated(TrainConfig, values, source)


def _drop_meaningless(values: dict[str, Any], given: set[str]) -> None:
    """Removes options that the overrides `given` leave without a meaning, unless they are given.

    Args:
        values: of a configuration, not checked yet.
        given: dotted keys.
    """
    dropped = set()
    for prefix, family in REGISTRIES.items():
        spec: Any = values
        for name in prefix.split("."):
            spec = spec.get(name) if isinstance(spec, dict) else None
        member = family.get(str(spec.get("kind"))) if isinstance(spec, dict) else None
        if member is None:
            continue
        if f"{prefix}.kind" in given:
            for option in spec.keys() - {"kind", *keyword_options(member)}:
                if f"{prefix}.{option}" not in given:
                    del spec[option]
        changed = {prefix, f"{prefix}.kind"} & given
        if family is INITIAL_STATES and changed and not INITIAL_STATES[spec["kind"]].streams:
            dropped.add("segments_per_step")
    steps = values.get("max_steps")
    if "max_steps" in given and isinstance(steps, int):
        for name in ("warmup_steps", "decay_steps"):
            if isinstance(values.get(name), int) and values[name] > steps:
                dropped.add(name)
    for name in dropped - given:
        values.pop(name, None)


def changes(old: TrainConfig, new: TrainConfig) -> list[str]:
    """What differs between two configurations, one line per key."""
    was, becomes = (flat(config.model_dump(mode="json")) for config in (old, new))
    return [
        f"{key}: {was.get(key)} → {becomes.get(key)}"
        for key in {**was, **becomes}
        if was.get(key) != becomes.get(key)
    ]


def config_keys() -> Iterator[tuple[str, str, str]]:
    """All keys with their defaults and meanings."""
    models = {"": TrainConfig, "length.": RowLength, "peft.": Adapters}
    for prefix, model in models.items():
        for name, field in model.model_fields.items():
            default = "" if name == "length" else str(field.get_default())
            yield f"{prefix}{name}", default, " ".join((field.description or "").split())
