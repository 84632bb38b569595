"""Every command does what its help says, on tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longrnn import generate, load
from longrnn.text import ByteTokenizer
from tests.cli.conftest import CLI, Shelf, table
from tests.training.runs import metrics, tiny, write_config

PERPLEXITY = "eval perplexity TEXT --text book.txt --lengths"
STATES = "diagnose states TEXT --length 600 --train-length 64"
GRADIENTS = "diagnose gradients"
CALIBRATE = "calibrate SHORT --text filler.txt --text book.txt --method"
# A command, what it prints, and a file that it writes below results/.
CASES = """
    eval passkey TEXT --lengths 160,256 --n 2 | depth 75% | keys recalled | 256 | × as many
    eval passkey TEXT --lengths 200,300 --n 1 --insert-at 0,100 | 100 | keys recalled | 300
    eval passkey TEXT+forget_more LLAMA --lengths 160,300 --n 1 | LLAMA | 256 tokens
    eval passkey LLAMA+beyond --lengths 300 --n 1 | keys recalled
    PERPLEXITY 64,256 | bits per byte | nats per token over | 64
    PERPLEXITY 256 --context 64 --stride 32 | bits per byte
    PERPLEXITY 300 --newlines | bits per byte | 300
    eval perplexity LLAMA MAMBA2 --newlines --lengths 100 | difference from LLAMA
    eval reverse RUN --n 7 | token accuracy | exact match | edit distance | 8
    eval task RUN --lengths 5,6 --n 3 | token accuracy | 5 | 6
    diagnose memory TEXT --text book.txt --positions 16,64 | EffRem, T = 64 | After 64 tokens
    compare TEXT TEXT+forget_more mine.yaml | text+forget_more | difference from text | +0.00 [
    STATES --text book.txt --newlines | heads collapse | diagnosis.yaml | overview.png
    STATES --newlines --mitigation state_norm(threshold=0.01) | states.jsonl
    GRADIENTS RUN --lengths 4,8 | gradients through time | norms.png
    GRADIENTS TEXT --text book.txt --lengths 4 | gradients.jsonl | weights.png
    report RUN | backwards: loss | after 4 of 4 steps. | loss.png
    CALIBRATE state_norm(margin=2) | state_norm( | state_norm.yaml
    CALIBRATE token_filter --target-length 1k | token_filter( | token_filter.yaml
    CALIBRATE scale_delta(steps=1,windows=1) --target-length 512 | scale_delta( | scale_delta.yaml
    CALIBRATE scale_decay(steps=1,windows=1,seed=3) --target-length 300 | scale_decay.yaml
    CALIBRATE power_decay(steps=1,windows=1) --target-length 300 | power_decay.yaml
    CALIBRATE per_head(keys=1,windows=1) --target-length 300 | per_head.yaml
    info LLAMA | llama | 256 tokens | 264 bytes | CHECKPOINT+beyond
    info MAMBA2 | mamba2 | bytes per sequence
    generate LLAMA --prompt 'The sky' --max-new-tokens 249 |
    generate LLAMA+beyond --prompt 'The sky' --max-new-tokens 250 |
    generate MAMBA2 --prompt a --max-new-tokens 1 --mitigation forget_more |
    finetune TEXT --data book.txt --length 32 max_steps=1 --output run --dry-run | Peak memory
    --version | longrnn
"""
SHORTHANDS = ("PERPLEXITY", "STATES", "GRADIENTS", "CALIBRATE")
ROWS = table(CASES, {name: globals()[name] for name in SHORTHANDS})


@pytest.mark.parametrize(("command", "printed"), ROWS, ids=[command for command, _ in ROWS])
def test_a_command_prints_its_results_and_its_files(
    command: str, printed: list[str], cli: CLI, shelf: Shelf
) -> None:
    """Every file is named in the output; the same command prints the same and measures nothing."""
    words = [*shelf(command), "--quiet"]
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


@pytest.mark.parametrize("words", [["--output", "~/out"], ["--output=~/out"]])
def test_the_home_folder_is_expanded(
    words: list[str], cli: CLI, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that a shell left as it was means the home folder, and not a folder named `~`."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    command = ["eval", "passkey", models / "text", "--lengths", "256", "--n", "1", "--depths", "1"]
    assert cli(*command, *words).code == 0
    assert (tmp_path / "home/out/rows.jsonl").is_file()
    assert not Path("~").exists()


def test_a_prompt_is_not_a_path(cli: CLI, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~/` in a prompt stays as it is."""
    monkeypatch.setenv("HOME", "/the old manor house by the")
    command = ["generate", "collapse-tiny", "--max-new-tokens", "16"]
    written = [cli(*command, *how).out for how in (["--prompt", "~/sea"], ["--prompt=~/sea"])]
    Path("prompt.txt").write_text("~/sea")
    assert [cli(*command, "--prompt-file", "prompt.txt").out] * 2 == written


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
    assert "lstm" in lines["layers"]


def test_generate(cli: CLI, models: Path, tmp_path: Path) -> None:
    """`generate` prints what the model generates, also for a prompt from a file."""

    prompt = "The grass is\n"
    arguments = ["--max-new-tokens", "30"]
    result = cli("generate", models / "text", "--prompt", prompt, *arguments)
    assert result.code == 0

    ids = torch.tensor([ByteTokenizer().encode(prompt)])
    said = generate(load(models / "text"), ids, max_new_tokens=30).tokens[0]
    expected = ByteTokenizer().decode(said)
    if not expected.endswith("\ufffd"):
        assert result.out == expected + "\n"
    (tmp_path / "prompt.txt").write_text(prompt)
    again = cli("generate", models / "text", "--prompt-file", "prompt.txt", *arguments)
    assert again == result
    sampled = [
        cli("generate", models / "text", "--prompt", "a", "--temperature", "1", "--seed", seed)
        for seed in ("1", "1", "2")
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    assert len(sampled[0].out) > 20


def test_generate_stops(cli: CLI, models: Path) -> None:
    """`generate --stop` ends after the first stop text, which is printed."""
    text = cli("generate", models / "text", "--prompt", "a", "--temperature", "2", "--seed", "5")
    sign = next(c for c in text.out if c.isascii() and c.isprintable())
    arguments = ["--prompt", "a", "--temperature", "2", "--seed", "5", "--stop", "never said"]
    stopped = cli("generate", models / "text", *arguments, "--stop", sign)
    assert stopped.code == 0
    assert stopped.out == text.out[: text.out.index(sign) + 1] + "\n"


def test_train(cli: CLI, tmp_path: Path) -> None:
    """Overrides reach the run, which reports its end, also when there is nothing left to train."""
    write_config(tiny("reverse", Path("run")), tmp_path / "c.yaml")
    result = cli("train", "c.yaml", "max_steps=4", "model.d_model=6", "--quiet")
    assert result.code == 0
    assert result.out.startswith("run: ")
    assert result.err == ""
    assert [row["step"] for row in metrics(tmp_path / "run")] == [3, 4]
    assert load(tmp_path / "run").config.d_model == 6
    resumed = cli("train", "--resume", "run", "max_steps=4")
    assert resumed.code == 0
    assert resumed.out == result.out


def test_progress_goes_to_standard_error(cli: CLI, tmp_path: Path) -> None:
    """Progress is printed to standard error, results to standard output."""
    write_config(tiny("reverse", Path("run")), tmp_path / "c.yaml")
    result = cli("train", "c.yaml", "max_steps=2", "warmup_steps=1")
    assert result.out.startswith("run: ")
    assert "2/2" in result.err


def test_fine_tuning_from_the_command_line(cli: CLI, tmp_path: Path) -> None:
    """`learning_rate_scale` accepts patterns with dots on the command line; 0 freezes."""
    write_config(tiny("passkey", tmp_path / "run", max_steps=1), tmp_path / "c.yaml")
    assert cli("train", "c.yaml", "--quiet").code == 0
    scales = 'learning_rate_scale={embedding.weight: 0, "blocks.0.*": 0}'
    result = cli(
        "train", "c.yaml", "init_from=run", "model={}", "output_dir=tuned", scales, "--quiet"
    )
    assert result.code == 0, result.err
    before, after = load("run").state_dict(), load("tuned").state_dict()
    same = {name for name, value in after.items() if value.equal(before[name])}
    frozen = {name for name in after if name.startswith(("embedding.", "head.", "blocks.0."))}
    assert same == frozen
