"""`python -m benchmarks.gpu`: every part runs at a tiny size, and results are kept and judged."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.harness import Bench, error
from benchmarks.gpu.record import FAILED, MEASURED, NOT_RUN, PASSED, RAN, Record, line
from benchmarks.gpu.sizes import DRY, FULL, Cost
from longrnn.ops import triton as kernels
from longrnn.ops.ssd import BACKENDS, ScanInputs
from tests import interpreter

CPU = torch.device("cpu")
# Units of figures that only a GPU may give.
OF_A_GPU = ("ms", "s", "tokens/s", "TB/s", "TFLOP/s", "GiB", "share")


def bench(path: Path | None = None, *, sizes=DRY, seconds: float = 100.0) -> Bench:
    return Bench(Record(path, {}), "part", sizes, CPU, time.monotonic() + seconds)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_dry_run_runs_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All checks pass on a CPU, and no figure is given that only a GPU has."""
    if kernels.available():
        interpreter.speed_up()
    path = tmp_path / "gpu.json"
    assert program.main(["--dry-run", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert {row["part"] for row in content["rows"]} == set(program.PARTS)
    assert content["ceilings"] == {}
    assert "dry run" in content["device"]
    for row in content["rows"]:
        assert row["status"] in (PASSED, RAN) or row["part"] == "mamba_ssm", row
        if row["unit"] in OF_A_GPU:
            assert row["value"] is row["bound"] is row["ratio"] is None, row
    assert "ran, not timed" in capsys.readouterr().out
    bars = {row["name"]: (row["limit"], row["limit_of"]) for row in content["rows"]}
    for name, bar in BARS.items():
        assert bars[name] == bar, name


# What the fast backend and decoding must reach on a GPU, and the exactness of a long call.
BARS = {
    "triton, recurrence, forward, beside mamba_ssm": (1.3, "ratio"),
    "triton, recurrence, backward, beside mamba_ssm": (1.6, "ratio"),
    "triton, state_norm, 64 tokens": (1.4, "ratio"),
    "triton, window of 16, 64 tokens": (1.5, "ratio"),
    "decoding by a graph, 1 rows, per token": (3.0, "value"),
    "triton, 128 tokens, last 32, and pieces": (2e-5, "value"),
    "triton, 128 tokens, state, and pieces": (2e-5, "value"),
    "triton, float32, values without gradients": (1e-5, "value"),
    "triton, float32, gradients": (1e-5, "value"),
    "triton, bfloat16, values without gradients": (2e-5, "value"),
    "triton, bfloat16, values with gradients": (8e-3, "value"),
    "triton, bfloat16, gradients": (2e-2, "value"),
}


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_it_ends_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence names the remedy, and the exit code is 2."""
    assert program.main([]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert told.err.count("\n") == 1
    assert "--dry-run" in told.err


def test_a_failed_check_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error above its limit, a NaN, and an exception are failures; later items still run."""

    def run(bench: Bench) -> None:
        bench.check("large", 2e-5, 1e-5)
        bench.check("nan", float("nan"), 1e-5)
        bench.attempt("broken", lambda: 1 / 0)
        bench.check("good", 1e-6, 1e-5)

    monkeypatch.setitem(program.PARTS, "correctness", program.Part(run, 10))
    assert program.main(["--dry-run", "--parts", "correctness"]) == 1
    out = capsys.readouterr().out
    assert "3 failed" in out
    assert "1 passed" in out
    assert "ZeroDivisionError: division by zero" in out


def test_a_wrong_backend_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrence that is off by a hundred-thousandth of its largest entry does not pass."""
    from benchmarks.gpu import correctness

    def wrong(inputs, state):
        y, final = exact(inputs, state)
        return y * (1 + 3e-5), final

    exact = correctness.BACKENDS["chunked"]
    monkeypatch.setitem(correctness.BACKENDS, "chunked", wrong)
    found = bench()
    correctness._against_the_loop(found, "chunked", torch.float32)
    failed = [row.name for row in found.record.rows if row.status == FAILED]
    assert "chunked, float32, values without gradients" in failed


def test_results_survive_an_interruption(tmp_path: Path) -> None:
    """The file holds every row that was found before the program was killed."""
    found = bench(tmp_path / "gpu.json")
    found.check("first", 0.0, 0.0)

    def interrupted() -> None:
        found.check("second", 0.0, 0.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found.attempt("interrupted", interrupted)
    again = Record(tmp_path / "gpu.json", {})
    again.load()
    assert again.rows == found.record.rows
    assert [row.name for row in again.rows] == ["first", "second"]


def test_what_does_not_fit_into_the_budget_is_not_started() -> None:
    """It is recorded as not run, with the reason."""
    found = bench(sizes=FULL, seconds=5)
    found.attempt("long", lambda: pytest.fail("started"), seconds=60)
    (row,) = found.record.rows
    assert row.status == NOT_RUN
    assert "60 s needed" in row.reason


def test_bounds_and_ratios() -> None:
    """A bound is the larger of the time of the bytes and that of the operations."""
    found = bench()
    found.record.ceilings = {"bytes_per_second": 1e12, "flops_per_second": 1e14}
    assert Cost(2e9, 1e11).bound_ms(found.record.ceilings) == pytest.approx(2.0)
    assert Cost(2e9, 1e12).bound_ms(found.record.ceilings) == pytest.approx(10.0)
    found.compare("fast", 3.0, 2.5, "peer", cost=Cost(2e9), limit=1.3)
    found.compare("slow", 4.0, 2.5, "peer", cost=Cost(2e9), limit=1.3)
    found.compare("alone", 4.0, None, "peer", limit=1.3)
    fast, slow, alone = found.record.rows
    assert (fast.status, slow.status, alone.status) == (PASSED, FAILED, MEASURED)
    assert "no time of peer" in alone.reason
    listed = found.record.summary().splitlines()
    assert [one.split(":")[0] for one in listed[:-1]] == ["Failed", "Not checked"]
    assert " slow " in listed[0]
    assert " alone " in listed[1]
    # Half of the ceilings give no bound, instead of an error.
    del found.record.ceilings["flops_per_second"]
    found.figure("without a bound", 3.0, "ms", cost=Cost(2e9))
    assert found.record.rows[-1].bound is None
    assert fast.ratio == pytest.approx(1.2)
    assert "1.50" in line(fast)  # of the bound


def test_error_is_relative_to_the_largest_entry() -> None:
    assert error(torch.tensor([1.0, 10.1]), torch.tensor([1.0, 10.0])) == pytest.approx(
        0.01, rel=1e-3
    )


def test_help_has_an_example_and_the_budgets_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """All parts together may take nine minutes."""
    with pytest.raises(SystemExit) as ended:
        program.arguments(["--help"])
    assert ended.value.code == 0
    assert "python -m benchmarks.gpu --json gpu.json" in capsys.readouterr().out
    assert sum(part.seconds for part in program.PARTS.values()) < 540


def test_an_error_that_is_not_finite_is_valid_json(tmp_path: Path) -> None:
    """JSON has no NaN: the reason says what the error was."""
    found = bench(tmp_path / "gpu.json")
    found.check("nan", float("nan"), 1e-5)
    found.check("infinite", float("inf"), 1e-5)
    text = (tmp_path / "gpu.json").read_text()
    rows = json.loads(text, parse_constant=lambda name: pytest.fail(name))["rows"]
    assert [(row["status"], row["value"]) for row in rows] == [(FAILED, None)] * 2
    assert "nan" in rows[0]["reason"]


def test_a_gpu_without_the_fast_backend_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing would show that its limits were not checked."""
    from benchmarks.gpu import inputs

    monkeypatch.delitem(inputs.BACKENDS, "triton", raising=False)
    found = bench()
    found.device = torch.device("cuda")
    assert inputs.backends(found) == ["chunked"]
    assert [(row.name, row.status) for row in found.record.rows] == [("backend triton", FAILED)]


def test_times_are_medians_after_warm_up_with_flushed_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call that compiles and the first timed one do not count; slow calls run less often."""
    from benchmarks.gpu import harness

    times, calls = iter([90.0, 1.0, 5.0, 2.0, 4.0, 3.0, 2100.0]), []

    def timed(call, flushed) -> float:
        assert flushed.numel() * flushed.element_size() > 2**26
        call()
        return next(times)

    monkeypatch.setattr(harness, "_timed", timed)
    found = bench(sizes=replace(FULL, repeats=5))
    assert found.milliseconds(lambda: calls.append(1)) == 3.0
    assert len(calls) == 7
    assert found.milliseconds(lambda: calls.append(1)) == 2100.0


def test_the_times_beside_mamba_ssm_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes of both implementations are timed in one process; the ratio has the limit."""
    from benchmarks.gpu import peer

    def scan(*tensors):
        return BACKENDS["reference"](ScanInputs(*tensors[:-1]), tensors[-1])

    # Forward; then backward: without and with the backward pass, first ours and then the peer's.
    times = iter([1.25, 1.0, 2.0, 5.5, 1.0, 3.0])

    def milliseconds(self: Bench, call) -> float:
        call()
        return next(times)

    monkeypatch.setattr(peer, "peer_scan", lambda device: scan)
    monkeypatch.setitem(peer.BACKENDS, peer.FAST, BACKENDS["chunked"])
    monkeypatch.setattr(Bench, "milliseconds", milliseconds)
    found = bench()
    peer.run(found)
    rows = [row for row in found.record.rows if row.limit is not None]
    assert [(row.ratio, row.limit) for row in rows] == [(1.25, 1.3), (1.75, 1.6)]
    assert [row.status for row in rows] == [PASSED, FAILED]


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs the processes of parts in this one; returns their exit codes."""
    codes: list[int] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        try:
            codes.append(program.main([*command[command.index("--child") :]]))
        except MemoryError:  # stands for a process that dies
            codes.append(-9)
        return subprocess.CompletedProcess(command, codes[-1])

    monkeypatch.setattr(subprocess, "run", run)
    return codes


def test_after_a_lost_device_another_process_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: list[int]
) -> None:
    """Every piece is begun once, except what later ones need."""
    begun: list[str] = []

    def run(bench: Bench) -> None:
        def work(name: str) -> None:
            begun.append(name)
            if name == "bad":
                raise RuntimeError("an illegal memory access was encountered")
            bench.check(name, 0.0, 0.0)

        monkeypatch.setattr(bench, "is_lost", lambda: begun[-1] == "bad")
        bench.attempt("build", lambda: begun.append("build"), again=True)
        for name in ("first", "bad", "last"):
            bench.attempt(name, lambda name=name: work(name))

    monkeypatch.setitem(program.PARTS, "kernels", program.Part(run, 100))
    record = Record(tmp_path / "gpu.json", {})
    program.run_child("kernels", record, dry=True)
    assert in_this_process == [program.LOST, 0]
    assert begun == ["build", "first", "bad", "build", "last"]
    assert [(row.name, row.status) for row in record.rows] == [
        ("first", PASSED),
        ("bad", FAILED),
        ("last", PASSED),
    ]


def test_after_a_process_that_died_another_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: list[int]
) -> None:
    """The row names the piece in which it died."""

    def run(bench: Bench) -> None:
        bench.record.begin(bench.part, "build")
        if bench.record.begin(bench.part, "bad"):
            raise MemoryError
        bench.attempt("last", lambda: bench.check("last", 0.0, 0.0))

    monkeypatch.setitem(program.PARTS, "kernels", program.Part(run, 100))
    record = Record(tmp_path / "gpu.json", {})
    program.run_child("kernels", record, dry=True)
    assert in_this_process == [-9, 0]
    died, last = record.rows
    assert died.reason == "its process ended with -9, in bad"
    assert (last.name, last.status) == ("last", PASSED)


def test_processes_that_make_no_progress_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_this_process: list[int]
) -> None:
    """A piece that every process needs and that loses the device is not tried for ever."""

    def run(bench: Bench) -> None:
        monkeypatch.setattr(bench, "is_lost", lambda: True)
        bench.attempt("build", lambda: 1 / 0, again=True)

    monkeypatch.setitem(program.PARTS, "model", program.Part(run, 100))
    record = Record(tmp_path / "gpu.json", {})
    program.run_child("model", record, dry=True)
    assert in_this_process == [program.LOST] * 2
    assert "the device was lost" in record.rows[-1].reason


@pytest.mark.slow
def test_a_part_in_its_own_process_returns_its_rows(tmp_path: Path) -> None:
    """A process that ends early leaves what it found, and a failed row."""
    record = Record(tmp_path / "gpu.json", {"device": "test"})
    record.ceilings = {"bytes_per_second": 1e12, "flops_per_second": 1e14}
    program.run_child("training", record, dry=True, seconds=120)
    assert record.about == {"device": "test"}
    assert {row.part for row in record.rows} == {"training"}
    assert not record.count(FAILED)
    before = len(record.rows)
    program.run_child("training", record, dry=True, seconds=0.1)
    assert len(record.rows) == before + 1
    assert "did not end within" in record.rows[-1].reason
