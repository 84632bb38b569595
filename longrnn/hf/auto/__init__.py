"""Registers the classes of longrnn's checkpoints with transformers when it is imported."""

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from longrnn.hf.auto.generation import StateCache as StateCache
from longrnn.hf.auto.hybrid import HybridForCausalLM
from longrnn.hf.auto.model import LongRNNConfig as LongRNNConfig
from longrnn.hf.auto.model import LongRNNForCausalLM as LongRNNForCausalLM

AutoConfig.register("longrnn", LongRNNConfig, exist_ok=True)
AutoModelForCausalLM.register(LongRNNConfig, LongRNNForCausalLM, exist_ok=True)
# Here the Trainer (for label smoothing), pipelines and others look up the name of a class.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES |= {
    "longrnn": LongRNNForCausalLM.__name__,
    "longrnn_hybrid": HybridForCausalLM.__name__,
}
