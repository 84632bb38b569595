"""Small `LongRNNForCausalLM` models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from longrnn import mitigation
from longrnn.hf.auto import LongRNNConfig, LongRNNForCausalLM
from tests.contracts.builders import build_model


def build_auto(mixer: str | dict[str, Any] = "mamba2", *, seed: int = 0, **options: Any) -> Any:
    """A model with the weights of `build_model`; `config` options of `LongRNNConfig` in `auto`."""
    auto = options.pop("auto", {})
    if auto.get("mitigation") is not None:
        auto = auto | {"mitigation": str(mitigation(auto["mitigation"]))}
    own = build_model(mixer, dtype=options.pop("dtype", torch.float32), seed=seed, **options)
    model: Any = LongRNNForCausalLM(LongRNNConfig(**asdict(own.config), **auto))
    model.to(own.embedding.weight.dtype)
    model.model.load_state_dict(own.state_dict())
    return model.eval()
