"""A transformer gets a recurrent memory: exact at the start, taught by the transformer itself."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from longrnn import load
from longrnn.checkpoints.adapters import add_adapters
from longrnn.config import read_recorded
from longrnn.data.batch import Batch, row_starts
from longrnn.errors import UserError
from longrnn.hf.attention_window import AttentionWindow
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.hf.memory import with_memory
from longrnn.hf.replaced import restorations, with_replaced
from longrnn.training.distillation import AttentionDifference, Teacher
from longrnn.training.linearize import linearize
from tests.contracts.builders import assert_near
from tests.hf.foreign import architecture, assert_continues, tokens, with_bytes
from tests.launched import CPU2, FSDP2, launched
from tests.texts import TEXTS
from tests.training.runs import metrics

WINDOW, SINKS = 6, 2
LLAMAS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True, "attention_bias": True},
    "llama-narrow": {"head_dim": 6},
    "mistral": {"sliding_window": None},
    "qwen2": {},
}
QUICK = ("max_steps=3", "save_steps=1", "eval_steps=3", "logging_steps=1", "eval_samples=2")


LONGER = ("max_steps=15", "save_steps=15", "learning_rate=1e-3")


def transformer(name: str = "llama", **options: Any) -> Any:
    return architecture(name.partition("-")[0], **LLAMAS[name], **options)


def opened(base: Any, layers: list[int] | None = None) -> Any:
    """The hybrid under its window, whose memories return something."""
    torch.manual_seed(0)
    model: Any = open_hugging_face(with_memory(base, shortest=4, longest=32, layers=layers))
    for cell in model.cells:
        torch.nn.init.normal_(cell.layer.out_proj.weight, std=0.3)
    return model.with_attention_window(WINDOW, SINKS)


@pytest.mark.parametrize("name", LLAMAS)
def test_a_new_memory_changes_nothing(name: str) -> None:
    """By transformers, and under a window at any split, it is the model that it was added to."""
    base, text = transformer(name), tokens(2, 30)
    whole = with_memory(base, shortest=4, longest=32)
    with torch.no_grad():
        expected = base(input_ids=text).logits
        assert_near(whole(input_ids=text).logits, expected, 1e-5)
    windowed = open_hugging_face(base).with_attention_window(WINDOW, SINKS)
    model = open_hugging_face(whole).with_attention_window(WINDOW, SINKS)
    assert_continues(model, text, windowed(text).logits, 1e-5)


def test_layers_without_a_memory() -> None:
    """They have no cell, nothing of them is trained, and the others compute what they did."""
    base, text = transformer(), tokens(2, 30)
    model = opened(base, [1])
    assert model.layer_numbers == [1]
    expected = [model(text[:, :1])]
    for place in range(1, 30):
        expected.append(model(text[:, place : place + 1], expected[-1].state))
    assert_continues(model, text, torch.cat([each.logits for each in expected], 1), 1e-5)
    both = opened(base)
    for name in ("in_proj.weight", "out_proj.weight", "in_proj.bias"):
        both.cells[1].layer.get_parameter(name).data = model.cells[0].layer.get_parameter(name)
    torch.nn.init.zeros_(both.cells[0].layer.out_proj.weight)
    assert_near(both(text).logits, model(text).logits, 1e-6)
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert not any("layers.0.mamba" in name for name in trained)
    with pytest.raises(UserError, match="layers 0 to 1"):
        with_memory(base, shortest=4, longest=32, layers=[0, 2])


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("qwen3", {}, "k_norm"),
        ("gemma2", {}, "hidden_act"),
        ("llama", {"hidden_act": "gelu"}, "activation"),
        ("granite", {"residual_multiplier": 0.5}, "logits differ"),
        ("mistral", {"sliding_window": 8}, "window of its own"),
        ("gpt2", {}, "LLaMA"),
    ],
)
def test_other_layers_are_refused(kind: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        with_memory(architecture(kind, **options), shortest=4, longest=32)


def batch(text: torch.Tensor) -> Batch:
    weights = torch.rand(text[:, 1:].shape, generator=torch.Generator().manual_seed(0)).double()
    return Batch(text[:, :-1], text[:, 1:], row_starts(text[:, :-1]), weights)


@pytest.mark.parametrize(
    ("name", "layers", "spec"),
    [("llama", None, None), ("llama-tied", [1], "sliding_window(window=3)")],
)
def test_memories_are_taught_what_the_window_removes(name: str, layers: Any, spec: Any) -> None:
    """Against hooks on transformers in float64, with masks."""
    base = transformer(name).double()
    model, text = opened(base, layers), tokens(2, 13)
    steps = torch.arange(12)
    distance = steps[:, None] - steps
    own: Any = AttentionDifference(model.with_attention_window(WINDOW, 0).under(spec))
    add_adapters(model, r=2, targets=["q_proj", "o_proj"], full=["mamba"])
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    mask = torch.zeros(12, 12).double().masked_fill((distance < 0) | (distance >= WINDOW), -1e30)
    inputs: list[Any] = []
    removed: list[Any] = []

    def compare(layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        if kwargs["attention_mask"] is None or kwargs["attention_mask"] is not given:
            inputs.append(kwargs["hidden_states"])
            again = kwargs | {"attention_mask": given, "past_key_values": None}
            removed.append(output[0] - layer(*args, **again)[0])

    given = mask[None, None]
    for layer in base.model.layers:
        layer.self_attn.register_forward_hook(compare, with_kwargs=True)
    with torch.no_grad():
        logits = base(input_ids=text[:, :-1], use_cache=False).logits
    losses, weights = [], batch(text).weights[..., None]  # type: ignore[index]
    for cell, edit, number in zip(model.cells, own.model.edits, model.layer_numbers, strict=True):
        y, _ = cell(inputs[number], cell.init_state(2, edit), edit)
        missing = (weights * (y - removed[number]).square()).sum((1, 2))
        losses.append((missing / (weights * removed[number].square()).sum((1, 2))).mean())
    found = own([batch(text)], model.init_state(2))
    assert_near(found.loss, torch.stack(losses).mean(), 1e-7)  # transformers rotates in float32
    # The other objective: the predictions of the transformer, and its own.
    teacher = Teacher(model)([batch(text)], model.init_state(2))
    ours = model(text[:, :-1]).logits
    each = F.cross_entropy(ours.mT, logits.softmax(-1).mT, reduction="none")
    assert_near(teacher.loss, (weights[..., 0] * each).sum(1).mean(), 1e-6)


def test_rows_within_the_window_are_left_out() -> None:
    """Their loss is 0; their predictions are taught, also in a batch that ends in padding."""
    model, whole = opened(transformer("llama-tied").double()), batch(tokens(2, 17))
    is_token = torch.arange(16) < torch.tensor([[16], [WINDOW + SINKS]])
    rows = whole._replace(is_token=is_token, weights=is_token * whole.weights)  # type: ignore[operator]
    for objective in (AttentionDifference(model), Teacher(model)):
        parts = [(rows, 2), (rows.row(0), 1), (rows.row(1), 1)]
        both, long, short = (objective([part], model.init_state(n)).loss for part, n in parts)
        if objective.reads_attention:
            short.backward()
            gradients = [w.grad for w in model.parameters() if w.grad is not None]
            assert not any(value.any() for value in [short, *gradients])
        assert_near(both, long if objective.reads_attention else (long + short) / 2, 1e-9)


def run(folder: Path, *overrides: str, **options: Any) -> Any:
    larger: dict[str, Any] = {"vocab_size": 256, "max_position_embeddings": 256}
    base = with_bytes(transformer(**larger), folder / "base")
    sizes: dict[str, Any] = {"window": WINDOW, "sinks": SINKS, "length": 32}
    return linearize(
        str(base), TEXTS, folder / "out", overrides=[*QUICK, *overrides], **sizes | options
    )


def test_training_leaves_the_transformer_as_it_was(tmp_path: Path) -> None:
    made = run(tmp_path, *LONGER, layers=[1])
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    after = AutoModelForCausalLM.from_pretrained(made.trained)
    weights = after.state_dict()
    torch.testing.assert_close(weights["lm_head.weight"], before["lm_head.weight"], atol=0, rtol=0)
    for name in ("q_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{name}.weight"
        assert torch.equal(weights[name], before[name])
    for layer, has_memory in enumerate([False, True]):
        of_layer = [weights[name] for name in weights if f"layers.{layer}.mamba" in name]
        assert any(bool(weight.any()) for weight in of_layer) == has_memory
    losses = [row["loss"] for row in metrics(tmp_path / "out/attention") if "loss" in row]
    assert losses[0] == pytest.approx(1)
    assert min(losses) < 1
    text, model = tokens(2, 40), load(f"{made.trained}+none")
    with torch.no_grad():
        assert_near(model(text).logits, after(input_ids=text).logits, 1e-5)
    assert load(made.trained).fingerprint() != model.fingerprint()
    trained = Path(made.trained, "model.safetensors").read_bytes()
    assert run(tmp_path, *LONGER, layers=[1])[:3] == made[:3]
    assert Path(made.trained, "model.safetensors").read_bytes() == trained
    other = with_bytes(transformer(vocab_size=256), tmp_path / "other")
    with pytest.raises(UserError, match="other"):
        linearize(str(other), TEXTS, tmp_path / "out", window=WINDOW, sinks=SINKS, length=32)
    with pytest.raises(UserError, match="mitigation=sliding_window"):
        run(tmp_path, "mitigation=sliding_window(window=4)")
    for options in ({"window": 4}, {"length": 16}, {"layers": [0]}, {"layers": None}):
        with pytest.raises(UserError, match="output"):
            run(tmp_path, **{"layers": [1]} | options)


@pytest.mark.parametrize("name", LLAMAS)
def test_a_model_with_no_layer_replaced_is_the_transformer(name: str) -> None:
    base, text = transformer(name), tokens(2, 30)
    if name == "llama-narrow":
        with pytest.raises(UserError, match="4 heads of 6"):
            with_replaced(base, [], shortest=4, longest=32)
        return
    with torch.no_grad():
        found = with_replaced(base, [], shortest=4, longest=32)(input_ids=text).logits
        assert_near(found, base(input_ids=text).logits, 1e-6)


def test_what_full_attention_gives_a_layer() -> None:
    """The loss with windows in all layers less that with windows in the others, by masks."""
    base, whole = transformer(), batch(tokens(2, 13))
    weights: Any = whole.weights
    distance = torch.arange(12)[:, None] - torch.arange(12)
    mask = torch.zeros(12, 12).masked_fill((distance < 0) | (distance >= WINDOW), -1e30)

    def windowed(layer: Any, args: Any, kwargs: Any) -> Any:
        return args, kwargs | {"attention_mask": mask[None, None]}

    def loss(restored: int | None) -> torch.Tensor:
        layers = [each for n, each in enumerate(base.model.layers) if n != restored]
        hooks = [e.self_attn.register_forward_pre_hook(windowed, with_kwargs=True) for e in layers]
        with torch.no_grad():
            logits = base(input_ids=whole.tokens).logits
        for hook in hooks:
            hook.remove()
        return (weights * F.cross_entropy(logits.mT, whole.targets, reduction="none")).sum()

    model, window = open_hugging_face(base), AttentionWindow(WINDOW, 0)
    found = restorations(model, whole.tokens, whole.targets, weights, window)
    expected = [float(loss(None) - loss(number)) for number in range(2)]
    assert found == pytest.approx(expected, abs=1e-5)
    assert max(map(abs, expected)) > 1e-3


def test_attention_is_replaced(tmp_path: Path) -> None:
    """In the layer that full attention helps least; transformers opens the result."""
    made = run(tmp_path, *LONGER, replace=1)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    after, text = AutoModelForCausalLM.from_pretrained(made.trained), tokens(2, 40)
    gains = after.config.longrnn_restorations
    least = min(range(2), key=gains.__getitem__)
    kinds = ["full_attention", "full_attention"]
    kinds[least] = "linear_attention"
    assert after.config.layer_types == kinds
    name = f"model.layers.{1 - least}.self_attn.q_proj.weight"
    assert torch.equal(after.state_dict()[name], base.state_dict()[name])
    model: Any = load(made.trained)
    with torch.no_grad():
        assert_near(model(text).logits, after(input_ids=text).logits, 1e-5)
    losses = [row["loss"] for row in metrics(tmp_path / "out/attention") if "loss" in row]
    assert losses[0] == pytest.approx(1)
    assert min(losses) < 1

    whole, read = batch(text), []
    base.model.layers[least].self_attn.register_forward_hook(
        lambda layer, args, kwargs, output: read.extend([kwargs["hidden_states"], output[0]]),
        with_kwargs=True,
    )
    with torch.no_grad():
        logits = base(input_ids=whole.tokens).logits
    (cell,), weights = model.cells, whole.weights[..., None]  # type: ignore[index]
    y, _ = cell(read[0], cell.init_state(2))
    missing = (weights * (y - read[1]).square()).sum((1, 2))
    share = (missing / (weights * read[1].square()).sum((1, 2))).mean()
    assert_near(AttentionDifference(model)([whole], model.init_state(2)).loss, share, 1e-5)
    each = F.cross_entropy(model(whole.tokens).logits.mT, logits.softmax(-1).mT, reduction="none")
    wanted = (weights[..., 0] * each).sum(1).mean()
    assert_near(Teacher(model)([whole], model.init_state(2)).loss, wanted, 1e-5)

    assert run(tmp_path, *LONGER, replace=1)[:3] == made[:3]
    options: dict[str, Any]
    for options in ({}, {"replace": 2}, {"replace": 1, "layers": [0]}):
        with pytest.raises(UserError, match="give"):
            run(tmp_path, *LONGER, **options)


def test_adapters_beside_the_memories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher is without them. What marks a stage as finished is written after other files."""
    written, move = list[Path](), os.replace
    monkeypatch.setattr("os.replace", lambda *paths: [written.append(paths[1]), move(*paths)])
    made = run(tmp_path, *LONGER, layers=[1], lora=2)
    for stage, last in (("attention", "config.json"), ("teacher", "adapter_config.json")):
        names = [path.name for path in written if path.parent == tmp_path / "out" / stage]
        assert names[-2:] == [last, "checksums.json"]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out/attention")
    adapted, text = PeftModel.from_pretrained(base, made.trained), tokens(2, 40)
    with torch.no_grad():
        expected = adapted(input_ids=text).logits
    assert_near(load(f"{made.trained}+none")(text).logits, expected, 1e-5)
    weights = load_file(Path(made.trained, "adapter_model.safetensors"))
    assert any("layers.0.self_attn.q_proj.lora_B" in name for name in weights)
    assert all("lora" in name or "layers.1.mamba" in name for name in weights)
    assert all(bool(weights[name].any()) for name in weights if "out_proj" in name)
    assert run(tmp_path, *LONGER, layers=[1], lora=2)[:3] == made[:3]
    with pytest.raises(UserError, match="output"):
        run(tmp_path, *LONGER, layers=[1])


def test_a_budget_is_turned_into_steps(tmp_path: Path) -> None:
    """Two stages have the steps that fit; a run that was stopped continues with its own."""
    few = ("save_steps=1000", "logging_steps=1", "validation=null")
    made = run(tmp_path, *few, budget=0.04)
    stages = [Path(made.trained).parent / name for name in ("attention", "teacher")]
    counts = [max(row["step"] for row in metrics(stage)) for stage in stages]
    assert made.minutes > 0.02
    assert counts[0] > 1  # of some fifty, if nothing else runs
    assert read_recorded(stages[0])["warmup_steps"] <= counts[0] / 10
    shutil.rmtree(stages[1])
    for path in [*stages[0].glob("model*"), stages[0] / "config.json"]:
        path.unlink()
    assert max(row["step"] for row in metrics(stages[0])) == counts[0]
    run(tmp_path, *few, budget=1e-6)
    assert max(row["step"] for row in metrics(stages[0])) == counts[0]
    assert max(row["step"] for row in metrics(stages[1])) == 1


MEMORY = {"layers": [1], "keys": 1, "lora": 2}


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        (MEMORY, CPU2),
        pytest.param(MEMORY, FSDP2, marks=pytest.mark.slow),
        pytest.param({"replace": 1}, CPU2, marks=pytest.mark.slow),
        pytest.param({"replace": 1}, FSDP2, marks=pytest.mark.slow),
    ],
    ids=["memory-ddp", "memory-fsdp2", "replace-ddp", "replace-fsdp2"],
)
def test_two_processes_train_like_one(
    options: dict[str, Any], flags: tuple[str, ...], tmp_path: Path
) -> None:
    made = run(tmp_path / "one", "per_device_train_batch_size=2", length=192, **options)
    words = ["--window", WINDOW, "--sinks", SINKS, "--length", 192, "--no-evaluate", *QUICK]
    words += [word for path in TEXTS for word in ("--text", path)]
    for name, value in options.items():
        words += [f"--{name}", value[0] if isinstance(value, list) else value]
    words += ["--output", tmp_path / "two", "per_device_train_batch_size=1"]
    done = launched("linearize", tmp_path / "one/base", *map(str, words), flags=flags)
    assert done.returncode == 0, done.stderr
    text = tokens(2, 30)
    trained = load(tmp_path / "two/teacher")
    assert_near(trained(text).logits, load(made.trained)(text).logits, 1e-4)


def test_training_in_bfloat16_and_with_recomputation(tmp_path: Path) -> None:
    """Recomputed blocks have the same bits, and a loss in bfloat16 is near that in float32."""

    def first_losses(*overrides: str) -> list[float]:
        made = run(tmp_path / "-".join(["run", *overrides]), *overrides)
        stages = (Path(made.trained).parent / "attention", Path(made.trained))
        return [row["loss"] for stage in stages for row in metrics(stage) if "loss" in row]

    plain = first_losses()
    assert first_losses("gradient_checkpointing=block") == plain
    assert first_losses("mixed_precision=bf16") == pytest.approx(plain, rel=1e-3)
