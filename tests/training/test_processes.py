"""Two processes train like one, or the launch is refused.

Judged by what was written: gloo aborts about one run in ten at its very end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

from longrnn import load
from longrnn.errors import UserError
from longrnn.text import ByteTokenizer
from longrnn.training.config import TrainConfig
from longrnn.training.documents import build_corpus
from longrnn.training.trainer import Trainer
from tests.launched import CPU2, REPOSITORY, ended, launch, launched
from tests.refusals import naming
from tests.texts import TEXTS
from tests.training.forks import run
from tests.training.runs import ENVIRONMENT, metrics, tiny, train, write_config

SHORT: dict[str, Any] = {"max_steps": 5, "logging_steps": 1, "save_steps": 3}


def trained(
    config: TrainConfig,
    folder: Path,
    flags: tuple[str, ...],
    *options: str,
    before: Callable[[], None] | None = None,
    processes: int = 2,
) -> CompletedProcess[str]:
    """Trains a configuration in several processes."""
    path = write_config(config, folder / "config.yaml")
    arguments = ("train", path, "--quiet", *options)
    return launched(*arguments, processes=processes, flags=flags, before=before)


def trained_by_launcher(
    config: TrainConfig, folder: Path, *flags: str, processes: int = 2
) -> CompletedProcess[str]:
    """Trains a configuration under `accelerate launch` itself."""
    path = write_config(config, folder / "config.yaml")
    return ended(launch("train", path, "--quiet", processes=processes, flags=flags))


FSDP2 = ("--config_file", str(REPOSITORY / "configs/accelerate/cpu2_fsdp2.yaml"))
CONFIGS = sorted((REPOSITORY / "configs/accelerate").glob("*.yaml"))


@pytest.mark.parametrize(
    "kind",
    [
        "carry",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("passkey", "streams", "fitted_noise")),
    ],
)
def test_two_processes_train_like_one(kind: str, tmp_path: Path) -> None:
    """Two processes give the weights and metrics of one process with twice the batch."""
    how = dict(SHORT)
    if kind == "streams":  # states carried over 20 steps of two segments, from a corpus
        build_corpus(
            [Path(file) for file in TEXTS],
            ByteTokenizer(),
            tmp_path / "c",
            name="bytes",
            quiet=True,
        )
        task = {"kind": "text", "corpus": str(tmp_path / "c"), "max_segments": 7}
        how |= {"max_steps": 20, "task": task, "initial_state": {"kind": "carry"}}
    steps = how["max_steps"]
    one = tiny(kind, tmp_path / "one", per_device_train_batch_size=4, **how)
    two = tiny(kind, tmp_path / "two", per_device_train_batch_size=2, num_processes=2, **how)
    train(one)
    done = trained_by_launcher(two, tmp_path, *CPU2)
    assert (tmp_path / "two/model.safetensors").is_file(), done.stderr
    expected, rows = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row, wanted in zip(rows, expected, strict=True):
        assert row.keys() == wanted.keys()
        for name, value in row.items():
            assert value == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name
        assert row["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    checkpoint = tmp_path / f"two/checkpoint-{steps:08d}"
    carried = sorted(path.name for path in checkpoint.glob("carry-*.pt"))
    assert carried == ["carry-0.pt", "carry-1.pt"]
    assert load(checkpoint).fingerprint() == load(tmp_path / "two").fingerprint()


def record_shards() -> None:
    """Lets every process of a run write what part of the weights it holds."""
    whole_run = Trainer.train

    def train(self: Trainer) -> None:
        held = sum(getattr(p, "_local_tensor", p).numel() for p in self.objective.parameters())
        whole = sum(p.numel() for p in self.objective.parameters())
        name = f"held-{self.accelerator.process_index}.json"
        (Path(self.config.output_dir).parent / name).write_text(json.dumps([held, whole]))
        whole_run(self)

    Trainer.train = train  # type: ignore[method-assign]


def test_shards_train_like_one_process(tmp_path: Path) -> None:
    """FSDP2: the model is sharded and trains like one process; checkpoints hold whole tensors and
    resume exactly."""
    changes = {"lr_scheduler_type": "constant", "freeze": ["*.D"], **SHORT}
    # Rows so many that a step walks through several segments, each through every block.
    one = tiny("carry", tmp_path / "one", per_device_train_batch_size=12, **changes)
    two = {"per_device_train_batch_size": 6, "num_processes": 2, **changes}
    first = tiny("carry", tmp_path / "two", **{**two, "max_steps": 3})
    train(one)
    done = trained(first, tmp_path, FSDP2, before=record_shards)
    assert (tmp_path / "two/model.safetensors").is_file(), done.stderr
    held = [json.loads((tmp_path / f"held-{rank}.json").read_text()) for rank in (0, 1)]
    assert held[0][0] + held[1][0] == held[0][1] == held[1][1]
    assert max(held[0][0], held[1][0]) < 0.6 * held[0][1]
    done = trained(tiny("carry", tmp_path / "two", **two), tmp_path, FSDP2, "--resume")
    rows = metrics(tmp_path / "two")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5], done.stderr
    for row, wanted in zip(rows, metrics(tmp_path / "one"), strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert row["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    weights = [load(tmp_path / name).state_dict() for name in ("one", "two")]
    for name, value in weights[1].items():
        torch.testing.assert_close(value, weights[0][name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        (2, {"mixed_precision": "bf16"}),  # matrices are gathered in bfloat16
        (4, {"mixed_precision": "bf16", "shard_size": 2}),  # two copies of two shards (HSDP)
        (4, {"shard_size": 2}),
    ],
    ids=["bf16", "hybrid-bf16", "hybrid"],
)
def test_every_way_of_sharding_trains_like_one_process(
    processes: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """FSDP2 and HSDP give the losses and weights of one process of the same precision."""
    precision = {"mixed_precision": changes.get("mixed_precision", "no")}
    how = {"lr_scheduler_type": "constant", **SHORT}
    rows = 12 // processes
    one = tiny("carry", tmp_path / "one", per_device_train_batch_size=12, **how, **precision)
    many = {"per_device_train_batch_size": rows, "num_processes": processes, **how, **changes}
    train(one)
    config = tiny("carry", tmp_path / "many", **many)
    done = trained(config, tmp_path, FSDP2, processes=processes)
    found, expected = metrics(tmp_path / "many"), metrics(tmp_path / "one")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5], done.stderr
    # Sums of bfloat16 products depend on how rows are divided.
    tolerance = 2e-3 if precision["mixed_precision"] == "bf16" else 1e-5
    for row, wanted in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=tolerance)
    weights = [load(tmp_path / name).state_dict() for name in ("one", "many")]
    for name, value in weights[1].items():
        assert value.dtype == torch.float32
        # Five steps of AdamW may move a weight by five times the learning rate.
        limit = 2 * 5 * many.get("learning_rate", 2e-3) if tolerance > 1e-4 else 1e-4
        assert (value - weights[0][name]).abs().max() <= limit, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "rows", "changes"),
    [(2, 4, {}), (4, 2, {"shard_size": 2}), (4, 2, {})],
    ids=["one-group", "hybrid", "two-groups"],
)
def test_shards_and_context_parallelism_together(
    processes: int, rows: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Processes that divide rows and weights give the losses and weights of one process."""
    how = {"max_steps": 4, "logging_steps": 1, "save_steps": 2}
    train(tiny("streams", tmp_path / "one", per_device_train_batch_size=4, **how))
    how |= {"per_device_train_batch_size": rows, "context_parallel_size": 2, **changes}
    many = tiny("streams", tmp_path / "many", num_processes=processes, **how)
    done = trained(many, tmp_path, FSDP2, processes=processes)
    found, expected = metrics(tmp_path / "many"), metrics(tmp_path / "one")
    assert [row["step"] for row in found] == [1, 2, 3, 4], done.stderr
    for row, wanted in zip(found, expected, strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        assert row["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    weights = [load(tmp_path / name).state_dict() for name in ("one", "many")]
    for name, value in weights[1].items():
        torch.testing.assert_close(value, weights[0][name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("changes", "environment", "message"),
    [
        ({}, {"FSDP_VERSION": "1"}, "FSDP"),
        ({}, {"FSDP_VERSION": "2"}, ""),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    changes: dict[str, Any], environment: dict[str, str], message: str, tmp_path: Path
) -> None:
    """FSDP for what cannot be sharded is refused."""
    path = write_config(tiny("passkey", tmp_path / "run", **changes), tmp_path / "config.yaml")
    done = run("train", path, "--quiet", ACCELERATE_USE_FSDP="true", **environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_another_mixed_precision_than_launched_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch and a run of different mixed precision are refused."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(UserError, match=naming("mixed_precision", "bf16")):
        Trainer(tiny("passkey", tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp8", "mixed_precision"),
        ("ACCELERATE_DYNAMO_BACKEND", "inductor", "dynamo_backend"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "1", "parallelism_config"),
        ("ACCELERATE_DOWNCAST_BF16", "yes", "downcast_bf16"),
    ],
)
def test_a_launch_that_would_change_the_run_is_refused(
    name: str, value: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting of accelerate that would change the run is applied or refused."""
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        Trainer(tiny("passkey", tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()


def test_float16_on_a_cpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mixed_precision=fp16 on a CPU is refused."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(UserError, match=naming("mixed_precision", "GPU")):
        Trainer(tiny("passkey", tmp_path / "run", mixed_precision="fp16"), quiet=True)
    assert not (tmp_path / "run").exists()


# The launcher's own variables that leave a run as it is.
HARMLESS = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_USE_DEEPSPEED": "false",
    "ACCELERATE_GRADIENT_CLIPPING": "0.001",
    "ACCELERATE_EVEN_BATCHES": "false",
    "ACCELERATE_SPLIT_BATCHES": "true",
    "ACCELERATE_CPU_AFFINITY": "0",
}


@pytest.mark.parametrize("micro", [1, 2])
def test_the_environment_does_not_change_the_gradients(
    micro: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are divided once, by the number of micro-batches of the configuration."""
    changes = {"max_steps": 2, "logging_steps": 1, "gradient_accumulation_steps": micro}
    train(tiny("reverse", tmp_path / "plain", **changes))
    for name, value in HARMLESS.items():
        monkeypatch.setenv(name, value)
    train(tiny("reverse", tmp_path / "launched", **changes))
    assert metrics(tmp_path / "launched") == metrics(tmp_path / "plain")


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


@pytest.mark.slow
def test_one_process_under_accelerate(tmp_path: Path) -> None:
    """A launch of one process trains exactly like the plain command."""
    config = tiny("reverse", tmp_path / "launched", **SHORT)
    flags = ("--config_file", str(REPOSITORY / "configs/accelerate/cpu1.yaml"))
    done = trained_by_launcher(config, tmp_path, *flags, processes=1)
    assert done.returncode == 0, done.stderr
    train(tiny("reverse", tmp_path / "plain", **SHORT))
    assert metrics(tmp_path / "launched") == metrics(tmp_path / "plain")


@pytest.mark.slow
def test_multi_gpu_without_the_cpu_flag_is_synchronised_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes are synchronised or refused."""
    two = tiny("passkey", tmp_path / "two", num_processes=2, **SHORT)
    flags = ("--multi_gpu", "--num_machines", "1")
    flags += ("--mixed_precision", "no", "--dynamo_backend", "no")
    monkeypatch.delitem(ENVIRONMENT, "ACCELERATE_USE_CPU")
    done = trained_by_launcher(two, tmp_path, *flags)
    if (tmp_path / "two/model.safetensors").is_file():
        train(tiny("passkey", tmp_path / "one", per_device_train_batch_size=4, **SHORT))
        losses = [[row["loss"] for row in metrics(tmp_path / n)] for n in ("one", "two")]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    else:
        assert "error: " in done.stderr
        assert not (tmp_path / "two/metrics.jsonl").exists()


def test_one_process_where_two_were_asked_for_is_refused(tmp_path: Path) -> None:
    """A launch of 2 that starts only one process is refused."""
    two = tiny("passkey", tmp_path / "two", num_processes=2, **SHORT)
    done = trained_by_launcher(two, tmp_path, "--cpu", "--num_machines", "1")
    assert done.returncode != 0
    assert "processes" in done.stderr
    assert not (tmp_path / "two").exists()


def test_a_process_alone_with_a_world_size_is_refused(tmp_path: Path) -> None:
    """WORLD_SIZE without RANK is refused."""
    config = tiny("passkey", tmp_path / "run", **SHORT)
    path = write_config(config, tmp_path / "config.yaml")
    done = run("train", path, "--quiet", WORLD_SIZE="2")
    assert done.returncode == 2
    assert done.stderr.startswith("error: 2 processes ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()
