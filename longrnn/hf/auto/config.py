"""The configuration of a `RecurrentLM` as transformers reads it."""

from dataclasses import field
from typing import ClassVar

from transformers import PreTrainedConfig

from longrnn.checkpoints.folder import CHECKPOINT_FORMAT
from longrnn.models.recurrent import RecurrentConfig


class LongRNNConfig(PreTrainedConfig, RecurrentConfig):
    """The content of the `config.json` of a checkpoint of longrnn, as transformers reads it.

    The options are those of `RecurrentConfig`, and these:

    Attributes:
        tokenizer: `bytes`, or the path of a tokenizer, relative to the checkpoint.
        format: version of the checkpoint format.
        mitigation: the spec of a mitigation, such as `sliding_window(window=512)`; None for none.
        use_cache: whether the model returns its state in eval mode.
        num_attention_heads: there are none; PEFT divides the width by their number.
    """

    model_type: ClassVar[str] = "longrnn"
    auto_map: ClassVar[dict[str, str]] = {}  # TRL reads it
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "tie_word_embeddings": "tie_embeddings",
    }

    architectures: list[str] | None = field(default_factory=lambda: ["LongRNNForCausalLM"])
    tokenizer: str = "tokenizer.json"
    format: int = CHECKPOINT_FORMAT
    mitigation: str | None = None
    use_cache: bool = True
    num_attention_heads: int = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
