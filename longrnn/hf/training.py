"""A causal language model of transformers as the trainer takes it.

Notable choices:
- Rows start from the zero state, and nothing is carried: keys and values of what came before would
  have to keep their gradients and their positions.
- The loss multiplies hidden states and head itself, so that all logits never exist; that a model
  computes nothing else behind its hidden states is checked where it is built.
- A checkpoint is a folder of transformers, its tokenizer of bytes a file like any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longrnn.checksums import write_checksums
from longrnn.errors import UserError, nearest
from longrnn.files import write_atomic
from longrnn.hf.tokenizer import HFTokenizer, byte_level
from longrnn.state import LMState
from longrnn.text import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What a head is scaled by while it is looked at.
PROBE = 256.0


class TransformerLM(nn.Module):
    """A transformer in training: a text in, hidden states out.

    Args:
        model: of transformers, whose logits are its hidden states times its head.

    Raises:
        UserError: a model that computes its logits otherwise.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.vocab_size: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
        self.max_length: int | None = getattr(model.config, "max_position_embeddings", None)
        if not self.eval()._only_multiplies():
            raise UserError(
                f"a {model.config.model_type} does more than multiply by its head, and is not "
                "trained here: take one that does not, such as llama"
            )

    @torch.no_grad()
    def _only_multiplies(self) -> bool:
        """Whether logits are hidden states times the head, and stay so when they grow.

        A new model's logits are near 0, where a cap or a bias shows nothing yet: the head is made
        larger while they are compared, by a power of 2, which leaves its weights as they were.
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
        """What hidden states are multiplied with."""
        return self.model.get_output_embeddings()  # type: ignore[return-value]

    def init_state(self, batch_size: int) -> LMState:
        """Nothing read yet."""
        device = self.model.device
        return LMState(torch.zeros(batch_size, dtype=torch.long, device=device), ())

    def hidden(self, tokens: Tensor, state: LMState | None = None) -> tuple[Tensor, LMState]:
        """What the head multiplies, `(b, t, d_model)`, and how far it has read.

        Raises:
            UserError: a state that has read anything.
        """
        if state is None:
            state = self.init_state(len(tokens))
        if bool((state.position > 0).any()):
            raise UserError(
                "a transformer is trained on rows that start from nothing: set "
                "initial_state={kind: zero}"
            )
        output = self.model.base_model(input_ids=tokens, use_cache=False)
        return output.last_hidden_state, LMState(state.position + tokens.shape[1], ())


def build_transformer(options: Mapping[str, Any]) -> TransformerLM:
    """A model with random weights.

    Args:
        options: `model_type` and what its configuration of transformers takes, such as
            `{"model_type": "llama", "hidden_size": 128, …}`.

    Raises:
        UserError: an unknown type or option, or values that do not fit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
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
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given))
    except Exception as error:  # transformers raises many kinds for sizes that do not fit
        reason = " ".join(str(error).split())
        raise UserError(f"transformer: no {kind} can be built from this ({reason})") from error
    return TransformerLM(model)


def save_transformer(
    model: TransformerLM, folder: Path, tokenizer: Tokenizer, weights: Mapping[str, Tensor]
) -> None:
    """Writes a folder that transformers and `load` read.

    Args:
        model: the model.
        folder: made where it is missing.
        tokenizer: written beside it.
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
    """The weights that `save_transformer` wrote of such a model, by the names of its state dict."""
    from safetensors.torch import load_file

    tensors = {f"model.{n}": t for n, t in load_file(folder / "model.safetensors").items()}
    return tensors | {name: tensors[first] for name, first in _tied(model).items()}


def _tied(model: TransformerLM) -> dict[str, str]:
    """Names of weights that are another one's, such as a tied head's, and that one's name."""
    first: dict[int, str] = {}
    found = {}
    for name, tensor in model.state_dict().items():
        known = first.setdefault(tensor.data_ptr(), name)
        if known != name:
            found[name] = known
    return found
