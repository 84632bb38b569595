"""The configuration of a `RecurrentLM`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from longrnn.options import Count


@dataclass
class RecurrentConfig:
    """The configuration of a `RecurrentLM`.

    Attributes:
        vocab_size: number of token ids.
        d_model: width of cells and head, and of the embedding by default.
        n_layers: number of blocks.
        mixer: `{"kind": name in `longrnn.MIXERS`, option: value, …}`.
        position: `{"kind": "none" | "sinusoidal" | "learned" | "random" | "duplicate", …}`.
        block: `residual` (x + mixer(norm(x)), and a norm before the head) or `plain` (embedding →
            position → cells → head, the architecture of arXiv 2402.00236).
        tie_embeddings: whether head and embedding share their weights.
        norm_eps: added to the mean square in the norms of `residual`.
        residual_in_fp32: whether the residual stream of `residual` is float32 or wider, even if the
            weights are narrower.
        head_bias: whether the head adds a bias to the logits.
        d_embedding: width of the embedding; None for `d_model`.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    vocab_size: Count = 256
    d_model: Count = 128
    n_layers: Count = 2
    mixer: dict[str, Any] = field(default_factory=lambda: {"kind": "mamba2"})
    position: dict[str, Any] = field(default_factory=lambda: {"kind": "none"})
    block: Literal["residual", "plain"] = "residual"
    tie_embeddings: bool = True
    norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-5
    residual_in_fp32: bool = False
    head_bias: bool = False
    d_embedding: Count | None = None
