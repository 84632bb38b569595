"""The numbers that golden tests compare, computed from models.

Inputs are functions of fixed seeds of numpy, and the text in `tests/data/book.txt`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from longrnn import LanguageModel, RecurrentLM
from longrnn.state import LMState, detach
from tests.golden.today import cell_states, gradient_key, new_model, parameter_key
from tests.texts import BOOK, DATA

RECORD = DATA / "golden.json"
Numbers = dict[str, list[float]]
Split = Callable[[int], list[int]]
# Tokens read when a result is recorded; two are longer than a chunk of the scans (64 tokens).
LENGTHS = (6, 70, 400)


def weights(key: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Values of a parameter, a function of its name and shape."""
    randomness = np.random.default_rng(zlib.crc32(key.encode()))
    if key.endswith("A_log"):  # rates from 0.02 to 7
        return randomness.uniform(-4, 2, shape)
    drawn = randomness.standard_normal(shape)
    if key.endswith("dt_bias"):  # steps of about 0.1
        return 0.5 * drawn - 2
    if key.endswith(("norm.weight", ".D")):
        return 1 + 0.1 * drawn
    return 0.1 * drawn if len(shape) == 1 else 0.7 * drawn / shape[-1] ** 0.5


def model(cell: Mapping[str, Any], **options: Any) -> RecurrentLM:
    """A model of two layers, 8 wide, whose weights are a function of their names."""
    made = new_model(cell, **options)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            values = weights(parameter_key(name), tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(values))
    return made


def tokens(vocab_size: int, length: int) -> Tensor:
    """`(2, length)`: random ids, and the text, whose bytes are taken modulo the vocabulary."""
    drawn = np.random.default_rng(0).integers(0, vocab_size, length)
    text = np.frombuffer(BOOK.read_bytes()[:length], np.uint8).astype(np.int64)
    return torch.from_numpy(np.stack([drawn, text % vocab_size]))


def one_call(length: int) -> list[int]:
    return [length]


def token_by_token(length: int) -> list[int]:
    return [1] * length


def random_pieces(length: int) -> list[int]:
    """Sizes from 1 token to a third of the whole, which sum to `length`."""
    cuts = np.random.default_rng(length).integers(1, length, 7)
    edges = sorted({0, *map(int, cuts), length})
    return np.diff(edges).tolist()


SPLITS = {"one_call": one_call, "pieces": random_pieces, "token_by_token": token_by_token}


def read(model: LanguageModel, ids: Tensor, sizes: Sequence[int]) -> tuple[Tensor, LMState]:
    """The logits of all tokens, read in pieces, and the final state."""
    state, outputs = None, []
    for piece in ids.split(list(sizes), dim=1):
        logits, state = model(piece, state)
        outputs.append(logits)
    assert state is not None
    return torch.cat(outputs, dim=1), state


def outputs(model: LanguageModel, vocab_size: int, split: Split, lengths: Sequence[int]) -> Numbers:
    """Logits, losses and norms of the states after each length, by name."""
    found: Numbers = {}
    directions = np.random.default_rng(1).standard_normal((vocab_size, 1)) / vocab_size**0.5
    for length in lengths:
        ids = tokens(vocab_size, length)
        with torch.no_grad():
            logits, state = read(model, ids, split(length))
        logits = logits.double()
        last = torch.cat([logits[:, -1, :2], logits[:, -1] @ torch.from_numpy(directions)], 1)
        found[f"{length} logits"] = last.flatten().tolist()
        found[f"{length} logsumexp"] = logits[:, -1].logsumexp(-1).tolist()
        loss = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
        found[f"{length} loss"] = loss.mean(1).tolist()
        for name, tensor in cell_states(model, state).items():
            if tensor.numel():
                found[f"{length} state {name}"] = [tensor.double().norm().item()]
    return found


def gradients(model: LanguageModel, vocab_size: int, split: Split) -> Numbers:
    """Norms of the gradients of the loss over 70 tokens, by parameter."""
    ids = tokens(vocab_size, LENGTHS[1] + 1)
    logits, _ = read(model, ids[:, :-1], split(LENGTHS[1]))
    F.cross_entropy(logits.mT, ids[:, 1:]).backward()
    return {
        f"gradient {gradient_key(model, name)}": [parameter.grad.double().norm().item()]
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def steps(model: RecurrentLM, *, carried: bool) -> Numbers:
    """The losses of 20 optimizer steps on segments of 32 tokens, in float64.

    With `carried`, each segment starts from the detached state after the one before.
    """
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-3)
    state, losses = None, []
    for segment in tokens(11, 20 * 32 + 1).unfold(1, 33, 32).unbind(1):
        logits, after = model(segment[:, :-1], state)
        loss = F.cross_entropy(logits.mT, segment[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        state = detach(after) if carried else None
    return {"loss": losses}
