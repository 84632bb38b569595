"""Models of the benchmarks: a Mamba-2 with random weights, its twins, and inputs."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longrnn import RecurrentConfig, RecurrentLM
from longrnn.checkpoints.layouts import as_hugging_face

MIXER = {"kind": "mamba2", "d_state": 128, "head_dim": 64, "expand": 2, "d_conv": 4, "n_groups": 1}
# Tokens of one run of llama.cpp's decoding: so many that loading does not hide their time.
DECODED = 32
# Tokens of which the blocks of a model compute their products together.
PIECE = 1024


def build(args: argparse.Namespace, backend: str = "auto") -> RecurrentLM:
    """Returns a model with random weights that depend only on its shape."""
    torch.manual_seed(0)
    mixer = MIXER if args.cell in (None, MIXER["kind"]) else {"kind": args.cell}
    mixer = mixer if backend == "auto" else {**mixer, "backend": backend}
    config = RecurrentConfig(args.vocab, args.d_model, args.layers, mixer, residual_in_fp32=True)
    return RecurrentLM(config).eval()


def draw(vocab: int, length: int) -> Tensor:
    """Returns random tokens, `(1, length)`."""
    return torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(length))


def transformers_twin(model: RecurrentLM) -> Any:
    """Returns the Hugging Face model with the same weights, of both Mambas."""
    twin: Any = as_hugging_face(model)
    return twin.eval().to(model.embedding.weight.dtype)


def transformer(vocab: int) -> Any:
    """Returns a Llama of the shape of SmolLM2-135M with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=2**15,
            tie_word_embeddings=True,
        )
    ).eval()


def products(module: nn.Module, length: int) -> None:
    """Computes only the matrix products with weights: a lower bound on the time of a prefill.

    A model computes those of its blocks for pieces of the tokens, and those of its head for one.
    """
    if not isinstance(module, RecurrentLM):
        products_of(module, length)
        return
    for start in range(0, length, PIECE):
        products_of(module.blocks, min(PIECE, length - start))
    products_of(module.head, 1)


def products_of(module: nn.Module, length: int) -> None:
    """Computes the products of all linear layers, and their gradients if they are enabled."""
    gradients = torch.is_grad_enabled()
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            x = torch.ones(length, layer.in_features, dtype=layer.weight.dtype)
            y = layer(x.requires_grad_(gradients))
            if gradients:
                torch.autograd.grad(y, (x, layer.weight), torch.ones_like(y))


def read_weights(module: nn.Module, steps: int) -> None:
    """Only reads every weight once per step: a lower bound on the time of decoding."""
    for _ in range(steps):
        for weight in module.parameters():
            # Sums in bfloat16 are slow: pairs are read as one float32.
            flat = weight.detach().view(-1)
            flat[: len(flat) // 2 * 2].view(torch.float32).sum()


def llama_timers(
    args: argparse.Namespace, part: str, dtype: str, tokens: int
) -> dict[str, Callable[[], float]]:
    """Returns a function that returns the seconds llama.cpp takes, by its own program.

    `--gguf` is a folder with the model as `float32.gguf` and `bfloat16.gguf`, which
    `convert_hf_to_gguf.py` of llama.cpp writes from a checkpoint of `longrnn convert --to hf`.
    Empty if the model or the program is missing.

    Args:
        args: of the benchmark.
        part: `prefill` or `decode`.
        dtype: of the model.
        tokens: of the work that is timed.
    """
    model = args.gguf and args.gguf / f"{dtype}.gguf"
    if args.llama_bench is None or model is None or not model.exists():
        return {}
    prompt, decoded = (tokens, 0) if part == "prefill" else (0, DECODED)
    command = [args.llama_bench, "-m", str(model), "-p", str(prompt), "-n", str(decoded)]
    return {"llama.cpp": lambda: llama_seconds(command) * tokens / (prompt or decoded)}


def llama_seconds(command: list[str]) -> float:
    """Returns the wall time that llama-bench measures."""
    options = ["-t", str(torch.get_num_threads()), "-r", "1", "-o", "json", "--no-warmup"]
    done = subprocess.run(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    (result,) = json.loads(done.stdout)
    return result["avg_ns"] / 1e9
