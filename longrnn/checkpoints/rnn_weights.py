"""Converts stacks of `nn.RNN`, `nn.GRU` and `nn.LSTM` of torch and TensorFlow, with their head.

A file of names says which tensor is what. In torch, a matrix has one row per output; in TensorFlow,
one column. The order of the gates differs between libraries, and some versions of TensorFlow add a
forget bias when they run a model.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from longrnn.bundled import find
from longrnn.checkpoints.folder import build_model, cast_weights, read_tensors
from longrnn.checkpoints.layouts import LAYOUTS, OURS
from longrnn.checksums import complete_folder
from longrnn.errors import UserError, nearest
from longrnn.files import one_line, regular
from longrnn.hf.tokenizer import character_level
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.options import Options, validated
from longrnn.yaml import read_mapping

logger = logging.getLogger(__name__)

FILES_OF_NAMES = "configs/convert"
LIBRARIES = ("torch", "tensorflow")
# The gates in the rows of the weights of torch.nn; g and n are candidates, and z keeps the state.
GATES = {"rnn": ["h"], "gru": ["r", "z", "n"], "lstm": ["i", "f", "g", "o"]}
PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class WeightNames(Options):
    """Which tensor of a file is what; `{layer}` stands for the number of a layer, from 0.

    Attributes:
        mixer: `{kind: lstm}`, `{kind: gru}` or `{kind: rnn, nonlinearity: tanh}`.
        input: weights of the input; without `recurrent`, those of the state follow in the tensor.
        recurrent: weights of the state.
        bias: of the input and of the state, or a single one for both, or none.
        gates: their order in the weights, as in `GATES`; that of torch.nn by default.
        forget_bias: what the library adds to the forget gate of an LSTM when it runs the model.
        embedding: None if the input is the one-hot vector of a token.
        head: None if the head shares the weights of the embedding.
        head_bias: None for none.
        ignore: tensors that the model does not need; any other that is not named is refused.
        characters: a JSON file beside the weights, with the id of each character.
        replace: what replaces characters that the model does not have.
        tokenizer: instead of `characters`, `bytes` or the path of a tokenizer, which is recorded.
        transposed: whether matrices have one column per output and not one row, other than that of
            the embedding.
    """

    mixer: dict[str, Any] = Field({})
    input: str
    recurrent: str | None = None
    bias: list[str] = Field([], max_length=2)
    gates: list[str] | None = None
    forget_bias: float = 0.0
    embedding: str | None = None
    head: str | None = None
    head_bias: str | None = None
    ignore: list[str] = Field([])
    characters: str | None = None
    replace: dict[str, str] = Field({})
    tokenizer: str | None = None
    transposed: bool = False


def convert_rnn(source: Path, destination: Path, *, library: str, names: str | None = None) -> None:
    """Write the model of a file of weights as a checkpoint of longrnn.

    Args:
        source: `.safetensors`, `.npz`, or a state dict of `torch.save`.
        destination: a folder that does not exist or is empty; it appears complete or not at all.
        library: `torch` or `tensorflow`.
        names: a YAML file with `WeightNames`, or the name of a bundled one. In a state dict of
            torch.nn, the tensors are found without it.

    Raises:
        UserError: the file cannot be read, its tensors do not make up such a model, or the
            destination is in use.
    """
    if library not in LIBRARIES:
        raise UserError(f"unknown library {library!r}: {nearest(library, LIBRARIES)}")
    tensors = _read(source)
    known = _names_in_torch(tensors) if library == "torch" else {"transposed": True}
    if names is not None:
        file = find(names, FILES_OF_NAMES)
        known |= read_mapping(file, f"see {FILES_OF_NAMES}", kind="file of names")
    where = names or f"the names of {source} (--names FILE, as in {FILES_OF_NAMES})"
    options = validated(WeightNames, known, where)
    try:
        model = _model(tensors, options)
    except (ValueError, RuntimeError, IndexError) as error:  # of tensors of another shape
        raise UserError(f"{source} cannot be converted: {one_line(error)}") from error
    with complete_folder(destination, "choose another folder") as draft:
        if options.characters is not None:
            vocabulary = source.parent / options.characters
            character_level(vocabulary, options.replace, model.vocab_size).save(draft)
        elif options.tokenizer is None:
            logger.warning(
                f"the names of {source} have neither characters nor a tokenizer: put the "
                "tokenizer.json that the model was trained with into the folder"
            )
        LAYOUTS[OURS].save(model, draft, options.tokenizer or "tokenizer.json")


def _read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name."""
    try:
        if regular(path).suffix == ".npz":
            tensors = {name: torch.from_numpy(array) for name, array in np.load(path).items()}
        else:
            tensors = read_tensors(path)
    except Exception as error:  # of the libraries that read files
        raise UserError(
            f"{path} cannot be read ({one_line(error)}): give a file in .safetensors, .npz, or of "
            "torch.save(model.state_dict(), …)"
        ) from error
    is_named = isinstance(tensors, Mapping) and all(isinstance(name, str) for name in tensors)
    if not is_named or not all(map(torch.is_tensor, tensors.values())):
        raise UserError(f"{path} is not a state dict: save the tensors by name, without others")
    return dict(tensors)


def _names_in_torch(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what `WeightNames` holds for a state dict of torch.nn, as far as it is clear."""
    first = [name for name in tensors if name.endswith("weight_hh_l0")]
    if len(first) != 1:
        return {}
    prefix = first[0].removesuffix("weight_hh_l0")
    shape = tuple(tensors[first[0]].shape)
    kinds = [kind for kind, gates in GATES.items() if shape[0] == len(gates) * shape[-1]]
    others = {name: tensor.ndim for name, tensor in tensors.items() if not name.startswith(prefix)}
    matrices = [name for name, ndim in others.items() if ndim == 2]
    heads = [name for name in matrices if f"{name.removesuffix('weight')}bias" in others]
    candidates = {
        "embedding": [name for name in matrices if name not in heads],
        "head": heads,
        "head_bias": [name for name, ndim in others.items() if ndim == 1],
    }
    return {
        **({"mixer": {"kind": kinds[0]}} if kinds else {}),
        "input": f"{prefix}weight_ih_l{{layer}}",
        "recurrent": f"{prefix}weight_hh_l{{layer}}",
        "bias": [
            f"{prefix}{name}{{layer}}"
            for name in ("bias_ih_l", "bias_hh_l")
            if f"{prefix}{name}0" in tensors
        ],
        **{option: names[0] for option, names in candidates.items() if len(names) == 1},
    }


def _model(tensors: dict[str, Tensor], names: WeightNames) -> RecurrentLM:
    """Return the model; a ValueError for tensors that do not make up one."""
    kind = str(names.mixer.get("kind"))
    if kind not in GATES:
        matrix = tuple(_take(tensors, names.recurrent or names.input, 0).shape)
        counts = ", ".join(f"{kind} {len(gates)}" for kind, gates in GATES.items())
        raise ValueError(
            f"the kind of its cells is not known from mixer = {names.mixer} and the shape {matrix} "
            f"of the weights of the state, one square matrix per gate ({counts} gates): give "
            "mixer: {kind: lstm}, or the right kind, in --names"
        )
    order, wanted = names.gates or GATES[kind], GATES[kind]
    if sorted(order) != sorted(wanted) or (names.transposed and kind != "rnn" and not names.gates):
        raise ValueError(f"gates are {names.gates}: give {wanted} in the order of the weights")
    if names.forget_bias and kind != "lstm":
        raise ValueError(f"a {kind} has no forget bias: leave forget_bias out")
    weights, layers = dict[str, Tensor](), 0
    while not layers or names.input.replace("{layer}", str(layers)) in tensors:
        for name, weight in zip(PARAMETERS, _layer(tensors, names, layers), strict=True):
            weights[f"blocks.{layers}.mixer.cell.{name}_l0"] = weight
        layers += 1
    first = weights["blocks.0.mixer.cell.weight_ih_l0"]
    d_embedding, d_model = first.shape[1], weights["blocks.0.mixer.cell.weight_hh_l0"].shape[1]
    others = {"embedding.weight": names.embedding, "head.bias": names.head_bias}
    weights |= {ours: _take(tensors, theirs) for ours, theirs in others.items() if theirs}
    if names.embedding is None:
        weights["embedding.weight"] = torch.eye(d_embedding, dtype=first.dtype)
    if names.head is not None:
        weights["head.weight"] = _take(tensors, names.head, transposed=names.transposed)
    if any(name.endswith("_reverse") for name in tensors):
        raise ValueError("a bidirectional layer reads what follows: give a causal language model")
    for name in tensors.keys() - names.ignore:
        raise ValueError(
            f"it has {name}, which the names leave out: name it, or list it under `ignore` "
            "if the model does not need it"
        )
    config = RecurrentConfig(
        vocab_size=len(weights["embedding.weight"]),
        d_model=d_model,
        n_layers=layers,
        mixer=names.mixer,
        block="plain",
        tie_embeddings=names.head is None,
        head_bias=names.head_bias is not None,
        d_embedding=None if d_embedding == d_model else d_embedding,
    )
    model = build_model(config, weights)  # which checks all shapes
    by_gate = [order.index(gate) for gate in wanted]
    for name, weight in model.named_parameters():
        if ".mixer." in name:
            rows = weight.data.unflatten(0, (len(wanted), -1))[by_gate]
            if names.forget_bias and "bias_ih" in name:
                rows[wanted.index("f")] += names.forget_bias
            weight.data = rows.flatten(0, 1)
    return cast_weights(model, None)


def _take(
    tensors: dict[str, Tensor], name: str, layer: int = 0, *, transposed: bool = False
) -> Tensor:
    """Remove a tensor and return it; a ValueError if there is none of that name."""
    name = name.replace("{layer}", str(layer))
    if name not in tensors:
        raise ValueError(f"it has no tensor {name}: change --names; {nearest(name, tensors)}")
    return tensors.pop(name).T if transposed else tensors.pop(name)


def _layer(tensors: dict[str, Tensor], names: WeightNames, layer: int) -> list[Tensor]:
    """Remove the tensors of a layer and return them as `PARAMETERS`, gates in their order."""
    kind = names.mixer["kind"]
    matrices = [
        _take(tensors, name, layer, transposed=names.transposed)
        for name in (names.input, names.recurrent)
        if name is not None
    ]
    rows = len(matrices[0])
    if names.recurrent is None:
        matrices = [*matrices[0].tensor_split([-(rows // len(GATES[kind]))], 1)]
    biases = [_take(tensors, name, layer) for name in names.bias]
    if len(biases) == 1:  # Keras has both of a GRU in one tensor
        biases = [*biases[0].view(-1, rows)]
    if kind == "gru" and names.transposed and len(biases) < 2:
        raise ValueError(
            "a GRU of TensorFlow with one bias multiplies the state after its reset gate, which "
            "longrnn does not compute: convert one with reset_after=True"
        )
    zero = matrices[0].new_zeros(rows)
    return [*matrices, *biases, zero, zero][: len(PARAMETERS)]
