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


def test_choices(found: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Choices have the log-likelihoods of `hf`."""
    pairs = zip(responses(found, "tiny_choice"), responses(theirs, "tiny_choice"), strict=True)
    for mine, other in pairs:
        assert [r[0] for r in mine] == pytest.approx([r[0] for r in other], abs=1e-4)
        assert [bool(r[1]) for r in mine] == [bool(r[1]) for r in other]


def test_rolling(found: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Rolling log-likelihoods are those of `hf`."""
    mine, other = responses(found, "tiny_rolling"), responses(theirs, "tiny_rolling")
    assert mine == [pytest.approx(value, abs=1e-4) for value in other]
    assert min(other[0]) < -10


def test_generation(found: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Generated texts are those of `hf`."""
    mine, other = responses(found, "tiny_generate"), responses(theirs, "tiny_generate")
    assert mine == other
    assert any(answer[0] for answer in mine)


def test_metrics(found: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The metrics of lm-eval are those of `hf`."""
    for task in TASKS:
        for name, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][name] == pytest.approx(value, rel=1e-5), (task, name)


def test_recorded(found: dict[str, Any], setting: Setting) -> None:
    """Results record the model, the tokenizer and the number of tokens."""
    config = found["config"]
    assert config["model_fingerprint"] == setting.model.fingerprint()
    assert config["max_length"] is None
    assert config["truncated"] == {"requests": 0, "tokens": 0, "split_documents": 0}
    assert config["tokens_computed"] > 0


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


def test_cache(setting: Setting, tmp_path: Path) -> None:
    """A second run with a cache computes nothing, and the cache of another model is refused."""
    cache = str(tmp_path / "cache")
    first = evaluate(ours(setting), setting.tasks, *TASKS, use_cache=cache)
    again = evaluate(ours(setting), setting.tasks, *TASKS, use_cache=cache)
    assert first["config"]["tokens_computed"] > 0
    assert again["config"]["tokens_computed"] == 0
    for task in TASKS:
        assert responses(first, task) == responses(again, task)
    other = LongRNN(RecurrentLM(setting.model.config), tokenizer=setting.checkpoint, quiet=True)
    with pytest.raises(UserError, match="model"):
        evaluate(other, setting.tasks, *TASKS, use_cache=cache)


class Interrupted(Exception):
    pass


def test_interrupted_run_goes_on(setting: Setting, tmp_path: Path) -> None:
    """Answers given before an interruption are not computed again."""
    cache = str(tmp_path / "cache")
    whole = evaluate(ours(setting, batch_size=1), setting.tasks, "tiny_rolling")
    broken = ours(setting, batch_size=1)
    inside, calls = broken.model, [0]

    class Failing:
        """Stops at its third row."""

        vocab_size, max_length = inside.vocab_size, inside.max_length
        init_state = staticmethod(inside.init_state)
        fingerprint = staticmethod(inside.fingerprint)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] > 3:
                raise Interrupted
            return inside(*args, **kwargs)

    broken.model = Failing()
    with pytest.raises(Interrupted):
        evaluate(broken, setting.tasks, "tiny_rolling", use_cache=cache)
    rest = evaluate(ours(setting, batch_size=1), setting.tasks, "tiny_rolling", use_cache=cache)
    assert 0 < rest["config"]["tokens_computed"] < whole["config"]["tokens_computed"]
    assert responses(rest, "tiny_rolling") == responses(whole, "tiny_rolling")


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


def test_bad_dtype() -> None:
    with pytest.raises(UserError, match="dtype"):
        LongRNN("passkey-tiny", dtype="floaty")


def test_a_loaded_model_needs_its_tokenizer(setting: Setting) -> None:
    with pytest.raises(UserError, match="tokenizer="):
        LongRNN(setting.model)


def test_unsupported_generation(setting: Setting) -> None:
    """Generation options that are not supported raise a UserError."""
    with pytest.raises(UserError, match="repetition_penalty"):
        evaluate(
            ours(setting),
            setting.tasks,
            "tiny_generate",
            gen_kwargs={"repetition_penalty": 1.3},
        )


def test_outside_of_a_repository_git_says_nothing(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """lm-eval records the commit of the current folder."""
    monkeypatch.chdir(tmp_path)
    metadata = {"n_items": [2], "n": 1}
    assert harness.scores(ours(setting), ["longrnn_reverse"], metadata=metadata)
    assert "fatal" not in capfd.readouterr().err
