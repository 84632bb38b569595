"""A causal Hugging Face language model with the interface that the trainer needs.

Notable choices:
- Rows start from an empty state, and none is carried: keys and values of earlier segments would
  have to keep their gradients and their positions.
- The loss multiplies the hidden states with the head itself, so that the logits of all tokens never
  exist at once. `TransformerLM` checks that the model does nothing else after its hidden states.
- A checkpoint is a folder that transformers can read; bytes as tokens become a `tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.checksums import write_checksums
from longrnn.errors import UserError, nearest
from longrnn.files import one_line, write_atomic
from longrnn.hf.tokenizer import HFTokenizer, byte_level
from longrnn.ops.rows import Rows
from longrnn.state import LMState
from longrnn.text import Tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Factor of the head's weights while its logits are checked.
PROBE = 256.0


class TransformerLM(nn.Module):
    """A Hugging Face model in training: returns the hidden states of tokens.

    Args:
        model: a model whose logits are its hidden states times its head.

    Raises:
        UserError: the model computes its logits in another way.
    """

    # A transformer has no cells of longrnn, and so no mitigation.
    cells = edits = ()
    mitigation = None

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.vocab_size: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
        self.max_length: int | None = getattr(model.config, "max_position_embeddings", None)
        if not self.eval()._has_linear_head():
            raise UserError(
                f"a {model.config.model_type} does more than multiply hidden states with its head "
                "and cannot be trained here: use a model that does not, such as llama"
            )

    @torch.no_grad()
    def _has_linear_head(self) -> bool:
        """Whether the logits are the hidden states times the head, large logits included.

        The logits of a new model are near 0, where a cap has no visible effect. The head is
        therefore scaled up during the comparison, by a power of 2, so that undoing it is exact.
        """
        if self.head.bias is not None:
            return False
        tokens = torch.arange(2, device=self.model.device)[None] % self.vocab_size
        self.head.weight.mul_(PROBE)
        hidden, _ = self.hidden(tokens)
        wanted = F.linear(hidden, self.head.weight)
        same = torch.allclose(self.model(input_ids=tokens).logits, wanted, atol=1e-5 * PROBE)
        self.head.weight.div_(PROBE)
        return same

    @property
    def head(self) -> nn.Linear:
        """The output layer, which multiplies hidden states."""
        return self.model.get_output_embeddings()  # type: ignore[return-value]

    def gradient_checkpointing_enable(self, every: str = "block") -> None:
        """Compute activations again in the backward pass instead of keeping them.

        Args:
            every: `block`, each block of the model, or `no`.

        Raises:
            UserError: any other word, or a model that cannot do this.
        """
        if every == "no":
            _checkpointing(self.model, "disable")()
            return
        if every != "block":
            raise UserError(
                f"gradient_checkpointing={every} is defined for the segments of a recurrent model: "
                "set gradient_checkpointing=block for a transformer"
            )
        if not self.model.supports_gradient_checkpointing:
            raise UserError(
                f"transformers cannot compute the blocks of a {self.model.config.model_type} "
                "again: set gradient_checkpointing=no"
            )
        _checkpointing(self.model, "enable")({"use_reentrant": False})

    def init_state(self, batch_size: int) -> LMState:
        """Return the state before the first token."""
        device = self.model.device
        return LMState(torch.zeros(batch_size, dtype=torch.long, device=device), ())

    def hidden(
        self,
        tokens: Tensor,
        state: LMState | None = None,
        *,
        rows: Rows | None = None,
    ) -> tuple[Tensor, LMState]:
        """Return the hidden states in front of the head, `(b, t, d_model)`, and the new position.

        Args:
            tokens: `(b, t)`.
            state: at position 0; None for the same.
            rows: padding at the end, which no earlier token attends to; rows with several documents
                are refused.

        Raises:
            UserError: `state` is not at position 0, or a row has several documents.
        """
        if rows is not None and rows.has_starts:
            raise UserError(
                "a transformer attends to all documents of a row: set task.packing=false"
            )
        if state is None:
            state = self.init_state(len(tokens))
        if bool((state.position > 0).any()):
            raise UserError(
                "a transformer cannot start from a carried state in training: set "
                "initial_state={kind: zero}"
            )
        output = self.model.base_model(input_ids=tokens, use_cache=False)
        return output.last_hidden_state, LMState(state.position + tokens.shape[1], ())


def _checkpointing(model: PreTrainedModel, verb: str) -> Callable[..., None]:
    """The method of transformers that enables or disables checkpointing of activations."""
    # The first versions 5 of transformers have the second name only, and later ones deprecate it.
    return getattr(model, f"activation_checkpointing_{verb}", None) or getattr(
        model, f"gradient_checkpointing_{verb}"
    )


def build_transformer(options: Mapping[str, Any]) -> TransformerLM:
    """Build a model with random weights.

    Args:
        options: `model_type` and options of its Hugging Face configuration, such as
            `{"model_type": "llama", "hidden_size": 128, …}`.

    Raises:
        UserError: an unknown type or option, or values that contradict each other.
    """
    from transformers import AutoModelForCausalLM

    config = whole_config(options)
    kind = config.model_type
    try:
        model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many kinds for sizes that do not fit
        raise _not_built(kind, error) from error
    return TransformerLM(model)


def whole_config(options: Mapping[str, Any]) -> PretrainedConfig:
    """The Hugging Face configuration of `build_transformer`, with all options.

    Args:
        options: see `build_transformer`.

    Raises:
        UserError: see `build_transformer`.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    given = dict(options)
    kind = given.pop("model_type", None)
    if kind not in KNOWN:
        raise UserError(f"transformer.model_type {kind!r} is unknown: {nearest(str(kind), KNOWN)}")
    known = AutoConfig.for_model(kind).to_dict()
    for name in given:
        if name not in known:
            raise UserError(f"transformer: {kind} has no option {name!r}: {nearest(name, known)}")
    try:
        return AutoConfig.for_model(kind, **given)
    except Exception as error:
        raise _not_built(kind, error) from error


def _not_built(kind: str, error: Exception) -> UserError:
    return UserError(
        f"transformer: these options do not build a {kind} ({one_line(error)}): correct them"
    )


def save_transformer(
    model: TransformerLM, folder: Path, tokenizer: Tokenizer, weights: Mapping[str, Tensor]
) -> None:
    """Write a checkpoint folder that transformers and `load` can read.

    Args:
        model: the model.
        folder: the folder, created if it does not exist.
        tokenizer: written into the same folder.
        weights: the state dict of `model`.
    """
    from safetensors.torch import save

    inner, tied = model.model, _tied(model)
    tensors = {
        name.removeprefix("model."): tensor.contiguous()
        for name, tensor in weights.items()
        if name not in tied
    }
    config = inner.config.to_dict() | {"architectures": [type(inner).__name__]}
    fast = tokenizer if isinstance(tokenizer, HFTokenizer) else byte_level()
    fast.save(folder)
    write_atomic(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_atomic(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_checksums(folder)


def read_transformer(folder: Path, model: TransformerLM) -> dict[str, Tensor]:
    """Return the weights that `save_transformer` wrote, under the names of `model.state_dict()`."""
    from safetensors.torch import load_file

    tensors = {f"model.{n}": t for n, t in load_file(folder / "model.safetensors").items()}
    return tensors | {name: tensors[first] for name, first in _tied(model).items()}


def _tied(model: TransformerLM) -> dict[str, str]:
    """Map the names of tied weights (such as the head) to the first name of the same tensor."""
    first: dict[int, str] = {}
    found = {}
    for name, tensor in model.state_dict().items():
        known = first.setdefault(tensor.data_ptr(), name)
        if known != name:
            found[name] = known
    return found
