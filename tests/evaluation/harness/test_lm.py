"""The model type gives the results of lm-eval's own `hf` type with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longrnn.errors import UserError
from longrnn.evaluation import harness
from longrnn.hf.tokenizer import load_tokenizer
from longrnn.models import RecurrentLM
from longrnn.models.checkpoint import save_model
from tests.evaluation.harness.conftest import Setting, evaluate, hf_model

LongRNN: Any = harness.LongRNN  # its decorator hides its parameters
TASKS = ["tiny_choice", "tiny_rolling", "tiny_generate"]
LONG = 100_000


def ours(setting: Setting, **options: Any) -> Any:
    return LongRNN(setting.model, tokenizer=setting.checkpoint, quiet=True, **options)


def responses(results: dict[str, Any], task: str) -> list[Any]:
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


@pytest.fixture(scope="module")
def theirs(setting: Setting) -> dict[str, Any]:
    # Without max_length the `hf` type cuts Mamba-2 at 2,048 tokens.
    model = hf_model(str(setting.checkpoint), device="cpu", max_length=LONG, batch_size=1)
    return evaluate(model, setting.tasks, *TASKS, num_fewshot=2)


@pytest.fixture(scope="module")
def found(setting: Setting) -> dict[str, Any]:
    return evaluate(ours(setting, batch_size=3), setting.tasks, *TASKS, num_fewshot=2)


def test_every_response_is_that_of_hf(
    setting: Setting, found: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Choices, rolling likelihoods, generated texts and metrics; the results record the model."""
    choices, rolling, generated = (
        list(zip(responses(found, task), responses(theirs, task), strict=True)) for task in TASKS
    )
    for mine, other in choices:
        assert [r[0] for r in mine] == pytest.approx([r[0] for r in other], abs=1e-4)
        assert [bool(r[1]) for r in mine] == [bool(r[1]) for r in other]
    assert all(mine == pytest.approx(other, abs=1e-4) for mine, other in rolling)
    assert min(rolling[0][1]) < -10
    assert all(mine == other for mine, other in generated)
    assert any(mine[0] for mine, _ in generated)
    for task in TASKS:
        for name, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][name] == pytest.approx(value, rel=1e-5), (task, name)
    config = found["config"]
    assert config["model_fingerprint"] == setting.model.fingerprint()
    assert config["max_length"] is None
    assert config["truncated"] == {"requests": 0, "tokens": 0, "split_documents": 0}


def test_by_name(tmp_path: Path, setting: Setting) -> None:
    """`model="longrnn"` accepts arguments as text, with a mitigation."""
    save_model(setting.model, tmp_path / "ours")
    load_tokenizer(setting.checkpoint).save(tmp_path / "ours")  # type: ignore[attr-defined]
    arguments = f"pretrained={tmp_path / 'ours'},mitigation=forget_more(decay_scale=0.5)"
    options = {"num_fewshot": 2, "batch_size": 2}
    forgetful = evaluate("longrnn", setting.tasks, "tiny_rolling", model_args=arguments, **options)
    plain = evaluate(
        "longrnn", setting.tasks, "tiny_rolling", model_args={"pretrained": str(tmp_path / "ours")},
        **options,
    )  # fmt: skip
    name = "bits_per_byte,none"
    values = [results["results"]["tiny_rolling"][name] for results in (forgetful, plain)]
    assert abs(values[0] - values[1]) > 1e-5
    expected = evaluate(ours(setting), setting.tasks, "tiny_rolling")
    assert values[1] == pytest.approx(expected["results"]["tiny_rolling"][name], rel=1e-6)


def test_truncation_is_counted(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    """With a maximum length the scores are those of `hf`, and truncation is logged and recorded."""
    limited = ours(setting, max_length=20)
    model = hf_model(str(setting.checkpoint), device="cpu", max_length=20, batch_size=1)
    tasks = ["tiny_choice", "tiny_rolling"]
    found = evaluate(limited, setting.tasks, *tasks, num_fewshot=1)
    expected = evaluate(model, setting.tasks, *tasks, num_fewshot=1)
    for task in tasks:
        for mine, other in zip(responses(found, task), responses(expected, task), strict=True):
            numbers = [[r[0] for r in side] if task == "tiny_choice" else side
                       for side in (mine, other)]  # fmt: skip
            assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)
    cut = found["config"]["truncated"]
    assert cut["requests"] > 0
    assert cut["tokens"] > cut["requests"]
    assert cut["split_documents"] > 0
    assert f"{cut['requests']} contexts were truncated" in caplog.text
    assert "read in windows of 20 tokens" in caplog.text


class Stopping:
    """A model that is interrupted at its third call."""

    def __init__(self, inside: RecurrentLM) -> None:
        self.inside, self.calls = inside, 0
        self.vocab_size, self.max_length = inside.vocab_size, inside.max_length
        self.init_state, self.fingerprint = inside.init_state, inside.fingerprint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls > 3:
            raise KeyboardInterrupt
        return self.inside(*args, **kwargs)


def test_cache(setting: Setting, tmp_path: Path) -> None:
    """Answers in a cache are not computed again, and the cache of another model is refused."""
    cache, task = str(tmp_path / "cache"), "tiny_rolling"
    whole = evaluate(ours(setting, batch_size=1), setting.tasks, task)
    broken = ours(setting, batch_size=1)
    broken.model = Stopping(setting.model)
    with pytest.raises(KeyboardInterrupt):
        evaluate(broken, setting.tasks, task, use_cache=cache)
    rest, again = (
        evaluate(ours(setting, batch_size=1), setting.tasks, task, use_cache=cache)
        for _ in range(2)
    )
    computed = [one["config"]["tokens_computed"] for one in (whole, rest, again)]
    assert computed[0] > computed[1] > computed[2] == 0
    assert responses(whole, task) == responses(rest, task) == responses(again, task)
    other = LongRNN(RecurrentLM(setting.model.config), tokenizer=setting.checkpoint, quiet=True)
    with pytest.raises(UserError, match="model"):
        evaluate(other, setting.tasks, task, use_cache=cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch"),
        ({"batch_size": "many"}, "batch"),
        ({"max_length": 0}, "max_length"),
        ({"max_length": "2k"}, "max_length"),
        ({"mitigation": "forget_mor"}, "forget_more"),
    ],
)
def test_bad_arguments(setting: Setting, options: dict[str, Any], message: str) -> None:
    """Invalid arguments raise a UserError."""
    with pytest.raises(UserError, match=message):
        ours(setting, **options)
    with pytest.raises(UserError, match="dtype"):
        LongRNN("passkey-tiny", dtype="floaty")
    with pytest.raises(UserError, match="tokenizer="):
        LongRNN(setting.model)
    repeats = {"repetition_penalty": 1.3}
    with pytest.raises(UserError, match="repetition_penalty"):
        evaluate(ours(setting), setting.tasks, "tiny_generate", gen_kwargs=repeats)


def test_outside_of_a_repository_git_says_nothing(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """lm-eval records the commit of the current folder."""
    monkeypatch.chdir(tmp_path)
    metadata = {"n_items": [2], "n": 1}
    assert harness.scores(ours(setting), ["longrnn_reverse"], metadata=metadata)
    assert "fatal" not in capfd.readouterr().err
