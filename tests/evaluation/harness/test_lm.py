"""The model type gives the results of lm-eval's own `hf` type with the same weights."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from longrnn import load
from longrnn.checkpoints.layouts import save_model
from longrnn.checkpoints.tokenizer import load_tokenizer
from longrnn.errors import UserError
from longrnn.evaluation.harness import LongRNN
from longrnn.evaluation.harness.lm import generation
from longrnn.mitigations import mitigation
from longrnn.models import RecurrentLM
from tests.evaluation.harness.conftest import (
    BOS,
    EOS,
    VOCAB,
    Setting,
    evaluate,
    hf_model,
    save_tokenizer,
)
from tests.hf.foreign import causal

TASKS = ["tiny_choice", "tiny_rolling", "tiny_generate"]
LONG = 100_000


def ours(setting: Setting, **options: Any) -> LongRNN:
    given = {"pretrained": setting.model, "tokenizer": setting.checkpoint, **options}
    return LongRNN(**given, quiet=True)


def responses(results: dict[str, Any], task: str) -> list[Any]:
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["filtered_resps"] for sample in samples]


def assert_equal_responses(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Choices, rolling likelihoods, generated texts, and the metrics."""
    for task in found["samples"]:
        for mine, theirs in zip(responses(found, task), responses(expected, task), strict=True):
            for one, other in zip(mine, theirs, strict=True):
                if isinstance(one, (tuple, list)):
                    assert bool(one[1]) == bool(other[1])
                    one, other = one[0], other[0]
                assert one == (other if isinstance(one, str) else pytest.approx(other, abs=1e-3))
        for name, value in expected["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][name] == pytest.approx(value, rel=1e-4), (task, name)


def test_every_response_is_that_of_hf(setting: Setting) -> None:
    found = evaluate(ours(setting, batch_size=3), setting.tasks, *TASKS, num_fewshot=2)
    # Without max_length the `hf` type cuts Mamba-2 at 2,048 tokens.
    theirs = hf_model(str(setting.checkpoint), device="cpu", max_length=LONG, batch_size=1)
    assert_equal_responses(found, evaluate(theirs, setting.tasks, *TASKS, num_fewshot=2))
    assert min(responses(found, TASKS[1])[0]) < -10
    assert any(text for (text,) in responses(found, TASKS[2]))
    config = found["config"]
    assert config["model_fingerprint"] == setting.model.fingerprint()
    assert config["max_length"] is None
    assert config["requests_truncated"] == 0


@pytest.mark.parametrize("limit", [2048, 20])
def test_a_transformer_is_that_of_hf(
    setting: Setting, tmp_path: Path, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoTokenizer

    sizes = {"vocab_size": 50, "max_position_embeddings": limit, "initializer_range": 0.5}
    causal("llama", **sizes, bos_token_id=None, eos_token_id=0).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(setting.checkpoint).save_pretrained(tmp_path)
    arguments = {"pretrained": str(tmp_path), "quiet": True, "batch_size": 3}
    found = evaluate("longrnn", setting.tasks, *TASKS, model_args=arguments, num_fewshot=1)
    other = hf_model(str(tmp_path), device="cpu", batch_size=1)
    assert_equal_responses(found, evaluate(other, setting.tasks, *TASKS, num_fewshot=1))
    config = found["config"]
    assert (config["requests_truncated"] > 0) == ("truncated" in caplog.text) == (limit < 100)


def test_a_window_is_that_of_hf(setting: Setting, tmp_path: Path) -> None:
    theirs = causal("mistral", vocab_size=VOCAB, sliding_window=12, eos_token_id=0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 20, "eos_token_id": 0}
    same = causal("llama", **sizes)
    same.load_state_dict(theirs.state_dict())
    for folder, model in (("llama", same), ("mistral", theirs)):
        model.save_pretrained(tmp_path / folder)
        load_tokenizer(setting.checkpoint).save(tmp_path / folder)  # type: ignore[attr-defined]
    windowed = LongRNN(f"{tmp_path / 'llama'}+attention_window(window=12)", quiet=True)
    found = evaluate(windowed, setting.tasks, *TASKS, num_fewshot=2)
    other = hf_model(str(tmp_path / "mistral"), device="cpu", max_length=LONG, batch_size=1)
    assert_equal_responses(found, evaluate(other, setting.tasks, *TASKS, num_fewshot=2))
    assert found["config"]["requests_truncated"] == 0


def test_a_window_with_sinks_scores_as_whole_texts(setting: Setting, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 20, "eos_token_id": 0}
    causal("llama", **sizes).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(setting.checkpoint)
    tokenizer.save(tmp_path)  # type: ignore[attr-defined]
    spec = f"{tmp_path}+attention_window(window=12, sinks=3)"
    model, lengths = load(spec), []
    scores = evaluate(
        "longrnn", setting.tasks, *TASKS[:2], model_args={"pretrained": spec, "quiet": True}
    )
    for sample in scores["samples"]["tiny_choice"]:
        for (context, choice), (score, _) in zip(
            sample["arguments"], sample["filtered_resps"], strict=True
        ):
            ids = torch.tensor([tokenizer.encode(context + choice)])
            losses = model.token_losses(ids[:, :-1], ids[:, 1:])[0][0]
            scored = ids.shape[1] - len(tokenizer.encode(context.rstrip()))
            assert score == pytest.approx(-float(losses[-scored:].sum()), abs=1e-3)
    for sample in scores["samples"]["tiny_rolling"]:
        ids = torch.tensor([[0, *tokenizer.encode(sample["arguments"][0][0])]])
        losses = model.token_losses(ids[:, :-1], ids[:, 1:])[0]
        assert sample["filtered_resps"][0] == pytest.approx(-float(losses.sum()), abs=1e-3)
        lengths.append(ids.shape[1])
    assert max(lengths) > 20
    assert scores["config"]["requests_truncated"] == 0


def test_a_request_as_long_as_the_maximum_length_is_whole(setting: Setting) -> None:
    """The last token of a continuation is only predicted, so it does not count."""
    model = ours(setting)
    model.max_length = 20
    for context, truncated in ((18, 0), (19, 1)):
        model._loglikelihood_tokens([(None, [1] * context, [2, 3, 4])])
        assert model.counts["truncated"] == truncated


@torch.no_grad()
@pytest.mark.parametrize("bos", [[], [1]], ids=["no BOS", "BOS"])
def test_chunk_select_answers_from_the_chunk_with_the_lowest_entropy(
    bos: list[int], setting: Setting, tmp_path: Path
) -> None:
    """Chunks are of the text before the last line, each after BOS; likelihoods are refused."""
    save_tokenizer(tmp_path, f"{BOS} $A" if bos else "")
    model = ours(setting, chunk_select=9, tokenizer=tmp_path)
    found = evaluate(model, setting.tasks, "tiny_generate", num_fewshot=2)
    tokenizer = load_tokenizer(tmp_path)
    n_chunks = set()
    for sample in found["samples"]["tiny_generate"]:
        prompt = sample["arguments"][0][0]
        ids, size = tokenizer.encode(prompt), len(tokenizer.encode(prompt.rpartition("\n")[0]))
        chunks = [ids[start : min(start + 9, size)] for start in range(0, size, 9)]
        answers = []
        for chunk in chunks:
            read = torch.tensor([bos + chunk + ids[size:]])
            entropy = torch.distributions.Categorical(
                logits=setting.model(read).logits[0, -1].double()
            ).entropy()
            for _ in range(12):
                best = setting.model(read).logits[:, -1:].argmax(-1)
                read = torch.cat([read, best], 1)
            text = tokenizer.decode(read[0, -12:].tolist())
            answers.append((float(entropy), text.split(" an")[0].split(EOS)[0]))
        assert sample["filtered_resps"] == [min(answers)[1]]
        n_chunks.add(len(chunks))
    assert max(n_chunks) > 2
    with pytest.raises(UserError, match="chunk_select"):
        evaluate(ours(setting, chunk_select=9), setting.tasks, "tiny_choice")


def test_by_name(tmp_path: Path, setting: Setting) -> None:
    save_model(setting.model, tmp_path / "ours")
    load_tokenizer(setting.checkpoint).save(tmp_path / "ours")  # type: ignore[attr-defined]
    found = []
    for model, spec in (("longrnn", ""), (ours(setting), ""), ("longrnn", "+forget_more")):
        arguments = f"pretrained={tmp_path / 'ours'}{spec}" if model == "longrnn" else None
        results = evaluate(model, setting.tasks, "tiny_rolling", model_args=arguments)["results"]
        found.append(results["tiny_rolling"]["bits_per_byte,none"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert abs(found[0] - found[2]) > 1e-5


def test_cache(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, task = str(tmp_path / "cache"), "tiny_choice"
    whole = evaluate(ours(setting, batch_size=1), setting.tasks, task)
    forward, calls = RecurrentLM.forward, count()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RecurrentLM, "forward", interrupted)
        evaluate(ours(setting, batch_size=1), setting.tasks, task, use_cache=cache)
    rest, again = (
        evaluate(ours(setting, batch_size=1), setting.tasks, task, use_cache=cache)
        for _ in range(2)
    )
    computed = [one["config"]["tokens_computed"] for one in (whole, rest, again)]
    assert computed[0] > computed[1] > computed[2] == 0
    assert responses(whole, task) == responses(rest, task) == responses(again, task)


def test_a_cache_file_keeps_the_answers_of_each_model_and_setting(
    setting: Setting, tmp_path: Path
) -> None:
    cache, task = str(tmp_path / "cache"), "tiny_choice"
    forgetting = setting.model.under(mitigation("forget_more(decay_scale=0.5)"))
    subjects: list[dict[str, Any]] = [{}, {"pretrained": forgetting}, {"max_length": 8}]
    for template in ("", f"{BOS} $A"):
        save_tokenizer(tmp_path / template[:3], template)
        subjects.append({"tokenizer": tmp_path / template[:3]})
    for arguments in subjects:
        alone = evaluate(ours(setting, **arguments), setting.tasks, task)
        for computed in (True, False):
            cached = evaluate(ours(setting, **arguments), setting.tasks, task, use_cache=cache)
            assert responses(cached, task) == responses(alone, task)
            assert (cached["config"]["tokens_computed"] > 0) == computed


def test_max_length_truncates_contexts_on_the_left(setting: Setting) -> None:
    """A recurrent model given `max_length`, as that of lm-eval's `hf` type, counts them."""
    short = evaluate(ours(setting, max_length=8), setting.tasks, "tiny_choice")
    assert short["config"]["requests_truncated"] > 0
    for length in (0, 1):
        with pytest.raises(UserError, match="max_length"):
            ours(setting, max_length=length)


def test_generation_options(setting: Setting) -> None:
    repeats = {"repetition_penalty": 1.3}
    with pytest.raises(UserError, match="repetition_penalty"):
        evaluate(ours(setting), setting.tasks, "tiny_generate", gen_kwargs=repeats)
    sampled = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "until": ["."], "num_beams": 1}
    expected = {"until": ["."], "max_new_tokens": 256, "temperature": 0.5, "top_p": 0.9}
    assert generation(sampled, None) == expected
    for greedy in {"temperature": 0.5, "do_sample": False}, {"until": ["a"]}:
        assert generation(greedy, None)["temperature"] == 0.0
