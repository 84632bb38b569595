"""The benchmarks run, and their grids save the tokens that they require (counted, not timed)."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks.evaluation_cpu.passkey import BARS, grids
from longrnn.evaluation.passkey import cost
from longrnn.hf.opened import OpenCheckpoint
from longrnn.text import ByteTokenizer
from tests.contracts.builders import build_model
from tests.training.runs import ENVIRONMENT

ROOT = Path(__file__).parent.parent


def ratio(name: str, scale: int) -> float:
    model = build_model("rnn", vocab_size=256)
    found = cost([OpenCheckpoint("model", model, ByteTokenizer())], grids(scale)[name])
    return found["model"].ratio


@pytest.mark.parametrize("name", list(BARS))
def test_tokens(name: str) -> None:
    """Sharing prefixes saves as many tokens as the benchmark requires."""
    tokens, _ = BARS[name]
    assert ratio(name, 1) >= tokens


PROGRAMS = {
    "generate_cpu": (
        ["--layers", "1", "--d-model", "64", "--vocab", "64", "--tokens", "4", "--repeats", "1"],
        "the same tokens: True",
    ),
    "gated_deltanet_cpu": (["--quick"], "decoding"),
    "head_cpu": (["--vocab", "256", "--rows", "2", "--tokens", "4", "--d-model", "16"], "2^23"),
    "hybrid_prefill_cpu": (
        ["--kinds", "bamba", "--d-model", "64", "--tokens", "64", "--repeats", "1"],
        "bamba longrnn",
    ),
    "mitigations_cpu": (
        ["--layers", "1", "--d-model", "64", "--tokens", "64", "--loop-tokens", "4"]
        + ["--stream", "0"],
        "token by token",
    ),
    "packing_cpu": (
        ["--layers", "1", "--d-model", "64", "--tokens", "64", "--vocab", "64", "--lengths", "9"],
        "packed documents",
    ),
    "peers_cpu": (["--quick"], "passkey-tiny, prefill of 1,024"),
    "prefill_cpu": (
        ["--layers", "1", "--d-model", "64", "--vocab", "64", "--tokens", "64", "--long", "256"],
        "cost per token",
    ),
    "ssd_chunk_cpu": (["--chunks", "32", "--segments", "256", "--no-train"], "32"),
    "stepwise_cpu": (
        ["--kinds", "gru", "--d-model", "16", "--rows", "2", "--tokens", "8", "--vocab", "16"]
        + ["--large-vocab", "64", "--large-tokens", "8"],
        "gru",
    ),
    "stepwise_mitigations_cpu": (["--d-model", "16", "--tokens", "8"], "lstm"),
    "training_cpu": (
        ["--layers", "1", "--d-model", "64", "--tokens", "64", "--vocab", "64", "--steps", "60"],
        "speedup",
    ),
}


# Those that measure memory in processes of their own.
SLOW = {"head_cpu", "prefill_cpu", "stepwise_cpu"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PROGRAMS]
)
def test_a_program_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every benchmark runs at a small size."""
    arguments, expected = PROGRAMS[name]
    once = ["--repeats", "1", "--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", [name, *arguments, *once])
    import_module(f"benchmarks.{name}").main()
    assert expected in capsys.readouterr().out


def test_every_program_is_run() -> None:
    """Every benchmark is listed in PROGRAMS."""
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*_cpu.py")}
    assert programs == set(PROGRAMS)


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.evaluation_cpu", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
        check=False,
    )


def test_an_unknown_part() -> None:
    """An unknown part is refused with the known ones."""
    done = benchmark("paskey")
    assert done.returncode == 2
    assert "parts: passkey, perplexity, harness" in done.stdout


@pytest.mark.slow
def test_the_parts_run(tmp_path: Path) -> None:
    """Every part of the evaluation benchmark runs at a small size."""
    out = str(tmp_path / "f.json")
    small = ["--scale", "128", "--keys", "1", "--threads", "1", "--json", out]
    done = benchmark("passkey", *small)
    assert done.returncode == 0, done.stderr
    assert "insertion points: " in done.stdout
    assert "python -m benchmarks.evaluation_cpu.passkey" in Path(out).read_text()
    done = benchmark("perplexity", "--scale", "64", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert "peak memory" in done.stdout


def test_llama_cpp_is_timed_by_its_own_program(tmp_path: Path) -> None:
    """A model that is missing is left out; times are per call of the other contenders."""
    from benchmarks.llama_bench import DECODED, Peer

    program = tmp_path / "llama-bench"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/args\necho \'[{{"avg_ns": 2e9}}]\'\n')
    program.chmod(0o755)
    (tmp_path / "float32.gguf").touch()
    peer = Peer(str(program), tmp_path)
    assert peer.timers("decode", "bfloat16", 4) == {}
    assert peer.timers("long", "float32", 4) == {}
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert peer.timers("decode", "float32", 4)["llama.cpp"]() == 2 * 4 / DECODED
        assert f"-n {DECODED} -p 0 -t 2 -r 1" in (tmp_path / "args").read_text()
        assert peer.timers("prefill", "float32", 512)["llama.cpp"]() == 2
    finally:
        torch.set_num_threads(before)
