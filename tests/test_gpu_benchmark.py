"""`python -m benchmarks.gpu`: every part runs at a tiny size, and results are kept and judged."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.harness import Bench, error
from benchmarks.gpu.record import FAILED, MEASURED, NOT_RUN, PASSED, RAN, Record, line
from benchmarks.gpu.sizes import DRY, FULL, Cost

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
    path = tmp_path / "gpu.json"
    assert program.main(["--dry-run", "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert {row["part"] for row in content["rows"]} == set(program.PARTS)
    assert content["ceilings"] == {}
    assert "dry run" in content["device"]
    for row in content["rows"]:
        assert row["status"] in (PASSED, RAN) or "mamba_ssm" in row["name"], row
        if row["unit"] in OF_A_GPU:
            assert row["value"] is row["bound"] is row["ratio"] is None, row
    assert "ran, not timed" in capsys.readouterr().out


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_it_ends_with_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence names the remedy, and the exit code is 2."""
    assert program.main([]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert told.err.count("\n") == 1
    assert "add --dry-run" in told.err


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
