"""longrnn's models as `AutoModelForCausalLM`: configuration, cache and model.

`import longrnn` arranges for their registration with transformers (`longrnn.hf.register`).
"""

from longrnn.hf.auto.cache import StateCache
from longrnn.hf.auto.config import LongRNNConfig
from longrnn.hf.auto.model import LongRNNForCausalLM

__all__ = ["LongRNNConfig", "LongRNNForCausalLM", "StateCache"]
