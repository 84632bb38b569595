"""A tiny Mamba-2 checkpoint of transformers with a tokenizer, and lm-eval tasks on disk."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from longrnn import load
from longrnn.hf.tokenizer import byte_level
from longrnn.models import RecurrentLM
from tests.cli.conftest import cli as cli
from tests.hf.foreign import causal
from tests.texts import DATA, byte_level_bpe

VOCAB = 50
WORDS = "the sun is red and so was an old tree near it as rain ran on stone"
EOS, BOS = "<|end|>", "<s>"


class Setting(NamedTuple):
    """`checkpoint`: Hugging Face folder; `model`: the same as RecurrentLM; `tasks`: YAML."""

    checkpoint: Path
    model: RecurrentLM
    tasks: Path


def hf_model(*arguments: Any, **options: Any) -> Any:
    """Return lm-eval's own `hf` model; its decorator hides its parameters and attributes."""
    from lm_eval.models.huggingface import HFLM

    return cast(Any, HFLM)(*arguments, **options)


def text(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS.split()) for _ in range(count))


def save_tokenizer(folder: Path, template: str) -> None:
    """Write a tokenizer whose BOS is 1 and EOS 0; a template says where it adds them to a text."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_level_bpe([WORDS + "\n\n"], VOCAB, [EOS, BOS], [])
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(EOS, 0), (BOS, 1)]
        )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    wrapped.save_pretrained(folder)


@pytest.fixture(scope="session")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("harness")
    rng = random.Random(0)
    tokenizer = byte_level_bpe([text(rng, 400) + "\n\n"], VOCAB, [EOS], [])
    causal("mamba2", vocab_size=VOCAB, tie_word_embeddings=True).save_pretrained(
        root / "checkpoint"
    )
    ours = load(root / "checkpoint")
    assert isinstance(ours, RecurrentLM)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    wrapped.save_pretrained(root / "checkpoint")

    rows = [
        {
            "text": text(rng, 4 + 3 * index),
            "choices": [text(rng, 1 + k) for k in range(4)],
            "gold": index % 4,
        }
        for index in range(5)
    ]
    data = root / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "tasks").mkdir()
    for path in (DATA / "tasks").iterdir():
        (root / "tasks" / path.name).write_text(path.read_text().replace("FILE", str(data)))
    return Setting(root / "checkpoint", ours, root / "tasks")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A LLaMA of random weights that reads bytes, up to 8,192 of them."""
    folder = tmp_path / "llama"
    causal("llama", vocab_size=256, max_position_embeddings=8192).save_pretrained(folder)
    tokenizer = byte_level()
    # The `hf` type decodes EOS; this character stands for byte 0, which no text here has.
    tokenizer.tokenizer.eos_token = tokenizer.tokenizer.convert_ids_to_tokens(0)
    tokenizer.save(folder)
    return folder


def evaluate(model: Any, tasks: Path, *names: str, **options: Any) -> dict[str, Any]:
    """Return lm-eval's results with samples, without listing lm-eval's own tasks."""
    manager = TaskManager(
        include_path=str(tasks), include_defaults=False, metadata=options.get("metadata")
    )
    run: Any = simple_evaluate
    return run(model=model, tasks=list(names), task_manager=manager, bootstrap_iters=0, **options)
