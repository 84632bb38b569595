"""A model whose logits are not finite is an error in every evaluation."""

from pathlib import Path

import pytest
import torch

from longrnn.cells import MIXERS
from longrnn.checkpoints.layouts import save_model
from longrnn.errors import UserError
from longrnn.inference import trie
from longrnn.inference.engine import Pair, complete, score, token_losses
from longrnn.mitigations import MITIGATIONS, mitigation
from longrnn.models import RecurrentLM, generate
from longrnn.models.finite import explain_nonfinite
from longrnn.progress import Progress
from longrnn.state import LMState
from tests.cli.conftest import CLI, cli  # noqa: F401
from tests.contracts.builders import Scripted, build_model, mitigation_spec, random_tokens
from tests.texts import DATA

pytestmark = pytest.mark.core

TEXT = "It was a dark and stormy night; the rain fell in torrents. " * 60
TASK = """task: likelihood
dataset_path: text
dataset_kwargs: {data_files: {test: TEXT}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{text}}"
"""


def broken(mixer: str = "mamba2", layer: int = 1, **options: object) -> RecurrentLM:
    """A model of which one number in one layer is NaN."""
    model = build_model(mixer, n_layers=3, vocab_size=256, dtype=torch.float32, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        next(model.cells[layer].parameters()).view(-1)[0] = torch.nan
    return model


@pytest.mark.parametrize("command", (DATA / "nonfinite.txt").read_text().splitlines())
def test_every_evaluation_refuses_a_model_with_nan_weights(
    command: str,
    cli: CLI,  # noqa: F811
    tmp_path: Path,
) -> None:
    if "harness" in command:
        pytest.importorskip("lm_eval")
    save_model(broken(), tmp_path / "sick")
    save_model(build_model("mamba2", vocab_size=256, dtype=torch.float32), tmp_path / "good")
    (tmp_path / "text.txt").write_text(TEXT)
    suite = "evaluations: [{kind: cost, lengths: [64], decode: 1}]"
    (tmp_path / "cost.yaml").write_text(suite)
    (tmp_path / "task.yaml").write_text(TASK.replace("TEXT", str(tmp_path / "text.txt")))
    places = {"MODEL": tmp_path / "sick", "GOOD": tmp_path / "good", "TEXT": tmp_path / "text.txt"}
    for placeholder, path in places.items():
        command = command.replace(placeholder, str(path))
    done = cli(*command.split())
    assert done.code == 2, done.out + done.err
    error = next(line for line in done.err.splitlines() if line.startswith("error: "))
    assert "finite" in error
    assert "blocks.1.mixer" in error
    assert "Traceback" not in done.err


@pytest.mark.parametrize("spec", [None, "forget_more", "state_norm"])
@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_the_weight_is_named(mixer: str, spec: str | None) -> None:
    model = broken(mixer, 2)
    if spec is not None and MITIGATIONS[spec].undefined(MIXERS[mixer]) is None:
        model = model.under(mitigation(mitigation_spec(spec)))
    with pytest.raises(UserError, match=r"blocks\.2\.mixer"):
        explain_nonfinite(model, random_tokens(2, 9) % 256)


def test_an_overflow_without_bad_weights_is_named() -> None:
    """Logits that overflow in float16 are refused with a wider dtype as the remedy."""
    model = build_model("gru", vocab_size=256, n_layers=3, dtype=torch.float16)
    with torch.no_grad():
        model.embedding.weight[7] = 60_000
    model.cells[1].register_forward_hook(
        lambda module, args, output: (torch.full_like(output[0], 60_000), output[1])
    )
    tokens = torch.tensor([[1, 7]])
    with pytest.raises(UserError, match="overflow.*float32"):
        explain_nonfinite(model, tokens)


def late(mixer: str = "lstm") -> RecurrentLM:
    """A model that is finite until it reads token 7."""
    model = build_model(mixer, vocab_size=11, tie_embeddings=False, dtype=torch.float32)
    with torch.no_grad():
        model.embedding.weight[7] = torch.inf
    return model


def quiet() -> Progress:
    return Progress("test", 0, unit="tokens", quiet=True)


@pytest.mark.parametrize("mixer", ["lstm", "mamba2"])
def test_the_token_is_named(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trie, "SCORED_TOKENS", 4)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 1, 2], [1, 2, 3, 4, 5, 7, 1, 2]])
    message = r"token 5 .*embedding\.weight"
    model = late(mixer)
    with pytest.raises(UserError, match=message):
        list(token_losses(model, tokens))
    with pytest.raises(UserError, match=message):
        generate(model, tokens, max_new_tokens=1)
    with pytest.raises(UserError, match=message):
        explain_nonfinite(model, tokens[:, 2:], model(tokens[:, :2]).state)
    tokens = tokens[[1]]
    pairs = [Pair((1, 2, 3), (4, 5, 7, 1)), Pair((1, 2, 3), (4, 5))]
    with pytest.raises(UserError, match=message):
        list(score(model, pairs, batch_size=2, progress=quiet()))
    how = {"decode": str, "max_new_tokens": 1, "batch_size": 1, "progress": quiet()}
    with pytest.raises(UserError, match=message):
        list(complete(model, tokens, **how))  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_break_in_an_answer_are_not_turned_into_tokens(temperature: float) -> None:
    """Tokens up to the break are generated, and then it is named."""
    prompt = torch.tensor([[1, 2, 3]])
    model = Scripted(5, lambda read: torch.where(read < 6, 0.0, torch.nan))
    found = generate(model, prompt, max_new_tokens=3, temperature=temperature)
    assert len(found.tokens[0]) == 3
    with pytest.raises(UserError, match="token 5"):
        generate(model, prompt, max_new_tokens=4, temperature=temperature)
    rows, state = prompt.expand(2, -1), LMState(torch.tensor([-9, 0]), ())
    with pytest.raises(UserError, match="token 5"):  # of row 1, when row 0 has ended
        generate(model, rows, state, max_new_tokens=4, stop=lambda row, ids: row == 0)
