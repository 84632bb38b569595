"""Every command does what its help says, on tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longrnn import generate, load
from longrnn.text import ByteTokenizer
from tests.cli.conftest import CLI, Shelf, table

PERPLEXITY = "eval perplexity TEXT --text book.txt --lengths"
STATES = "diagnose states TEXT --length 600 --train-length 64"
GRADIENTS = "diagnose gradients"
CALIBRATE = "calibrate SHORT --text filler.txt --text book.txt --method"
# A command, what it prints, and a file that it writes below results/.
CASES = """
    eval passkey TEXT --lengths 160,256 --n 2 | depth 75% | keys recalled | 256
    eval passkey TEXT --lengths 200,300 --n 1 --insert-at 0,100 | 100 | keys recalled | 300
    eval passkey TEXT+forget_more LLAMA --lengths 160,300 --n 1 | LLAMA | 256 tokens
    eval passkey LLAMA+beyond --lengths 300 --n 1 | keys recalled
    PERPLEXITY 64,256 | bits per byte | 64
    PERPLEXITY 256 --context 64 --stride 32 | bits per byte
    PERPLEXITY 300 --newlines | bits per byte | 300
    eval perplexity LLAMA MAMBA2 --newlines --lengths 100 | difference from LLAMA
    eval reverse RUN --n 7 | token accuracy | exact match | 8
    eval task RUN --lengths 5,6 --n 3 | token accuracy | 5 | 6
    diagnose memory TEXT --text book.txt --positions 16,64 | EffRem, T = 64
    compare TEXT TEXT+forget_more --suite mine.yaml | text+forget_more | difference from | +0.00 [
    STATES --text book.txt --newlines | heads collapse | diagnosis.yaml | states_2.png
    STATES --newlines --mitigation state_norm(threshold=0.01) | states.jsonl
    GRADIENTS RUN --length 8 | gradients through time | norms.png
    GRADIENTS TEXT --text book.txt --length 4 | gradients.jsonl | weights.png
    report RUN | backwards: loss | after 4 steps | metrics.png
    CALIBRATE state_norm(margin=2) | state_norm( | state_norm.yaml
    CALIBRATE state_norm --output norm.yaml | state_norm( | norm.yaml
    CALIBRATE token_filter --target-length 1k | token_filter( | token_filter.yaml
    CALIBRATE scale_delta(steps=1,windows=1) --target-length 512 | scale_delta( | scale_delta.yaml
    CALIBRATE scale_decay(steps=1,windows=1) --target-length 300 | scale_decay.yaml
    CALIBRATE power_decay(steps=1,windows=1) --target-length 300 | power_decay.yaml
    CALIBRATE per_head(keys=1,windows=1) --target-length 300 | per_head.yaml
    info LLAMA | llama | 256 tokens | 264 bytes per sequence after one | CHECKPOINT+beyond
    info MAMBA2 | mamba2 | bytes per sequence
    generate LLAMA --prompt 'The sky' --max-new-tokens 249 |
    generate LLAMA+beyond --prompt 'The sky' --max-new-tokens 250 |
    generate MAMBA2 --prompt a --max-new-tokens 1 --mitigation forget_more |
    finetune TEXT --data book.txt --length 32 max_steps=1 --output run --dry-run | Peak memory
"""
SHORTHANDS = ("PERPLEXITY", "STATES", "GRADIENTS", "CALIBRATE")
ROWS = table(CASES, {name: globals()[name] for name in SHORTHANDS})


@pytest.mark.parametrize(("command", "printed"), ROWS, ids=[command for command, _ in ROWS])
def test_a_command_prints_its_results_and_its_files(
    command: str, printed: list[str], cli: CLI, shelf: Shelf
) -> None:
    """Every file is named in the output; the same command prints the same and measures nothing."""
    words = shelf(command)
    result = cli(*words)
    assert (result.code, result.err) == (0, "")
    for piece in printed:
        assert piece.replace("LLAMA", "llama") in result.out
    files = {Path(line) for line in result.out.splitlines() if line.startswith("results/")}
    for folder in {file.parent for file in files}:
        assert set(folder.iterdir()) - {folder / "rows.jsonl"} == files
    rows = [path for file in files for path in file.parent.glob("rows.jsonl")]
    before = [path.read_bytes() for path in rows]
    assert cli(*words).out == result.out
    assert [path.read_bytes() for path in rows] == before


def test_info(cli: CLI, models: Path) -> None:
    """`info` prints the sizes and the fingerprint of the checkpoint."""
    result = cli("info", models / "text")
    model = load(models / "text")
    assert result.code == 0
    parameters = 256 * 16 + 4 * (16 * 16 * 2 + 16 * 2) + 2 * 16
    lines = dict(line.split(maxsplit=1) for line in result.out.splitlines())
    assert lines["checkpoint"] == str(models / "text")
    assert lines["parameters"] == f"{parameters:,} (torch.float32)"
    assert lines["state"].startswith(f"{2 * 16 * 4 + 8} bytes")
    assert lines["fingerprint"] == model.fingerprint()
    assert "lstm" in lines["cells"]


def test_generate(cli: CLI, models: Path, tmp_path: Path) -> None:
    """`generate` prints what the model generates, also for a prompt from a file; seeds repeat."""
    prompt, command = "The grass is\n", ["generate", models / "text", "--temperature", "2"]
    ids = torch.tensor([ByteTokenizer().encode(prompt)])
    generated = generate(load(models / "text"), ids, max_new_tokens=30).tokens[0]
    expected = ByteTokenizer().decode(generated)
    (tmp_path / "prompt.txt").write_text(prompt)
    for how in (["--prompt", prompt], ["--prompt-file", "prompt.txt"]):
        printed = cli("generate", models / "text", *how, "--max-new-tokens", "30").out
        assert printed == f"{expected}\n" or expected.endswith("\ufffd")
    one, again, other = (cli(*command, "--prompt", "a", "--seed", s).out for s in ("5", "5", "2"))
    assert one == again != other
    sign = next(c for c in one if c.isascii() and c.isprintable())
    stopped = cli(*command, "--prompt", "a", "--seed", "5", "--stop", "x" * 9, "--stop", sign)
    assert stopped.out == one[: one.index(sign) + 1] + "\n"
