"""longrnn: recurrent and state-space language models on contexts far beyond their training length.

Names are imported on first use, so that `import longrnn` is fast.

Comments and docstrings give the shapes of tensors in these letters:

| letter | axis |
| --- | --- |
| b | rows of the batch |
| t | tokens (time) |
| i, j | tokens of a chunk: i of the output, j of the input |
| m | chunks of t tokens |
| d | width of the model or of a cell's vector (`d_model`) |
| v | vocabulary |
| h | heads |
| g | groups of heads that share B and C |
| r | heads per group: h = g · r |
| p | channels per head (`head_dim`) |
| n | state size per channel (`d_state`) |
| c | channels of a convolution |
| k | taps of a convolution |

`(r p)` is one axis that combines two, and `…` stands for any axes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longrnn.cells import MIXERS as MIXERS
    from longrnn.checkpoints.load import load as load
    from longrnn.checkpoints.tokenizer import load_tokenizer as load_tokenizer
    from longrnn.data import TASKS as TASKS
    from longrnn.diagnostics.repair import repair as repair
    from longrnn.evaluation.run import evaluate as evaluate
    from longrnn.mitigations import MITIGATIONS as MITIGATIONS
    from longrnn.mitigations import mitigation as mitigation
    from longrnn.models import LanguageModel as LanguageModel
    from longrnn.models import LMOutput as LMOutput
    from longrnn.models import RecurrentConfig as RecurrentConfig
    from longrnn.models import RecurrentLM as RecurrentLM
    from longrnn.models import generate as generate
    from longrnn.positions import POSITIONS as POSITIONS
    from longrnn.state import LMState as LMState
    from longrnn.training.train import train as train

__version__ = "0.1.0"

_HOMES = {
    "longrnn.cells": ["MIXERS"],
    "longrnn.data": ["TASKS"],
    "longrnn.diagnostics.repair": ["repair"],
    "longrnn.evaluation.run": ["evaluate"],
    "longrnn.checkpoints.load": ["load"],
    "longrnn.checkpoints.tokenizer": ["load_tokenizer"],
    "longrnn.mitigations": ["MITIGATIONS", "mitigation"],
    "longrnn.models": ["LMOutput", "LanguageModel", "RecurrentConfig", "RecurrentLM", "generate"],
    "longrnn.positions": ["POSITIONS"],
    "longrnn.state": ["LMState"],
    "longrnn.training.train": ["train"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'longrnn' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
