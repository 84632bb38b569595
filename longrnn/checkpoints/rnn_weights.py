"""Converts stacks of `nn.RNN`, `nn.GRU` and `nn.LSTM` of torch and TensorFlow, with their head.

A file of names says which tensor is what. In torch, a matrix has one row per output; in TensorFlow,
one column. The order of the gates differs between libraries, and some versions of TensorFlow add a
forget bias when they run a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor

from longrnn.bundled import find
from longrnn.checkpoints.folder import build_model, cast_weights, save_model
from longrnn.checksums import complete_folder
from longrnn.config import overridden
from longrnn.errors import UserError, nearest
from longrnn.files import one_line, read_json, regular
from longrnn.hf.tokenizer import character_level
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM
from longrnn.options import Options, validated
from longrnn.yaml import read_mapping

logger = logging.getLogger(__name__)

FILES_OF_NAMES = "configs/convert"
LAYER_NUMBER = "{layer}"
# The gates in the rows of the weights of torch.nn; g and n are candidates, and z keeps the state.
GATES = {"rnn": ["h"], "gru": ["r", "z", "n"], "lstm": ["i", "f", "g", "o"]}


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

    mixer: dict[str, Any]
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


def _read_folder(path: Path) -> dict[str, Tensor]:
    """Read one file of float32 numbers per tensor, as `manifest.json` lists them."""
    arrays = {
        name: np.fromfile(regular(path / entry["filename"]), "<f4").reshape(entry["shape"])
        for name, entry in read_json(path / "manifest.json").items()
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


# By the ending of a file; that of a folder is empty.
READERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    ".safetensors": load_file,
    ".npz": lambda path: {name: torch.from_numpy(array) for name, array in np.load(path).items()},
    **dict.fromkeys(
        (".pt", ".pth", ".bin"), partial(torch.load, map_location="cpu", weights_only=True)
    ),
    "": _read_folder,
}
LIBRARIES = ("torch", "tensorflow")


def convert_rnn(source: Path, destination: Path, *, library: str, names: str | None = None) -> None:
    """Write the model of a file of weights as a checkpoint of longrnn.

    Args:
        source: `.safetensors`, `.npz`, `.pt`, `.pth` or `.bin` (read with `weights_only=True`), or
            a folder with `manifest.json` and one file of float32 numbers per tensor.
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
        known |= read_mapping(
            find(names, FILES_OF_NAMES), f"see {FILES_OF_NAMES}", kind="file of names"
        )
    where = names or f"the names of {source} (--names FILE, as in {FILES_OF_NAMES})"
    options = validated(WeightNames, overridden(known, ()), where)
    try:
        model = _model(tensors, options)
    except (ValueError, RuntimeError, IndexError) as error:  # of tensors of another shape
        raise UserError(f"{source} cannot be converted: {one_line(error)}") from error
    with complete_folder(destination, "choose another folder") as draft:
        if options.characters is not None:
            beside = source if source.is_dir() else source.parent
            character_level(beside / options.characters, options.replace, model.vocab_size).save(
                draft
            )
        elif options.tokenizer is None:
            logger.warning(
                f"the names of {source} have neither characters nor a tokenizer: put the "
                "tokenizer.json that the model was trained with into the folder"
            )
        save_model(model, draft, tokenizer=options.tokenizer or "tokenizer.json")


def _read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file or folder by name."""
    try:
        is_folder = path.is_dir()
        source = path if is_folder else regular(path)
        tensors = READERS["" if is_folder else path.suffix or "none"](source)
    except Exception as error:  # of the libraries that read files, or of an unknown ending
        raise UserError(
            f"{path} cannot be read ({one_line(error)}): give a folder with manifest.json or a "
            f"file that ends in {', '.join(filter(None, READERS))}; write a pickle of a whole "
            "model again as torch.save(model.state_dict(), …)"
        ) from error
    is_named = isinstance(tensors, Mapping) and all(isinstance(name, str) for name in tensors)
    if not is_named or not all(map(torch.is_tensor, tensors.values())):
        raise UserError(f"{path} is not a state dict: save the tensors by name, without others")
    return tensors


def _names_in_torch(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what `WeightNames` holds for a state dict of torch.nn, as far as it is clear."""
    first = [name for name in tensors if name.endswith("weight_hh_l0")]
    if len(first) != 1:
        return {}
    prefix = first[0].removesuffix("weight_hh_l0")
    gates = len(tensors[first[0]]) // max(1, tensors[first[0]].shape[-1])
    kinds = [kind for kind, order in GATES.items() if len(order) == gates]
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    vectors = [name for name, tensor in rest.items() if tensor.ndim == 1]
    heads = [name for name in rest if f"{name.removesuffix('weight')}bias" in vectors]
    matrices = [name for name, tensor in rest.items() if tensor.ndim == 2]
    candidates = {
        "embedding": [name for name in matrices if name not in heads],
        "head": [name for name in matrices if name in heads],
        "head_bias": vectors,
    }
    biases = [f"{prefix}bias_{part}_l{LAYER_NUMBER}" for part in ("ih", "hh")]
    return {
        "mixer": {"kind": kinds[0] if kinds else "unknown"},
        "input": f"{prefix}weight_ih_l{LAYER_NUMBER}",
        "recurrent": f"{prefix}weight_hh_l{LAYER_NUMBER}",
        "bias": [name for name in biases if _name(name, 0) in tensors],
        **{option: found[0] for option, found in candidates.items() if len(found) == 1},
    }


def _model(tensors: Mapping[str, Tensor], names: WeightNames) -> RecurrentLM:
    """Return the model; a ValueError for tensors that do not make up one."""
    if names.mixer.get("kind") not in GATES:
        raise ValueError(f"mixer is {names.mixer}: give {{kind: rnn}}, gru or lstm")
    rest, state, layers = dict(tensors), dict[str, Tensor](), 0
    while not layers or (LAYER_NUMBER in names.input and _name(names.input, layers) in rest):
        for name, weight in _layer(rest, names, layers).items():
            state[f"blocks.{layers}.mixer.cell.{name}"] = weight
        layers += 1
    cell = "blocks.0.mixer.cell."
    inputs, d_model = (state[f"{cell}weight_{part}_l0"].shape[1] for part in ("ih", "hh"))
    state["embedding.weight"] = (
        torch.eye(inputs, dtype=state[f"{cell}weight_ih_l0"].dtype)
        if names.embedding is None
        else _take(rest, names.embedding)
    )
    if names.head is not None:
        state["head.weight"] = _matrix(rest, names.head, names)
    if names.head_bias is not None:
        state["head.bias"] = _take(rest, names.head_bias)
    if any(name.endswith("_reverse") for name in rest):
        raise ValueError("a bidirectional layer reads what follows: give a causal language model")
    if unused := [name for name in rest if name not in names.ignore]:
        raise ValueError(
            f"it has {unused[0]}, which the names leave out: name it, or list it under `ignore` "
            "if the model does not need it"
        )
    config = RecurrentConfig(
        vocab_size=len(state["embedding.weight"]),
        d_model=d_model,
        n_layers=layers,
        mixer=names.mixer,
        block="plain",
        tie_embeddings=names.head is None,
        head_bias=names.head_bias is not None,
        d_embedding=None if inputs == d_model else inputs,
    )
    return cast_weights(build_model(config, state), None)


def _name(pattern: str, layer: int) -> str:
    return pattern.replace(LAYER_NUMBER, str(layer))


def _take(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Remove a tensor and return it; a ValueError if there is none of that name."""
    if name not in tensors:
        raise ValueError(f"it has no tensor {name}: change --names; {nearest(name, tensors)}")
    return tensors.pop(name)


def _matrix(tensors: dict[str, Tensor], name: str, names: WeightNames) -> Tensor:
    """Remove a matrix and return it with one row per output."""
    matrix = _take(tensors, name)
    return matrix.T if names.transposed else matrix


def _layer(tensors: dict[str, Tensor], names: WeightNames, layer: int) -> dict[str, Tensor]:
    """Remove the tensors of a layer and return them as in torch.nn, under its names."""
    kind = names.mixer["kind"]
    order, wanted = names.gates or GATES[kind], GATES[kind]
    if sorted(order) != sorted(wanted) or (names.transposed and kind != "rnn" and not names.gates):
        raise ValueError(f"gates are {names.gates}: give {wanted} in the order of the weights")
    inputs = _matrix(tensors, _name(names.input, layer), names)
    size = len(inputs) // len(wanted)
    if names.recurrent is None:
        inputs, recurrent = inputs[:, :-size], inputs[:, -size:]
    else:
        recurrent = _matrix(tensors, _name(names.recurrent, layer), names)
    biases = [_take(tensors, _name(name, layer)) for name in names.bias]
    if len(biases) == 1:  # Keras has both of a GRU in one tensor
        biases = list(biases[0].view(-1, len(inputs)))
    if kind == "gru" and names.transposed and len(biases) < 2:
        raise ValueError(
            "a GRU of TensorFlow with one bias multiplies the state after its reset gate, which "
            "longrnn does not compute: convert one with reset_after=True"
        )
    shapes = [tensor.shape for tensor in (recurrent, *biases)]
    expected = [(len(inputs), size), *[(len(inputs),)] * min(len(biases), 2)]
    if len(inputs) != size * len(wanted) or shapes != expected:
        raise ValueError(
            f"layer {layer} of a {kind} has weights {[tuple(shape) for shape in shapes]} of the "
            f"state and biases beside {tuple(inputs.shape)} of the input, and {expected} were "
            "expected: name the right tensors"
        )
    zero = inputs.new_zeros(len(inputs))
    bias_ih, bias_hh = [*biases, zero, zero][:2]
    if names.forget_bias:
        if kind != "lstm":
            raise ValueError(f"a {kind} has no forget bias: leave forget_bias out")
        forget = torch.tensor([gate == "f" for gate in order]).repeat_interleave(size)
        bias_ih = bias_ih + names.forget_bias * forget
    rows = torch.arange(len(inputs)).view(len(order), -1)[[order.index(gate) for gate in wanted]]
    layers = {"weight_ih": inputs, "weight_hh": recurrent, "bias_ih": bias_ih, "bias_hh": bias_hh}
    return {f"{name}_l0": tensor[rows.flatten()] for name, tensor in layers.items()}
