"""Several processes train like one, or the launch is refused.

Judged by what was written: gloo aborts about one run in ten at its very end.
"""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

from longrnn import load
from longrnn.training.config import TrainConfig
from tests.launched import CPU2, FSDP2, REPOSITORY, launched
from tests.training.forks import Fork, run
from tests.training.runs import metrics, tiny, train, write_config

SHORT: dict[str, Any] = {"max_steps": 5, "logging_steps": 1, "save_steps": 3}
SEGMENTS: dict[str, Any] = {"segments_per_step": 2, "gradient_checkpointing": "segment"}
DOCUMENTS: dict[str, Any] = {**SEGMENTS, "segments_per_step": "all", "length": {"max": 2048}}
CONFIGS = sorted((REPOSITORY / "configs/accelerate").glob("*.yaml"))


def trained(config: TrainConfig, folder: Path, flags: tuple[str, ...] = CPU2) -> None:
    """Trains a configuration in two processes; they continue a run that has begun."""
    output = Path(config.output_dir)
    path = write_config(config, folder / "config.yaml")
    begun = (output / "train.yaml").exists()
    words = ["--resume", output, f"max_steps={config.max_steps}"] if begun else [path]
    done = launched("train", *words, processes=2, flags=flags)
    assert (output / "model.safetensors").is_file() or config.freezes, done.stderr


def assert_alike(one: Path, two: Path, rel: float = 1e-4) -> None:
    """Metrics of two runs, and the logits of their models, agree to rounding."""
    expected, rows = metrics(one), metrics(two)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, wanted in zip(rows, expected, strict=True):
        assert row.keys() == wanted.keys()
        for name, value in row.items():
            assert value == pytest.approx(wanted[name], rel=rel, abs=1e-5), name
    tokens = torch.arange(8)[None]
    models: list[Any] = [load(folder) for folder in (one, two)]
    with torch.no_grad():
        logits = [model(tokens).logits for model in models]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-3, rtol=1e-3)


def assert_two_train_like_one(
    configured: Callable[..., TrainConfig], folder: Path, flags: tuple[str, ...] = CPU2
) -> None:
    """Two processes with 2 rows each end as one process with 4 rows does."""
    train(configured(folder / "one", per_device_train_batch_size=4))
    trained(configured(folder / "two", per_device_train_batch_size=2), folder, flags)
    assert_alike(folder / "one", folder / "two")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("carry", SEGMENTS),
        pytest.param("streams", DOCUMENTS, marks=pytest.mark.slow),
        pytest.param("fitted_noise", {}, marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_like_one(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert_two_train_like_one(partial(tiny, kind, **SHORT | changes), tmp_path)
    last = tmp_path / "two/checkpoint-00000005"
    assert sorted(path.name for path in last.glob("carry-*")) == ["carry-0.pt", "carry-1.pt"]
    done = run("train", "--resume", tmp_path / "two", "max_steps=6")
    assert done.returncode == 2
    assert "2 processes" in done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate_scale": {"*.D": 0}, **SEGMENTS},
        pytest.param({"gradient_checkpointing": "block"}, marks=pytest.mark.slow),
        pytest.param({"mixed_precision": "bf16"}, marks=pytest.mark.slow),
    ],
)
def test_shards_train_like_one_process(changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {"lr_scheduler_type": "constant", **SHORT, **changes}
    # Rows so many that a step walks through several segments, each through every block.
    train(tiny("carry", tmp_path / "one", per_device_train_batch_size=12, **changes))
    two = {"per_device_train_batch_size": 6, **changes}
    trained(tiny("carry", tmp_path / "two", **{**two, "max_steps": 3}), tmp_path, FSDP2)
    trained(tiny("carry", tmp_path / "two", **two), tmp_path, FSDP2)
    rel = 3e-2 if changes.get("mixed_precision") == "bf16" else 1e-4
    if rel == 1e-4:
        assert_alike(tmp_path / "one", tmp_path / "two", rel)
    else:  # sums of bfloat16 products depend on how rows are divided
        for row, wanted in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
            assert row["loss"] == pytest.approx(wanted["loss"], rel=rel)


@pytest.mark.parametrize(
    ("sizes", "length"),  # the longer ones are read in one pass or two
    [(range(2, 300, 7), 32), pytest.param([300, 300, 1500], 2048, marks=pytest.mark.slow)],
)
def test_shards_of_rows_of_different_lengths(sizes: Any, length: int, tmp_path: Path) -> None:
    """All processes call the blocks equally often, also where their rows are padding alone."""
    texts = "".join(f'{{"text": "{"to be or not " * 400:.{size}}"}}\n' for size in sizes)
    (tmp_path / "texts.jsonl").write_text(texts)
    task = {"kind": "text", "data": str(tmp_path / "texts.jsonl")}
    how = {**SHORT, **DOCUMENTS, "gradient_accumulation_steps": 1}
    configured = partial(tiny, "streams", task=task, **{**how, "length": {"max": length}})
    assert_two_train_like_one(configured, tmp_path, FSDP2)


@pytest.mark.parametrize(
    "flags", [CPU2, pytest.param(FSDP2, marks=pytest.mark.slow)], ids=["ddp", "fsdp2"]
)
def test_two_processes_train_the_adapter_of_one(flags: tuple[str, ...], tmp_path: Path) -> None:
    train(tiny("streams", tmp_path / "base", max_steps=1))
    peft = {"r": 2, "full": ["A_log", "dt_bias", "conv1d"]}
    how = {"init_from": str(tmp_path / "base"), "peft": peft, "max_steps": 3, "logging_steps": 1}
    assert_two_train_like_one(partial(tiny, "streams", **how), tmp_path, flags)


def test_an_error_of_all_processes_is_printed_once(tmp_path: Path) -> None:
    """`longrnn launch` ends with their exit code."""
    (tmp_path / "two").mkdir()
    (tmp_path / "two/notes.txt").write_text("mine")
    path = write_config(tiny("reverse", tmp_path / "two"), tmp_path / "config.yaml")
    command = ("launch", "--cpu", "--num_processes", "2", "train", path)
    done = run(*command)
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1)
    for words in (("launch", "train"), ("launch", "--cpu", "frain", path)):
        assert run(*words).returncode == 2
    assert "'compare' is neither" in run(*command[:-1], "compare").stderr


def test_a_signal_to_the_launcher_saves_the_run(tmp_path: Path) -> None:
    """It ends as the run does, and prints the launch that continues it."""
    output = tmp_path / "run"
    how = {"max_steps": 4000, "save_steps": 4000, "logging_steps": 3}
    path = write_config(tiny("carry", output, **how), tmp_path / "config.yaml")
    words = ("launch", "--cpu", "--num_processes", "2", "train")
    process = Fork(*words, path, folder=tmp_path / "log")
    assert process.when((output / "metrics.jsonl").exists)
    process.send(signal.SIGTERM)
    assert (process.end(), "Traceback" in process.err) == (0, False), process.err
    assert len([*output.glob("checkpoint-*/carry-*")]) == 2
    assert f"longrnn {' '.join(words)} --resume {output}" in process.out


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "FSDP"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "at least 2"),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR"),
    ],
)
def test_a_launch_that_cannot_train_is_refused(
    environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = write_config(tiny("passkey", tmp_path / "run"), tmp_path / "config.yaml")
    done = run("train", path, **environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_launch_configurations(path: Path) -> None:
    """Every launch file is valid for accelerate, names its command, and says how it was tested."""
    config: Any = load_config_from_file(str(path))
    text = path.read_text()
    assert f"longrnn launch --config_file {path.stem} " in text
    assert config.use_cpu == path.name.startswith("cpu")
    assert config.use_cpu != ("Not yet run on a GPU" in text)
    assert (config.distributed_type == "FSDP") == ("fsdp2" in path.name)
    assert (config.num_processes > 1) == (config.distributed_type != "NO")
    assert str(config.num_processes) in path.stem
