"""What differs between two configurations: in what they mean, not in how they are written.

An option that is given with its default value and one that is left out mean the same, as do `4k`
and `4096`, and the text and the mapping of a mitigation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from longrnn.cells import MIXERS
from longrnn.config import flat, nested
from longrnn.errors import UserError
from longrnn.mitigations import mitigation
from longrnn.positions import POSITIONS
from longrnn.registry import Registry
from longrnn.tasks import TASKS
from longrnn.training.config import TrainConfig
from longrnn.training.initial_states import INITIAL_STATES

# Mappings with a `kind`, and the registry with the options of each.
FAMILIES: dict[str, Registry[Any]] = {
    "model.position": POSITIONS,
    "model.mixer": MIXERS,
    "task": TASKS,
    "validation": TASKS,
    "initial_state": INITIAL_STATES,
}


def differences(recorded: dict[str, Any], config: TrainConfig, allowed: set[str]) -> str:
    """The keys that differ between a recorded and a given configuration, except `allowed` ones.

    A key that an older record lacks has its default. The model of `init_from` or `transformer` is
    not compared, nor is a tokenizer that comes from `init_from`.
    """
    # Every schedule but `constant` has another learning rate at every step of a longer run.
    skipped = allowed | ({"max_steps"} if config.lr_scheduler_type == "constant" else set())
    skipped |= {"tokenizer"} if config.tokenizer is None else set()
    before = with_defaults(flat(asdict(TrainConfig())) | flat(recorded))
    now = with_defaults(flat(asdict(config)))
    by_model = config.init_from is not None or bool(config.transformer)
    keys = [k for k in {**before, **now} if before.get(k) != now.get(k) and k not in skipped]
    return ", ".join(
        f"{key}: {before.get(key)} there, {now.get(key)} here"
        for key in keys
        if not (by_model and key.split(".")[0] == "model")
    )


def with_defaults(keys: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as dotted keys, with the values of all options that it leaves out.

    Args:
        keys: see `longrnn.config.flat`.
    """
    found = dict(keys)
    for prefix, family in FAMILIES.items():
        found = _completed(found, prefix, family.complete)
    found = _completed(found, "transformer", _whole_transformer)
    return _completed(found, "mitigation", _described)


def _completed(keys: dict[str, Any], prefix: str, complete: Callable[[Any], Any]) -> dict[str, Any]:
    """`keys` with the value at `prefix`, or the mapping below it, completed.

    They stay as they are where they are not valid: an older version may have recorded them.
    """
    below = {key: value for key, value in keys.items() if key.startswith(f"{prefix}.")}
    if not below and keys.get(prefix) is None:
        return keys
    given = nested(below, f"{prefix}.") if below else keys[prefix]
    try:
        whole = complete(given)
    except UserError:
        return keys
    others = {key: value for key, value in keys.items() if key not in below and key != prefix}
    return others | flat(whole, f"{prefix}.")


def _described(spec: Any) -> str | None:
    """A mitigation in the one form that means it; None for none."""
    return None if spec == "none" else mitigation(spec).describe()


def _whole_transformer(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a Hugging Face configuration."""
    from longrnn.hf.training import whole_config

    return whole_config(options).to_dict()
