"""Stacks of nn.RNN, nn.GRU and nn.LSTM of torch and TensorFlow become checkpoints of longrnn."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from longrnn import load, load_tokenizer
from longrnn.checkpoints.rnn_weights import convert_rnn
from longrnn.errors import UserError
from tests.contracts.builders import assert_near, generator, random_sizes
from tests.contracts.subjects import read
from tests.refusals import naming

VOCAB, WIDTH = 13, 6
TEXT = torch.randint(VOCAB, (2, 33), generator=generator(0))
Arrays = dict[str, Any]


class TorchModel(nn.Module):
    """A character model as people write it in torch, in float64 with random weights."""

    def __init__(self, kind: str, layers: int, embedding: int | None, **options: Any) -> None:
        super().__init__()
        if embedding is not None:
            self.encoder = nn.Embedding(VOCAB, embedding)
        build: Any = getattr(nn, kind)
        self.rnn = build(embedding or VOCAB, WIDTH, layers, batch_first=True, **options)
        self.decoder = nn.Linear(WIDTH, VOCAB)
        self.double()
        for weight in self.parameters():
            nn.init.normal_(weight, generator=generator(weight.numel()))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Any]:
        one_hot = nn.functional.one_hot(tokens, VOCAB).double()
        y, state = self.rnn(self.encoder(tokens) if hasattr(self, "encoder") else one_hot)
        return self.decoder(y), state


def converted(source: Path, names: dict[str, Any], library: str = "torch") -> Path:
    """The folder of a converted file of weights."""
    path, folder = source.with_name("names.yaml"), source.with_name("ours")
    path.write_text(yaml.safe_dump(names))
    convert_rnn(source, folder, library=library, names=str(path) if names else None)
    return folder


def assert_computes(folder: Path, expected: Tensor) -> Any:
    """Assert the logits of `TEXT` in random pieces; return the model."""
    model = load(folder)
    logits, _ = read(model, TEXT, None, random_sizes(33, 0))
    assert_near(logits, expected, 1e-12)
    return model


@pytest.mark.parametrize(
    ("kind", "layers", "embedding", "options", "ending"),
    [
        ("LSTM", 2, WIDTH, {}, ".safetensors"),
        ("LSTM", 1, None, {"bias": False}, ".npz"),
        ("GRU", 2, 4, {}, ".pt"),
        ("GRU", 1, None, {}, ".bin"),
        ("RNN", 3, 9, {}, ".pth"),
        ("RNN", 1, WIDTH, {"nonlinearity": "relu"}, ".safetensors"),
    ],
)
def test_a_state_dict_of_torch_gives_the_same_logits_states_and_gradients(
    kind: str, layers: int, embedding: Any, options: dict[str, Any], ending: str, tmp_path: Path
) -> None:
    """Embeddings of any width and one-hot inputs, in every format, found without names."""
    theirs, path = TorchModel(kind, layers, embedding, **options), tmp_path / f"model{ending}"
    weights = theirs.state_dict()
    if ending == ".safetensors":
        save_file(weights, path)
    elif ending == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in weights.items()})  # type: ignore
    else:
        torch.save(weights, path)
    is_stated = "nonlinearity" in options  # which a state dict does not have
    folder = converted(path, {"mixer": {"kind": "rnn", **options}} if is_stated else {})
    expected, state = theirs(TEXT)
    model = assert_computes(folder, expected)
    logits, after = model(TEXT)
    for layer, h in enumerate(state[0] if kind == "LSTM" else state):
        assert_near(after.layers[layer].h, h, 1e-12)
    for output in (expected, logits):
        output.square().sum().backward()
    other: Any = theirs
    assert_near(model.head.bias.grad, other.decoder.bias.grad, 1e-12)
    weight = model.cells[0].cell.weight_hh_l0
    assert_near(weight.grad, other.rnn.weight_hh_l0.grad, 1e-12)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    theirs = TorchModel("GRU", 1, WIDTH)
    theirs.decoder.weight = theirs.encoder.weight
    weights = theirs.state_dict()
    del weights["decoder.weight"]
    torch.save(weights, tmp_path / "model.pt")
    model = assert_computes(converted(tmp_path / "model.pt", {}), theirs(TEXT)[0])
    assert model.config.tie_embeddings


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def basic_lstm(x: Any, h: Any, c: Any, w: Arrays, layer: str) -> tuple[Any, Any]:
    """`BasicLSTMCell` of TensorFlow 1: gates i, j, f, o and a forget bias of 1."""
    gates = np.concatenate([x, h], -1) @ w[f"{layer}/kernel"] + w[f"{layer}/bias"]
    i, j, f, o = np.split(gates, 4, -1)
    c = sigmoid(f + 1.0) * c + sigmoid(i) * np.tanh(j)
    return sigmoid(o) * np.tanh(c), c


def keras_lstm(x: Any, h: Any, c: Any, w: Arrays, layer: str) -> tuple[Any, Any]:
    gates = x @ w[f"{layer}/kernel"] + h @ w[f"{layer}/recurrent"] + w[f"{layer}/bias"]
    i, f, g, o = np.split(gates, 4, -1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def keras_gru(x: Any, h: Any, c: Any, w: Arrays, layer: str) -> tuple[Any, Any]:
    """With reset_after: gates z, r, h and two biases."""
    x_z, x_r, x_h = np.split(x @ w[f"{layer}/kernel"] + w[f"{layer}/bias"][0], 3, -1)
    h_z, h_r, h_h = np.split(h @ w[f"{layer}/recurrent"] + w[f"{layer}/bias"][1], 3, -1)
    z = sigmoid(x_z + h_z)
    return z * h + (1 - z) * np.tanh(x_h + sigmoid(x_r + h_r) * h_h), c


KERAS: dict[str, Any] = {
    "input": "{layer}/kernel",
    "recurrent": "{layer}/recurrent",
    "bias": ["{layer}/bias"],
    "embedding": "embedding",
    "head": "head/kernel",
    "head_bias": "head/bias",
    "ignore": ["step"],
}
BASIC = KERAS | {"mixer": {"kind": "lstm"}, "gates": [*"igfo"], "forget_bias": 1.0}
BASIC = {name: value for name, value in BASIC.items() if name != "recurrent"}
GRU = KERAS | {"mixer": {"kind": "gru"}, "gates": [*"zrn"]}


def tensorflow_weights(gates: int, biases: tuple[int, ...], both: bool) -> Arrays:
    """Two layers with an embedding and a head; `both`: with one matrix per layer."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCAB, WIDTH), "step": ()}
    shapes |= {"head/kernel": (WIDTH, VOCAB), "head/bias": (VOCAB,)}
    for layer in "01":
        shapes[f"{layer}/kernel"] = ((1 + both) * WIDTH, gates * WIDTH)
        shapes[f"{layer}/bias"] = (*biases, gates * WIDTH)
        if not both:
            shapes[f"{layer}/recurrent"] = (WIDTH, gates * WIDTH)
    draw = np.random.default_rng(0)
    return {name: np.asarray(draw.normal(size=shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("cell", "names", "gates", "biases"),
    [
        (basic_lstm, BASIC, 4, ()),
        (keras_lstm, KERAS | {"mixer": {"kind": "lstm"}, "gates": [*"ifgo"]}, 4, ()),
        (keras_gru, GRU, 3, (2,)),
    ],
)
def test_weights_of_tensorflow_give_the_logits_of_its_equations(
    cell: Callable[..., Any], names: dict[str, Any], gates: int, biases: Any, tmp_path: Path
) -> None:
    w = tensorflow_weights(gates, biases, cell is basic_lstm)
    np.savez(tmp_path / "model.npz", **w)
    h, c, logits = np.zeros((2, 2, WIDTH)), np.zeros((2, 2, WIDTH)), []
    for tokens in TEXT.T.numpy():
        x = w["embedding"][tokens]
        for layer in range(2):
            x, c[layer] = cell(x, h[layer], c[layer], w, str(layer))
            h[layer] = x
        logits.append(x @ w["head/kernel"] + w["head/bias"])
    expected = torch.from_numpy(np.stack(logits, 1))
    assert_computes(converted(tmp_path / "model.npz", names, "tensorflow"), expected)


LSTM = TorchModel("LSTM", 1, 4).state_dict()
TWO_WAYS = TorchModel("GRU", 1, 4, bidirectional=True).state_dict()
REFUSED: dict[str, tuple[Arrays, dict[str, Any], list[object]]] = {
    "an unused tensor": (LSTM | {"extra": torch.ones(1, 2, 2)}, {}, ["extra", "ignore"]),
    "a bidirectional layer": (TWO_WAYS, {}, ["bidirectional"]),
    "a missing tensor": (LSTM, {"head": "decoder.wieght"}, ["decoder.wieght", "decoder.weight"]),
    "another kind of cell": (LSTM, {"mixer": {"kind": "mamba2"}}, ["mamba2", "lstm"]),
    "gates of another cell": (LSTM, {"gates": ["i", "f"]}, ["'i', 'f'", "'o'"]),
    "gates that are not stated": (LSTM, {"transposed": True}, ["gates", "'o'"]),
    "an unknown name": (LSTM, {"heads": "decoder.weight"}, ["heads", "head"]),
    "more rows of the state": (
        LSTM | {"rnn.weight_hh_l0": torch.zeros(5 * WIDTH, WIDTH).double()},
        {"mixer": {"kind": "lstm"}},
        [f"({5 * WIDTH}, {WIDTH})", f"({4 * WIDTH}, {WIDTH})"],
    ),
    "gates of no cell": (
        {
            name: torch.zeros(5 * WIDTH, *w.shape[1:]).double() if "rnn." in name else w
            for name, w in LSTM.items()
        },
        {},
        [f"({5 * WIDTH}, {WIDTH})", "lstm 4", "mixer"],
    ),
    "a long bias": (LSTM | {"rnn.bias_hh_l0": torch.zeros(99).double()}, {}, ["(99,)"]),
    "numbers for names": ({0: torch.ones(2, 2)}, {}, ["model.pt", "state dict"]),  # type: ignore[dict-item]
    "two dtypes": (LSTM | {"decoder.weight": torch.zeros(VOCAB, WIDTH)}, {}, ["float32"]),
    "no stack of layers": ({"weight": torch.ones(2, 2)}, {}, ["--names", "configs/convert"]),
    "a GRU that resets before the product": (
        {name: torch.from_numpy(w) for name, w in tensorflow_weights(3, (), False).items()},
        GRU | {"transposed": True},
        ["reset_after"],
    ),
    "a forget bias of a GRU": (
        {name: torch.from_numpy(w) for name, w in tensorflow_weights(3, (2,), False).items()},
        GRU | {"transposed": True, "forget_bias": 1.0},
        ["gru", "forget_bias"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_that_do_not_make_up_a_model_are_refused(case: str, tmp_path: Path) -> None:
    """One sentence names the tensor or the option, and nothing is left at the destination."""
    weights, changes, named = REFUSED[case]
    torch.save(weights, tmp_path / "model.pt")
    with pytest.raises(UserError, match=naming(*named)) as caught:
        converted(tmp_path / "model.pt", changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("ids", [[-1], [0, 0], [0, 2]], ids=str)
def test_characters_have_the_ids_of_the_weights(ids: list[int], tmp_path: Path) -> None:
    """Each from 0 to the last one once: none twice, missing or outside of the vocabulary."""
    numbers = [*ids, *range(max(ids) + 1, VOCAB + len(ids))][:VOCAB]
    content = {chr(97 + index): number for index, number in enumerate(numbers)}
    (tmp_path / "vocab.json").write_text(json.dumps(content))
    torch.save(LSTM, tmp_path / "model.pt")
    with pytest.raises(UserError, match=naming("vocab.json", VOCAB - 1)):
        converted(tmp_path / "model.pt", {"characters": "vocab.json"})


@pytest.mark.parametrize("ending", [".pt", ".npz", ".safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused(ending: str, tmp_path: Path) -> None:
    """It would wait for a writer forever."""
    path = tmp_path / f"model{ending}"
    os.mkfifo(path)
    with pytest.raises(UserError, match=naming("not a regular file")):
        convert_rnn(path, tmp_path / "ours", library="torch")
