"""Every command does what its help says, on tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from longrnn import load
from longrnn.text import ByteTokenizer
from tests.cli.conftest import CLI
from tests.training.runs import metrics, tiny, write_config


def test_version(cli: CLI) -> None:
    """`--version` prints the version of the package."""
    from longrnn import __version__

    assert cli("--version") == (0, f"longrnn {__version__}\n", "")


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
    from longrnn import generate

    prompt = "The grass is\n"
    arguments = ["--max-new-tokens", "30"]
    result = cli("generate", models / "text", "--prompt", prompt, *arguments)
    assert result.code == 0
    import torch

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


def test_report(cli: CLI, models: Path, tmp_path: Path) -> None:
    """`report` writes outside the folder of the run."""
    before = sorted(path.name for path in (models / "backwards").iterdir())
    result = cli("report", models / "backwards")
    assert result.code == 0, result.err
    assert result.out.startswith("backwards: loss ")
    assert "after 4 of 4 steps." in result.out
    written = result.out.splitlines()[1:]
    assert written[0] == "results/training/backwards/report.html"
    assert all((tmp_path / line).is_file() for line in written)
    assert sorted(path.name for path in (models / "backwards").iterdir()) == before


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
    refused = cli("train", "c.yaml", "output_dir=other", "learning_rate_scale={embeding.weight: 0}")
    assert refused.code == 2
    assert "embedding.weight" in refused.err
    assert not (tmp_path / "other").exists()
