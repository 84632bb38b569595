"""longrnn's models as `AutoModelForCausalLM`: configuration, cache and model.

`import longrnn` arranges for their registration with transformers (`longrnn.hf.register`). The
classes are imported on first use: the configuration is registered while transformers itself is
being imported, when the base class of the model does not exist yet.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longrnn.hf.auto.cache import StateCache as StateCache
    from longrnn.hf.auto.config import LongRNNConfig as LongRNNConfig
    from longrnn.hf.auto.model import LongRNNForCausalLM as LongRNNForCausalLM

_HOMES = {
    "LongRNNConfig": "longrnn.hf.auto.config",
    "LongRNNForCausalLM": "longrnn.hf.auto.model",
    "StateCache": "longrnn.hf.auto.cache",
}

__all__ = ["LongRNNConfig", "LongRNNForCausalLM", "StateCache"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'longrnn.hf.auto' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
