"""`LongRNNConfig`: the configuration of a `LongRNNForCausalLM`."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from longrnn.config import build_config
from longrnn.mitigations import mitigation
from longrnn.models.checkpoint import FORMAT
from longrnn.models.recurrent import RecurrentConfig

# Hugging Face names of options of `RecurrentConfig`.
NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "tie_word_embeddings": "tie_embeddings",
}
OPTIONS = tuple(option.name for option in fields(RecurrentConfig))


@strict
class LongRNNConfig(PreTrainedConfig):
    """The content of the `config.json` of a checkpoint of longrnn, as transformers reads it.

    The options of `RecurrentConfig` may be given by name, and are kept in `config`:
    `LongRNNConfig(vocab_size=256, d_model=128, n_layers=2, mixer={"kind": "gru"})`.

    Attributes:
        config: the options of `RecurrentConfig`; missing ones have their defaults.
        tokenizer: `bytes`, or the path of a tokenizer, relative to the checkpoint.
        format: version of the checkpoint format.
        mitigation: what `longrnn.mitigation` takes as text or mapping; None for none.
        use_cache: whether the model returns its state in eval mode.
    """

    model_type: ClassVar[str] = "longrnn"
    auto_map: ClassVar[dict[str, str]] = {}  # TRL reads it

    config: dict[str, Any] | None = None
    tokenizer: str = "tokenizer.json"
    format: int = FORMAT
    mitigation: str | dict[str, Any] | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        options = dict(self.config or {})
        for name in [*OPTIONS, *NAMES]:
            if name in kwargs:
                options[NAMES.get(name, name)] = kwargs.pop(name)
        self.config = asdict(build_config(RecurrentConfig, options, source="LongRNNConfig"))
        super().__post_init__(**kwargs)
        self.architectures = self.architectures or ["LongRNNForCausalLM"]

    def to_dict(self) -> dict[str, Any]:
        """See `PreTrainedConfig`; with the sizes by the names under which PEFT reads them."""
        under = self.mitigation
        return super().to_dict() | {
            "hidden_size": self.hidden_size,
            # There are none; PEFT wants their number to divide a width by it.
            "num_attention_heads": 1,
            "mitigation": None if under is None else str(mitigation(under)),
        }

    @property
    def recurrent(self) -> RecurrentConfig:
        """The configuration of the `RecurrentLM`."""
        return build_config(RecurrentConfig, self.config, source="LongRNNConfig")

    def _option(self, name: str) -> Any:
        assert self.config is not None
        return self.config[name]

    def _set(self, name: str, value: Any) -> None:
        assert self.config is not None
        self.config[name] = value

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._option("vocab_size")

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self._set("vocab_size", size)

    @property
    def hidden_size(self) -> int:
        """Width of embeddings, cells and head."""
        return self._option("d_model")

    @hidden_size.setter
    def hidden_size(self, size: int) -> None:
        self._set("d_model", size)

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        return self._option("n_layers")

    @num_hidden_layers.setter
    def num_hidden_layers(self, count: int) -> None:
        self._set("n_layers", count)

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether head and embedding share their weights."""
        return self._option("tie_embeddings")

    @tie_word_embeddings.setter
    def tie_word_embeddings(self, tied: bool) -> None:
        self._set("tie_embeddings", tied)
