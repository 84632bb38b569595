"""The options of a training run: what `configs/train/*.yaml` may hold.

Names are those of Hugging Face's `TrainingArguments` where one exists. Each key is documented here
alone; `longrnn train --help-config` prints this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from longrnn.cells import MIXERS
from longrnn.config import Options, build_config, flat, load_config, overridden
from longrnn.data import TASKS
from longrnn.errors import UserError
from longrnn.mitigations import mitigation
from longrnn.models import RecurrentConfig
from longrnn.positions import POSITIONS
from longrnn.registry import Registry, keyword_options
from longrnn.text import parse_yaml
from longrnn.training.initial_states import INITIAL_STATES
from longrnn.units import TokenCount

HELD_OUT = "held_out"
# YAML 1.1 reads the word `no` as a boolean.
No = BeforeValidator(lambda value: "no" if value is False else value)
Recomputed = BeforeValidator(lambda value: {True: "block", False: "no"}.get(value, value))
Share = Annotated[float, Field(ge=0, le=1)]
# Mappings with a `kind`, and the registry with the options of each.
FAMILIES: dict[str, Registry[Any]] = {
    "model.position": POSITIONS,
    "model.mixer": MIXERS,
    "task": TASKS,
    "validation": TASKS,
    "initial_state": INITIAL_STATES,
}


class Lengths(Options):
    """Lengths of training rows, in tokens."""

    max: TokenCount = Field(
        default=256, description="The longest row; of a carried state, a segment."
    )
    min: TokenCount | None = Field(
        default=None,
        description="Lengths of batches are log-uniform from here to `max`; off by default.",
    )


class Adapters(Options):
    """Adapters (LoRA) that are trained instead of the weights of `init_from`; alpha is 2 r."""

    r: int = Field(8, ge=1, description="Rank.")
    targets: list[str] = Field(
        ["in_proj", "out_proj"],
        min_length=1,
        description="Last names of the linear modules that get an adapter.",
    )
    full: list[str] = Field(
        [],
        description="Last names of parameters or modules that are trained as a whole, such as "
        "`A_log`, `dt_bias` and `conv1d`; saved in the adapter.",
    )


class TrainConfig(Options):
    """The configuration of one training run."""

    output_dir: str = Field(
        "runs/train", description="Where checkpoints, metrics and the final model go."
    )
    model: dict[str, Any] = Field(
        {},
        description="The recurrent model to build, by the keys of `RecurrentConfig`; `vocab_size` "
        "is that of the task by default. Not with `init_from`.",
    )
    task: dict[str, Any] = Field(
        {"kind": "passkey"}, description="What to train on: `{kind: NAME, option: value, …}`."
    )
    tokenizer: str | None = Field(
        None,
        description="`bytes`, a checkpoint or a path; for tasks that read text. By default that of "
        "`init_from`, or `bytes`.",
    )
    init_from: str | None = Field(
        None, description="A checkpoint to start from; its weights are trained in float32."
    )
    length: Lengths = Field(default_factory=Lengths, description="Lengths of rows.")
    initial_state: dict[str, Any] = Field(
        {"kind": "zero"},
        description="From which state rows start: `{kind: zero | carry | pass | fitted_noise | "
        "random_noise, option: value, …}`.",
    )
    segments_per_step: int = Field(
        1,
        ge=1,
        description="With a carried state (truncated BPTT): consecutive segments through which the "
        "gradient of one step flows.",
    )
    seed: int = Field(0, ge=-(2**63), lt=2**64, description="Of the run.")
    max_steps: int = Field(1000, ge=1, lt=10**8, description="Optimizer steps.")
    per_device_train_batch_size: int = Field(
        16, ge=1, description="Rows per process and micro-batch."
    )
    gradient_accumulation_steps: int = Field(1, ge=1, description="Micro-batches per step.")
    learning_rate: float = Field(2e-3, gt=0, allow_inf_nan=False, description="The largest one.")
    learning_rate_scale: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        {},
        description="Factors of the learning rate by pattern of parameter names, such as "
        "`{'*.dt_bias': 10}`; 0 freezes, and the last match counts.",
    )
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="Of AdamW; beta1 is 0.9.")
    adam_epsilon: float = Field(1e-8, gt=0, allow_inf_nan=False, description="Of AdamW.")
    weight_decay: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Of matrices, kernels and embeddings; not of A_log, dt_bias, D, norms, biases.",
    )
    fill: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        {},
        description="Values that parameters are set to before the first step, by pattern, such as "
        "`{'blocks.0.*.A_log': 3}`; the last match counts.",
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="Shape of the decay after the warm-up."
    )
    warmup_steps: int | None = Field(
        None,
        ge=0,
        description="Linear warm-up from 0; a tenth of the steps by default, and at most 100.",
    )
    decay_steps: int | None = Field(
        None,
        ge=1,
        description="The last steps, in which the learning rate decays; before them it is constant "
        "(warm-up, stable, decay). All steps after the warm-up by default.",
    )
    min_lr_rate: Share = Field(
        0.0, description="Learning rate at the end, as a share of the largest one."
    )
    max_grad_norm: float = Field(
        1.0, gt=0, description="Larger gradients are scaled down to this norm; .inf for no limit."
    )
    nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="At a step whose loss or gradient is not finite: stop, or skip it and count.",
    )
    mitigation: Any = Field(
        None,
        description="A mitigation under which the model is trained and validated, such as "
        "`sliding_window(window=8192)`; saved with the model.",
    )
    peft: Adapters | None = Field(None, description="Trains adapters on `init_from`.")
    validation: dict[str, Any] | Literal["held_out"] | None = Field(
        None,
        description="Held-out data, as a task; or `held_out`: the tail of the documents of `task`, "
        "which then trains on the others. Its rows start from the zero state.",
    )
    eval_steps: int = Field(500, ge=1, description="Steps between validations.")
    eval_length: TokenCount | None = Field(
        None,
        description="Tokens of a validation row; by default 16 · `length.max`, halved until the "
        "model has so many positions and the data such rows.",
    )
    eval_samples: int = Field(16, ge=1, description="Validation rows.")
    best_model: Literal["no", "loss", "loss_inside", "loss_longest"] = Field(
        "no",
        description="Ends with the weights of the best validation: by the loss over all positions, "
        "those up to `length.max`, or those of the last `eval_loss_to_N` in the metrics.",
    )
    mixed_precision: Literal["no", "bf16"] = Field("no", description="Dtype of products.")
    gradient_checkpointing: Literal["no", "block", "segment"] = Field(
        "no",
        description="What the backward pass computes again instead of keeping it: each block, or "
        "all blocks of a segment of tokens at once. Gradients have the same bits.",
    )
    save_steps: int = Field(500, ge=1, description="Steps between checkpoints.")
    save_total_limit: int = Field(2, ge=1, description="Checkpoints kept, beside the best one.")
    logging_steps: int = Field(20, ge=1, description="Steps between rows of metrics.jsonl.")
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = Field(
        "none", description="A tracker that gets the same rows."
    )

    _no = field_validator("mixed_precision", "best_model", mode="before")(No.func)
    _recomputed = field_validator("gradient_checkpointing", mode="before")(Recomputed.func)

    @field_validator("model")
    @classmethod
    def _check_model(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value:
            build_config(RecurrentConfig, value, source="model")
        return value

    @field_validator("initial_state")
    @classmethod
    def _complete(cls, value: dict[str, Any]) -> dict[str, Any]:
        return INITIAL_STATES.complete(value)

    @field_validator("mitigation")
    @classmethod
    def _described(cls, value: Any) -> str | None:
        return None if value in (None, "none") else mitigation(value).describe()

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        """Refuses keys that contradict one another, and completes the tasks."""
        if self.validation == HELD_OUT:
            self.validation = {**self.task, "part": HELD_OUT}
            self.task = {**self.task, "part": "training"}
        self.task = TASKS.complete(self.task)
        if self.validation is not None:
            assert isinstance(self.validation, dict)
            self.validation = TASKS.complete(self.validation)
        if self.warmup_steps is None:
            self.warmup_steps = min(100, self.max_steps // 10)
        warmup, decay = self.warmup_steps, self.decay_steps or 0
        if warmup + decay > self.max_steps:
            raise UserError(
                f"warmup_steps={warmup} and decay_steps={decay} are together longer than "
                f"max_steps={self.max_steps}: lower them, such as warmup_steps="
                f"{min(warmup, self.max_steps // 10)}"
            )
        if self.length.min is not None and self.length.min > self.length.max:
            raise UserError(
                f"length.min={self.length.min} is above length.max={self.length.max}: lower it"
            )
        if not self.carries and self.segments_per_step > 1:
            raise UserError(
                "segments_per_step above 1 needs rows that continue from segment to segment: set "
                "initial_state={kind: carry}"
            )
        if self.carries and self.length.min is not None:
            raise UserError(
                "with a carried state every row has segments of length.max tokens: leave out "
                "length.min"
            )
        if self.carries and not TASKS[self.task["kind"]].carries:
            raise UserError(
                f"the task {self.task['kind']!r} has no documents longer than one row: train it "
                "with initial_state={kind: zero}"
            )
        if self.init_from is not None and self.model:
            raise UserError(
                f"init_from={self.init_from} brings its own model: leave out the keys of model"
            )
        if self.peft is not None and (self.init_from is None or self.fill):
            raise UserError(
                "peft trains adapters of a checkpoint, whose weights stay: set init_from to that "
                "checkpoint, and leave out fill"
            )
        if self.best_model != "no" and self.validation is None:
            raise UserError(
                f"best_model={self.best_model} needs validations: set validation, such as held_out"
            )
        return self

    @property
    def carries(self) -> bool:
        """Whether rows continue from step to step."""
        return INITIAL_STATES[self.initial_state["kind"]].streams


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads a training configuration; a changed kind drops the options that it does not have.

    Raises:
        UserError: no such file, or as `longrnn.config.build_config`.
    """
    return with_overrides(load_config(path), overrides, source=str(path))


def configured(
    config: TrainConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str]
) -> TrainConfig:
    """A configuration, its values, or the path or name of a file, with overrides."""
    if isinstance(config, str | Path):
        return read_config(config, overrides)
    values = config.model_dump(mode="json") if isinstance(config, TrainConfig) else dict(config)
    return with_overrides(values, overrides)


def with_overrides(
    values: dict[str, Any], overrides: Sequence[str], *, source: str = "configuration"
) -> TrainConfig:
    """A configuration of nested values with `key=value` overrides, see `read_config`."""
    given = {override.partition("=")[0] for override in overrides}
    result = overridden(values, overrides)
    for prefix, family in FAMILIES.items():
        spec = result
        for name in prefix.split("."):
            spec = spec.get(name) if isinstance(spec, dict) else None
        if f"{prefix}.kind" in given and isinstance(spec, dict) and spec.get("kind") in family:
            known = {"kind", *keyword_options(family[spec["kind"]])}
            for option in [one for one in spec if one not in known]:
                if f"{prefix}.{option}" not in given:
                    del spec[option]
    return build_config(TrainConfig, result, source=source)


def changes(before: TrainConfig, now: TrainConfig) -> list[str]:
    """What differs between two configurations, one line per key."""
    old, new = (flat(one.model_dump(mode="json")) for one in (before, now))
    return [
        f"{key}: {old.get(key)} → {new.get(key)}"
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]


def split_values(text: str) -> list[str]:
    """The values of `1e-3,3e-4`; a YAML list or mapping is one value."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    for part in parts:
        parse_yaml(part)
    return parts


def help_config() -> str:
    """All keys with their defaults and meanings, as Markdown."""
    lines = ["| key | default | meaning |", "| --- | --- | --- |"]

    def add(model: type[Options], prefix: str) -> None:
        for name, field in model.model_fields.items():
            inner = {"length": Lengths, "peft": Adapters}.get(prefix + name)
            default = "" if name == "length" else f"`{field.get_default()}`"
            text = (field.description or "").replace("|", "\\|")
            lines.append(f"| `{prefix}{name}` | {default} | {text} |")
            if inner is not None:
                add(inner, f"{prefix}{name}.")

    add(TrainConfig, "")
    return "\n".join(lines) + "\n"
