"""Every calibrated parameter equals its definition, computed independently on a page of prose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

import longrnn
from longrnn.cells import MIXERS
from longrnn.checkpoints.load import load_editable
from longrnn.data.prompts import FILLER
from longrnn.diagnostics.calibrate import OBJECTIVE_TOLERANCE, calibrate, keyed_prompts, search
from longrnn.diagnostics.job import CALIBRATED_EVERY, METHODS, InsideObservations, Job
from longrnn.errors import UserError
from longrnn.evaluation.texts import Document, read_documents
from longrnn.files import sha256
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.mitigations import mitigation
from longrnn.mitigations.base import Calibration, Chain
from longrnn.models import RecurrentLM
from longrnn.models.fold import fold
from longrnn.progress import Progress
from longrnn.state import LMState
from longrnn.text import ByteTokenizer
from tests.contracts.builders import build_model, mixer_spec
from tests.hf.foreign import causal
from tests.refusals import naming

PROSE = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in "
    "my purse, and nothing particular to interest me on shore, I thought I would sail about a "
    "little and see the watery part of the world. It is a way I have of driving off the spleen and "
    "regulating the circulation. Whenever I find myself growing grim about the mouth; whenever it "
    "is a damp, drizzly November in my soul; then, I account it high time to get to sea."
)
OTHER = "There is nothing surprising in this. If they but knew it, almost all men in their degree."
LENGTH, TARGET = 40, 150  # LENGTH is not a multiple of CALIBRATED_EVERY
SEARCHED = ["scale_delta", "scale_decay", "power_decay"]
LENGTHS: dict[str, Any] = {"train_length": LENGTH, "target_length": TARGET}
# Settings with which every method runs quickly on PROSE.
QUICK = {name: f"{name}(windows=2)" for name in METHODS}
QUICK |= {name: f"{name}(windows=2, steps=2)" for name in SEARCHED}
QUICK["fit"] = "fit(steps=2, rows=2)"
SELECTIVE = "fit(steps=30, rows=2, select=true, weights_learning_rate=0.02)"


@pytest.fixture
def documents(tmp_path: Path) -> list[Document]:
    """Return a long and a short text, read from files."""
    for name, text in (("ishmael.txt", PROSE), ("other.txt", OTHER)):
        (tmp_path / name).write_text(text)
    paths = [tmp_path / "ishmael.txt", tmp_path / "other.txt"]
    return read_documents(paths, ByteTokenizer(), build("mamba2"))


def build(mixer: str | dict[str, Any] = "mamba2", **config: Any) -> RecurrentLM:
    return build_model(mixer, **{"vocab_size": 256, **config})


def windows(length: int, chosen: list[int] | None = None) -> Tensor:
    """Return disjoint windows of both texts, `(w, length)`: all, or those with these indices."""
    pieces = [
        text.encode()[start : start + length]
        for text in (PROSE, OTHER)
        for start in range(0, len(text) - length + 1, length)
    ]
    kept = pieces if chosen is None else [pieces[number] for number in chosen]
    return torch.tensor([list(piece) for piece in kept])


def largest_norms(model: RecurrentLM, tokens: Tensor) -> list[list[float]]:
    """Return the largest norm by layer and head, over rows and the positions of measurements."""
    state, found = model.init_state(len(tokens)), []
    for position, token in enumerate(tokens.split(1, dim=1), start=1):
        state = model(token, state).state
        if position % CALIBRATED_EVERY == 0 or position == tokens.shape[1]:
            memories = [getattr(layer, field_of(layer)) for layer in state.layers]
            found.append([m.reshape(len(m), heads_of(m), -1).norm(dim=2) for m in memories])
    by_layer = [torch.stack(norms).amax((0, 1)) for norms in zip(*found, strict=True)]
    return [norms.tolist() for norms in by_layer]


def field_of(layer: Any) -> str:
    """Return the part of a cell's state that the recurrence updates."""
    return next(name for name in ("ssm", "c", "h") if hasattr(layer, name))


def heads_of(memory: Tensor) -> int:
    return memory.shape[1] if memory.ndim == 4 else 1


def steps(model: RecurrentLM, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return dt `(w, t, h)` and A `(h,)` of every layer of a Mamba-2, from its weights."""
    read: list[Tensor] = []
    hooks = [
        mixer.register_forward_pre_hook(lambda _, args: read.append(args[0]))
        for mixer in model.cells
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    found = []
    for mixer, x in zip(model.cells, read, strict=True):
        weights: Any = mixer
        raw = x @ weights.in_proj.weight[-mixer.n_heads :].T + weights.dt_bias
        found.append((torch.log1p(raw.exp()), -weights.A_log.exp()))
    return found


@torch.no_grad()
def mean_loss(model: Any, tokens: Tensor) -> float:
    """Return the loss in nats per token, from all logits at once."""
    chances = model(tokens[:, :-1]).logits.softmax(-1)
    return float(-chances.gather(2, tokens[:, 1:, None]).log().mean())


@pytest.mark.parametrize("mixer", list(MIXERS))
@torch.no_grad()
def test_state_norm(mixer: str, documents: list[Document]) -> None:
    """The threshold is the largest norm inside times the margin; windows spread over all texts."""
    model = build(mixer)
    assert len(windows(LENGTH)) == 13
    for method, margin, tokens in (
        ("state_norm(margin=0.8)", 0.8, windows(LENGTH)),
        ("state_norm(windows=3)", 1.0, windows(LENGTH, [0, 4, 8])),
    ):
        (member,) = calibrate(Job(model, documents, train_length=LENGTH, quiet=True), method)
        assert member["kind"] == "state_norm"
        for found, norms in zip(member["threshold"], largest_norms(model, tokens), strict=True):
            assert found == pytest.approx([margin * norm for norm in norms], rel=1e-5)


@pytest.mark.parametrize("quantile", [1.0, 0.6, None])
def test_token_filter(quantile: float | None, documents: list[Document]) -> None:
    """The global heads are filtered, below the quantile of their step sizes."""
    model = build(n_layers=3)
    method = "token_filter" if quantile is None else f"token_filter(quantile={quantile})"
    (member,) = calibrate(Job(model, documents, **LENGTHS, quiet=True), method)
    share = 1 - LENGTH / TARGET if quantile is None else quantile
    heads = []
    for layer, (dt, A) in enumerate(steps(model, windows(LENGTH))):
        kept = (dt * A).sum(1).mean(0).exp()  # of the state before the window
        heads += [[layer, head] for head in (kept > 0.05).nonzero().flatten().tolist()]
        for head, threshold in enumerate(member["threshold"][layer]):
            values = dt[..., head].detach().flatten().numpy()
            assert threshold == pytest.approx(np.quantile(values, share), rel=2e-6)
            assert threshold >= np.quantile(values, share)
    assert member["heads"] == heads
    assert 0 < len(heads) < 12, "this model has heads of one kind only"


def test_the_longest_memory_comes_first() -> None:
    retention = torch.tensor([[0.9, 0.01], [0.06, 0.95]])
    assert InsideObservations(retention, retention, []).global_heads() == [(1, 1), (0, 0), (1, 0)]


@pytest.mark.parametrize("method", ["token_filter", "per_head"])
def test_nothing_global(method: str, documents: list[Document]) -> None:
    model = build({"kind": "mamba2", "d_state": 4, "head_dim": 4, "A_init": [900, 900]})
    with pytest.raises(UserError, match=naming("0.05")):
        calibrate(Job(model, documents, **LENGTHS, quiet=True), method)


@pytest.mark.parametrize("kind", SEARCHED)
def test_a_search_never_ends_worse(kind: str, documents: list[Document]) -> None:
    """The result is the best factors evaluated, by the loss on windows of the target length."""
    model, tokens = build(), windows(TARGET + 1)
    assert len(tokens) == 2
    plain, better = mean_loss(model, tokens), []
    for steps in (1, 4, 4, 12):
        method = f"{kind}(steps={steps})"
        (member,) = calibrate(Job(model, documents, **LENGTHS, quiet=True), method)
        assert member["kind"] == kind
        assert len(member["scale"]) == 2
        better.append(plain - mean_loss(model.under(mitigation(member)), tokens))
        assert (better[-1] == 0) == (member["scale"] == [1.0, 1.0])
    assert min(better) >= 0
    assert better == sorted(better)
    assert better[1] == better[2], "the same steps give the same result"
    assert better[-1] > 1e-6, "nothing was found"


@pytest.mark.parametrize("mixer", [kind for kind, cell in MIXERS.items() if cell.bias_weight])
def test_a_fit_of_time_scales_lowers_the_loss_and_changes_no_weight(
    mixer: str, documents: list[Document]
) -> None:
    """One number per head, or per unit; those who train the model afterwards get gradients."""
    model = build(mixer, seed=3)
    whole = torch.cat([document.tokens for document in documents])
    tokens = whole[: len(whole) // 2 * 2].view(2, -1)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    method = "fit(steps=30, rows=2, learning_rate=0.05)"
    (member,) = calibrate(Job(model, documents, **LENGTHS, quiet=True), method)
    assert member.keys() - {"kind"} == ({"rate", "bias"} if MIXERS[mixer].rate_weight else {"bias"})
    assert [len(layer) for layer in member["bias"]] == [cell.n_heads for cell in model.cells]
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())
    assert mean_loss(model.under(mitigation(member)), tokens) < mean_loss(model, tokens)


@pytest.mark.parametrize("mixer", [kind for kind, cell in MIXERS.items() if cell.rate_weight])
def test_a_fit_begins_with_heads_that_forget_unless_there_are_keys(
    mixer: str, documents: list[Document]
) -> None:
    model = build({**mixer_spec(mixer), "init": "long_memory"})
    job = Job(model, documents, **LENGTHS, quiet=True)
    found = [job.inside(8).retention.max()]
    for keys in (1, 0):
        members = calibrate(job, f"fit(steps=1, rows=2, keys={keys}, learning_rate=1e-9)")
        found.append(job.under(members).inside(8).retention.max())
    plain, with_keys, without = found
    torch.testing.assert_close(with_keys, plain, atol=1e-5, rtol=0)
    assert without < 0.5 < plain


def test_a_fit_starts_from_the_mitigation_of_its_model_and_reads_keys(
    documents: list[Document],
) -> None:
    """Keyed documents change the result, by repeated segments and by carried ones."""
    found = {}
    for mixer in ("mamba2", "gated_deltanet"):
        model = build(mixer).under("forget_more(decay_scale=0.95)")
        for keys in (0, 2):
            method = f"fit(steps=4, rows=2, keys={keys})"
            lengths: dict[str, Any] = {"train_length": 120, "target_length": 480}
            (found[mixer, keys],) = calibrate(Job(model, documents, **lengths, quiet=True), method)
        assert found[mixer, 0] != found[mixer, 2]
    plain = calibrate(Job(build(), documents, **lengths, quiet=True), "fit(steps=4, rows=2)")
    assert plain != [found["mamba2", 0]]


@pytest.mark.parametrize("mixer", ["mamba2", "lstm", "gated_deltanet"])
def test_a_fit_of_the_weights_that_make_steps(
    mixer: str, documents: list[Document], tmp_path: Path
) -> None:
    """Its loss is below that of time scales alone, and its file is used from where it lies."""
    model, file = build(mixer, seed=3), tmp_path / "fit.safetensors"
    job = Job(model, documents, **LENGTHS, quiet=True, weights_file=file)
    whole = torch.cat([document.tokens for document in documents])
    tokens = whole[: len(whole) // 2 * 2].view(2, -1)
    losses = []
    for method in ("fit(steps=30, rows=2)", SELECTIVE):
        members = calibrate(job, method)
        losses.append(mean_loss(model.under(mitigation(members)), tokens))
    assert losses[1] < losses[0] < mean_loss(model, tokens)
    job.write(tmp_path / "fit.yaml", members)
    assert "weights: fit.safetensors" in (tmp_path / "fit.yaml").read_text()
    assert mean_loss(model.under(str(tmp_path / "fit.yaml")), tokens) == losses[1]
    with pytest.raises(UserError, match=naming("fit(select=true)", "weights_file")):
        calibrate(job._replace(weights_file=None), "fit(select=true)")


def test_a_fit_under_time_scales_is_that_of_the_folded_model(documents: list[Document]) -> None:
    found = []
    for is_folded in (False, True):
        model = build("mamba2").under("time_scales(rate=0.4, bias=-0.3)")
        if is_folded:
            model = model.under(None).under(fold(model))
        (member,) = calibrate(Job(model, documents, **LENGTHS, quiet=True), "fit(steps=6, rows=2)")
        found.append(torch.tensor([member["rate"], member["bias"]]))
    torch.testing.assert_close(*found, atol=2e-5, rtol=0)


def test_a_fit_reaches_the_layers_of_a_hybrid(documents: list[Document]) -> None:
    model: Any = open_hugging_face(causal("falcon_h1", vocab_size=256)).beyond()  # type: ignore
    lengths: dict[str, Any] = {"train_length": 160, "target_length": 3200}
    for keys in (0, 1):
        method = f"fit(steps={4 + 16 * keys}, rows=2, keys={keys})"  # short segments are repeated
        (member,) = calibrate(Job(model, documents, **lengths, quiet=True), method)
        assert [len(layer) for layer in member["rate"]] == [cell.n_heads for cell in model.cells]
        assert all(any(layer) for layer in [*member["rate"], *member["bias"]])


class Scripted:
    """A model whose loss is a function of the choices of its heads."""

    def __init__(self, chosen: dict[Any, str] | None = None) -> None:
        self.chosen = chosen or {}

    def init_state(self, batch_size: int) -> LMState:
        return LMState(torch.zeros(batch_size, dtype=torch.long), ())

    def under(self, spec: Chain) -> Scripted:
        parts = spec.parts
        pairs = ((tuple(head), part.name) for part in parts for head in part.heads or ())  # type: ignore[arg-type]
        return Scripted(dict(pairs))

    def token_losses(self, rows: Tensor, targets: Tensor) -> tuple[Tensor, None]:
        loss = 2.0
        if self.chosen.get((1, 0)) == self.chosen.get((1, 1)) == "sliding_window":
            loss -= 1.0  # one of them alone does nothing
        if (0, 0) in self.chosen:
            loss += 1.5
        if self.chosen.get((0, 1)) == "sliding_window":  # too little to be chosen
            loss -= OBJECTIVE_TOLERANCE / 2
        return torch.full(rows.shape, loss), None


def test_per_head_finds_heads_that_act_together_and_leaves_the_others_alone() -> None:
    """All heads alike are worse than none, and a single head does nothing: a layer does."""
    options = {"none": {}, "forget_more": {"decay_scale": 0.9}, "sliding_window": {"window": 8}}
    heads = [(0, 0), (1, 0), (0, 1), (1, 1)]
    rows = torch.zeros(2, 4, dtype=torch.long)
    model: Any = Scripted()
    with Progress("per head", None, unit="tokens", quiet=True) as progress:
        found, few = (search(model, rows, rows, options, heads, n, progress) for n in (300, 3))
    assert found == [{"kind": "sliding_window", "window": 8, "heads": [[1, 0], [1, 1]]}]
    assert few == [{"kind": "none"}], "three passes compare the choices for all heads alike"


def test_keyed_prompts_spread_their_keys_over_the_text() -> None:
    """Each prompt has one key line, deeper than that of the one before, and scores its answer."""
    texts = torch.tensor([list((PROSE * 2).encode()[start : start + 601]) for start in (0, 99)])
    rows, targets = keyed_prompts(texts, texts.repeat(2, 1), ByteTokenizer())
    assert torch.equal(targets[:2], texts[:, 1:])
    places = []
    for row, target in zip(rows[2:], targets[2:], strict=True):
        prompt = bytes(row.tolist()).decode()
        key = prompt.split("The passkey is ")[1][:5]
        assert bytes(target[target >= 0].tolist()).decode() == f" {key}"
        places.append(prompt.index("The passkey is "))
    assert places == sorted(set(places))
    assert places[-1] > 350


def test_a_model_whose_logits_are_not_finite_is_refused(documents: list[Document]) -> None:
    """Also if the only observation is at the training length."""
    model = build(dtype=torch.float32)
    with torch.no_grad():
        model.cells[0].get_parameter("in_proj.weight")[0, 0] = torch.nan
    with pytest.raises(UserError, match="finite"):
        calibrate(Job(model, documents, train_length=CALIBRATED_EVERY, quiet=True), "state_norm")


@pytest.mark.parametrize("method", list(METHODS))
def test_files(method: str, documents: list[Document], tmp_path: Path) -> None:
    model, path = build(), tmp_path / "calibrated.yaml"
    job = Job(model, documents, **LENGTHS, quiet=True)
    members = calibrate(job, QUICK[method])
    job.write(path, members)
    content = yaml.safe_load(path.read_text())
    assert content["fingerprint"] == model.fingerprint()
    assert content["length"] == LENGTH
    hashes = [sha256(tmp_path / name) for name in ("ishmael.txt", "other.txt")]
    assert content["text_sha256"] == hashes
    assert content["mitigation"] == members
    read = longrnn.mitigation(path)
    assert str(read) == str(mitigation(members))
    known = Calibration(str(path), model.fingerprint(), LENGTH, tuple(hashes))
    assert [part.calibration for part in read.parts] == [known] * len(members)
    for other in (build(seed=1), build("lstm")):
        with pytest.raises(UserError, match="model"):
            other.under(longrnn.mitigation(path))
    # Nor may it come in as a part of something else.
    with pytest.raises(UserError, match="model"):
        build(seed=1).under(mitigation(f"none+{path}"))


def test_a_diagnosis_is_part_of_what_a_mitigation_is(tmp_path: Path) -> None:
    """The choice of heads is part of the fingerprint, so that results and states are kept apart."""
    model, path = build(), tmp_path / "diagnosis.yaml"
    spec = {"kind": "forget_more", "heads": "collapsing", "diagnosis": str(path)}
    path.write_text("collapsing: [[0, 1]]\n")
    one = model.under(mitigation(spec))
    assert one.fingerprint() == model.under(mitigation(spec)).fingerprint()
    path.write_text("collapsing: [[0, 2]]\n")
    other = model.under(mitigation(spec))
    assert one.fingerprint() != other.fingerprint()


def test_keys_choose_the_filter_per_head(tmp_path: Path) -> None:
    """With keyed prompts, the head that carries the key forgets nothing: its filler is ignored."""
    (tmp_path / "filler.txt").write_text(FILLER * 400)
    model = load_editable("passkey-tiny-short")
    texts = read_documents([tmp_path / "filler.txt"], ByteTokenizer(), model)
    method = "per_head(windows=1, keys=2)"
    lengths: dict[str, Any] = {"train_length": 256, "target_length": 2048}
    (member,) = calibrate(Job(model, texts, **lengths, quiet=True), method)
    assert member["kind"] == "token_filter"
    assert member["heads"] == [[0, 1]]
    with pytest.raises(UserError, match="fewer keys"):
        calibrate(Job(model, texts, train_length=64, target_length=128, quiet=True), method)
