"""Trainers of the Hugging Face libraries train a `LongRNNForCausalLM` as a plain loop does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from longrnn.cells import MIXERS
from longrnn.errors import UserError
from longrnn.hf.auto import LongRNNForCausalLM
from longrnn.hf.foreign_load import open_hugging_face
from longrnn.state import leaves
from tests.contracts.builders import build_model, random_tokens
from tests.hf.foreign import architecture, build_auto

RATE = 0.05


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2, "optim": "sgd",
        "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0,
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
        **more,
    }  # fmt: skip


@pytest.mark.parametrize("kind", sorted(MIXERS))
def test_trainer_takes_the_steps_of_a_plain_loop(kind: str, tmp_path: Path) -> None:
    rows = random_tokens(6, 9)
    data = Dataset.from_dict({"input_ids": rows.tolist(), "labels": rows.tolist()})
    model = build_auto(kind)
    trainer = Trainer(model, TrainingArguments(**arguments(tmp_path)), train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    own = build_model(kind, dtype=torch.float32)
    for batch, seen in zip(rows.split(2), losses, strict=True):
        logits = own(batch).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        assert float(loss) == pytest.approx(seen, abs=2e-4)  # it logs four digits
        own.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in own.parameters():
                assert weight.grad is not None
                weight -= RATE * weight.grad
    for (name, weight), other in zip(own.named_parameters(), model.model.parameters(), strict=True):
        torch.testing.assert_close(other, weight, msg=name)


@pytest.mark.parametrize("kind", ["hybrid", "adapter", "plain"])
def test_smoothed_labels_are_those_of_the_next_tokens(kind: str, tmp_path: Path) -> None:
    model: Any = build_auto()
    if kind == "hybrid":
        model = LongRNNForCausalLM.of(open_hugging_face(architecture("falcon_h1")))
    if kind == "adapter":
        model = get_peft_model(model, LoraConfig(target_modules=["in_proj"]))
    options = TrainingArguments(**arguments(tmp_path, label_smoothing_factor=0.1))
    tokens = random_tokens(2, 7)
    found = Trainer(model, options).compute_loss(model, {"input_ids": tokens, "labels": tokens})
    predicted = model(tokens).logits[:, :-1].flatten(0, 1)
    wanted = F.cross_entropy(predicted, tokens[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(found, wanted)


def test_documents_that_a_collator_packs_do_not_see_one_another() -> None:
    """The loss of a packed row is that of its documents, weighted by their scored tokens."""
    model = build_auto()
    documents = [random_tokens(1, length, seed=length)[0].tolist() for length in (5, 9, 2)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    everything: Any = collate([{"input_ids": ids} for ids in documents])
    ones = {"attention_mask": torch.ones(1, 16)}
    position_ids, common = everything["position_ids"], ("input_ids", "labels")
    for names in (["position_ids"], [*everything]):
        batch = {name: everything[name] for name in (*common, *names)}
        packed = model(**ones, **batch)
        torch.testing.assert_close(packed.logits, model(**batch).logits)
        count = sum(len(ids) - 1 for ids in documents)
        total = sum(
            float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss) * (len(ids) - 1)
            for ids in documents
        )
        assert float(packed.loss) == pytest.approx(total / count, rel=1e-5)
        logits = torch.cat([model(torch.tensor([ids])).logits for ids in documents], 1)
        torch.testing.assert_close(packed.logits, logits)
        state, found = None, []
        for part in (slice(0, 3), slice(3, 14), slice(14, 16)):  # inside and between documents
            given = {"input_ids": batch["input_ids"][:, part]}
            given["position_ids"] = position_ids[:, part]
            output = model(**given, past_key_values=state)
            state = output.past_key_values
            found.append(output.logits)
        torch.testing.assert_close(torch.cat(found, 1), logits)


@pytest.mark.parametrize(
    ("kind", "side"),
    [*((kind, "left") for kind in MIXERS), ("mamba2", "right"), ("lstm", "middle")],
)
def test_a_padded_batch_has_the_loss_states_and_gradients_of_its_rows(kind: str, side: str) -> None:
    """Its hidden states stand where the tokens do, and are 0 at padding."""
    rows = [random_tokens(1, length, seed=length)[0] for length in (8, 5, 3)]
    width = 8
    tokens, mask = torch.full((3, width), 2), torch.zeros(3, width, dtype=torch.long)
    for number, row in enumerate(rows):
        free = width - len(row)
        before = {"left": free, "right": 0, "middle": free // 2}[side]
        tokens[number, before : before + len(row)] = row
        mask[number, before : before + len(row)] = 1
    labels = tokens.masked_fill(mask == 0, -100)
    padded, hidden = build_auto(kind, seed=3, dtype=torch.float64), {"output_hidden_states": True}
    output = padded(tokens, attention_mask=mask, labels=labels, use_cache=True, **hidden)
    output.loss.backward()
    alone = build_auto(kind, seed=3, dtype=torch.float64)
    outputs = [alone(row[None], labels=row[None], **hidden) for row in rows]
    by_row = zip(*(out.hidden_states for out in outputs), strict=True)
    for found, wanted in zip(output.hidden_states, by_row, strict=True):
        torch.testing.assert_close(found[mask.bool()], torch.cat(wanted, 1)[0])
        assert not found[~mask.bool()].any()
    count = sum(len(row) - 1 for row in rows)
    parts = [out.loss * (len(row) - 1) for out, row in zip(outputs, rows, strict=True)]
    loss = torch.stack(parts).sum() / count
    loss.backward()
    torch.testing.assert_close(output.loss, loss)
    states = [dict(leaves(out.past_key_values.state)) for out in outputs]
    for name, leaf in leaves(output.past_key_values.state):
        torch.testing.assert_close(leaf, torch.cat([state[name] for state in states]), msg=name)
    for (name, one), other in zip(padded.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("mamba2", {"target_modules": ["conv1d", "in_proj"]}),
        ("mamba", {"target_modules": ["in_proj"], "target_parameters": ["A_log"]}),
    ],
)
def test_an_adapter_of_what_is_not_called_is_refused(kind: str, targets: dict[str, Any]) -> None:
    """Of a convolution, and of a parameter of the recurrence."""
    model, text = build_auto(kind), random_tokens(1, 6)
    sizes = getattr(model.model.cells[0], "d_xBC", 1)
    adapted = get_peft_model(model, LoraConfig(r=sizes, **targets))
    for length in (6, 1):
        with pytest.raises(UserError, match="convolution"):
            adapted(text[:, :length])
