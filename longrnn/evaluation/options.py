"""The kinds of evaluation: their options, which are read without torch, and where each is computed.

A kind is one class of options here, entered in `EVALUATIONS`, and one class that measures, which is
imported when an evaluation of this kind is built.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from longrnn.bundled import text_path
from longrnn.options import Ascending, Count, Lengths, Options, Seed, Share, Tokens, listed
from longrnn.registry import Registry
from longrnn.units import parse_length

if TYPE_CHECKING:
    from longrnn.evaluation.base import Evaluation


def _place(value: Any) -> int:
    return 0 if str(value) == "0" else parse_length(str(value))


# A path, or the name of a bundled text such as `bundled:moby_dick`.
TextFile = Annotated[Path, BeforeValidator(text_path)]


class EvaluationOptions(Options):
    """The options of one evaluation.

    Attributes:
        target: module and name of the class that measures.
        group: of the command that has this evaluation, as in `longrnn eval passkey`; None if only
            suites have it.
        sizes: options that say how much is measured, not what: results of all their values belong
            in one folder.
    """

    name: str | None = None

    target: ClassVar[str]
    group: ClassVar[str | None] = "eval"
    sizes: ClassVar[frozenset[str]] = frozenset(
        ("name", "lengths", "depths", "insert_at", "n", "windows", "positions", "batch_size")
    )

    def evaluation(self) -> Evaluation[Any]:
        """Return the evaluation with these options."""
        module, _, name = self.target.rpartition(".")
        return getattr(import_module(module), name)(self)

    def variant(self) -> str:
        """Return what is measured where it is not the default, for the name of a folder."""
        values = self.model_dump(exclude_defaults=True, exclude=set(self.sizes))
        return "-".join(f"{name}-{_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    """Return the value of an option as a part of the name of a folder."""
    if isinstance(value, dict):
        return "-".join(f"{name}-{_short(part)}" for name, part in value.items())
    if isinstance(value, list):
        return "-".join(map(_short, value))
    return value.stem if isinstance(value, Path) else str(value)


EVALUATIONS: Registry[EvaluationOptions] = Registry("evaluation")


@EVALUATIONS.register("passkey")
class PasskeyOptions(EvaluationOptions):
    """Evaluate passkey retrieval over lengths × depths, with keys that training never saw.

    All models get the same keys at the same places, in prompts of exactly the same number of their
    own tokens. Insertion points instead of depths separate the effect of the key's position from
    that of its distance to the question.

    Example: longrnn eval passkey passkey-tiny 'passkey-tiny+forget_more' --lengths 1k,16k
    """

    target = "longrnn.evaluation.passkey.PasskeyRetrieval"

    lengths: Lengths = Field([256, 1024, 4096, 16384])
    """Prompt lengths in tokens."""
    depths: Ascending[Share] = Field(default=[0.0, 0.25, 0.5, 0.75, 1.0])
    """Where the key is, as shares of the prompt, from 0 (its start) to 1."""
    insert_at: Ascending[Annotated[int, BeforeValidator(_place)]] | None = None
    """Instead of depths: tokens of filler before the key, such as 0,8k,16k."""
    n: Count = 10
    """Prompts per cell."""
    seed: Seed = 0
    """Random seed of the keys."""
    filler: TextFile | None = None
    """A text file, or bundled:moby_dick, to hide the keys in (default: The grass is green. …)."""
    n_keys: Annotated[int, Field(ge=1, le=9)] = 1
    """Numbered keys in one prompt; the question is about one of them."""
    chunk_select: Tokens | None = None
    """Split the prompt into chunks of this many tokens, and take the answer with the lowest
    entropy."""
    batch_size: Count = 16
    """Prompts, or chunks of a prompt, in one batch."""


class Texts(Options):
    """Texts to read."""

    texts: list[TextFile] = Field(default=[])
    """A text file, or a bundled text such as bundled:moby_dick; may be given several times."""
    newlines: bool = False
    """Also measure a text of newlines, the simplest text."""


@EVALUATIONS.register("perplexity")
class PerplexityOptions(Texts, EvaluationOptions):
    """Loss by position on long texts.

    A row of the table has the positions between the length above it and its own. Several models are
    scored on the same bytes, whatever their tokenizers.

    Example: longrnn eval perplexity passkey-tiny --text book.txt --lengths 1k,64k
    """

    target = "longrnn.evaluation.perplexity.Perplexity"

    lengths: Lengths = Field([1024, 4096, 16384, 65536])
    """Lengths in tokens of the first model. Windows have the last length."""
    windows: Count | None = None
    """At most this many windows of each text, spread evenly (default: all)."""
    context: Tokens | None = None
    """With --stride: score in overlapping windows of this many tokens, each read from an empty
    state, instead of carrying the state."""
    stride: Tokens | None = None
    """With --context: tokens between the starts of two overlapping windows."""
    batch_size: Count = 8
    """Windows in one batch."""


@EVALUATIONS.register("task")
class SequenceOptions(EvaluationOptions):
    """Evaluate a sequence task on held-out sequences: token accuracy and exact match.

    For reverse_dual_frequency also the accuracy of rare and of frequent tokens, each among rare and
    among frequent tokens. What is not given is as in the training of the first model.

    Example: longrnn eval task runs/sort --lengths 16
    """

    target = "longrnn.evaluation.tasks.Sequences"

    task: str | dict[str, Any] | None = None
    """Name of the task, such as sort, recall or reverse_dual_frequency (default: as in training).
    """
    vocab_size: Count | None = None
    """Vocabulary size of the task (default: as in training)."""
    lengths: Lengths | None = None
    """Lengths of the sequences in tokens (default: as in training)."""
    n: Count = 1024
    """At most this many held-out sequences."""
    seed: Seed = 0
    """Random seed of a task that was not trained."""
    batch_size: Count = 64


@EVALUATIONS.register("memory")
class MemoryOptions(EvaluationOptions):
    """Measure how much predictions depend on the start of the context (effective remembrance).

    EffRem_T(t) is the total variation distance between the prediction after T tokens and the
    prediction of a model that was not given the first t of them.

    Example: longrnn diagnose memory passkey-tiny --text book.txt --positions 1k,4k,16k
    """

    target = "longrnn.evaluation.memory.EffectiveMemory"
    group = "diagnose"

    texts: list[TextFile] = Field(min_length=1)
    """A text file, or a bundled text such as bundled:moby_dick; may be given several times."""
    positions: Lengths = Field([1024, 4096, 16384])
    """T: numbers of tokens after which the prediction is compared."""
    # At most this many stretches of each text, each as long as the longest T.
    stretches: Count = 8


@EVALUATIONS.register("answers")
class AnswerOptions(EvaluationOptions):
    """Loss per answer token, and the share of documents whose answers are all exactly right."""

    target = "longrnn.evaluation.tasks.Answers"
    group = None

    # Tables or datasets of prompts and answers, or a corpus of `longrnn data build --instruct`.
    data: str | list[str]
    # All documents, or training or held_out ones.
    part: Literal["all", "training", "held_out"] = "all"
    # Number of documents, or all if there are fewer.
    n: Count = 200
    # Random seed of which documents.
    seed: Seed = 0
    # Documents in one batch.
    batch_size: Count = 8


class LongTasks(Options):
    """How lm-eval tasks with long prompts are read."""

    lengths: Lengths | None = None
    """Prompt lengths in tokens, for tasks that make prompts of a length; the results are then a
    table by length and task in --output."""
    data: Path | None = None
    """A folder with the data that tasks would download."""
    chunk_select: Tokens | None = None
    """For tasks that generate: answer from the selected chunk of this many tokens and the last line
    of the prompt."""


@EVALUATIONS.register("harness")
class HarnessOptions(LongTasks, EvaluationOptions):
    """Scores of lm-eval tasks by length, a document being one sample."""

    target = "longrnn.evaluation.harness.evaluation.HarnessTasks"
    group = None

    # Names of lm-eval tasks or groups.
    tasks: Annotated[list[str], BeforeValidator(listed), Field(min_length=1)]
    # Documents of each task and length; by default all.
    n: Count | None = None
    # Examples before each question; by default those of the task.
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    # Replaces generation options of the tasks, such as max_gen_toks.
    gen_kwargs: dict[str, Any] | None = None
    # A folder with further task files.
    include_path: str | None = None
    # Documents in one batch.
    batch_size: Count = 8


@EVALUATIONS.register("cost")
class CostOptions(EvaluationOptions):
    """Speed, size of the state or cache, and on a GPU the peak memory of tensors."""

    target = "longrnn.evaluation.cost.Cost"
    group = None

    # Numbers of tokens to read, and tokens to generate after that.
    lengths: Lengths = Field([256, 1024, 4096])
    decode: Tokens = 32
