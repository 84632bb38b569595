"""The lm-eval model type `longrnn`.

Notable choices:
- lm-eval has no entry points for models: importing this module registers the type.
  `lm_eval.models` is imported first, because lm-eval fills its registry only while it is empty.
- Texts are tokenized by the methods of lm-eval's `hf` type, so that both score the same tokens.
- A model without a maximum length reads everything. For other models, contexts are truncated on the
  left as in the `hf` type; this is counted, logged, and recorded with the results.
- With several processes, every process evaluates every n-th document, and lm-eval gathers the
  scores in the main process.
"""

import hashlib
import json
import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models import huggingface, utils
from torch import Tensor

from longrnn import processes
from longrnn.checkpoints.load import load
from longrnn.checkpoints.opened import refuse_unfit
from longrnn.checkpoints.tokenizer import load_tokenizer
from longrnn.errors import UserError
from longrnn.hf.tokenizer import byte_level
from longrnn.inference.chunk_select import select
from longrnn.inference.engine import Pair, complete, score
from longrnn.inference.trie import Ids
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.text import ByteTokenizer

logger = logging.getLogger(__name__)

BATCH_SIZE = 8
# lm-eval's default for tasks that do not set `max_gen_toks`.
MAX_NEW_TOKENS = 256
# Generation options that are supported, and values of others that have no effect.
GENERATION_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}
NEUTRAL = {"num_beams": 1, "top_k": 0, "use_cache": True}
# Precedes the first token of a text if the tokenizer has neither BOS nor EOS.
NEWLINE = "\n"
# The maximum length of a model without a limit.
NO_MAX_LENGTH = sys.maxsize

HFLM: Any = huggingface.HFLM  # its decorator hides its type


class LongRNN(HFLM):
    """Any `LanguageModel` as an lm-eval model.

    Args:
        pretrained: a checkpoint as `load` takes it, or a loaded model.
        tokenizer: a tokenizer or its name; by default that of the checkpoint.
        device: where a checkpoint is loaded; by default the CPU.
        batch_size: rows in one batch; `auto` for BATCH_SIZE.
        max_length: tokens to which contexts are truncated; by default the maximum of the model.
        add_bos_token: whether texts begin with BOS; by default the setting of the tokenizer.
        chunk_select: tokens per chunk; of a prompt for generation, only the selected chunk and the
            last line, which is the question, are read before the answer.
        quiet: show no progress.

    Attributes:
        counts: tokens `requested` and `computed`, and `truncated` requests. At the end of an
            evaluation it is the sum over all processes.

    Raises:
        UserError: the model or tokenizer cannot be loaded, or the options do not fit it.
    """

    # These are properties of the `hf` type.
    model: Any = None
    batch_size: Any = None
    max_length: Any = None

    def __init__(
        self,
        pretrained: str | Path | LanguageModel,
        *,
        tokenizer: Any = None,
        device: str | None = None,
        batch_size: int | str = BATCH_SIZE,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        chunk_select: int | None = None,
        quiet: bool = False,
    ) -> None:
        TemplateLM.__init__(self)  # that of the `hf` type would load the model with transformers
        processes.start()
        self._rank, self._world_size = processes.rank(), processes.size()
        self._device = torch.device("cpu")  # of the numbers that lm-eval exchanges
        self.model = pretrained
        if not isinstance(pretrained, LanguageModel):
            self.model = load(pretrained, device=device)
        source: Any = pretrained if tokenizer is None else tokenizer
        # As in the `hf` type, add_bos_token changes a tokenizer that is loaded here, but not one
        # that is given, and determines whether special tokens are added.
        named = isinstance(source, (str, Path))
        loaded: Any = load_tokenizer(source, add_bos_token=add_bos_token) if named else source
        refuse_unfit(loaded, self.model)
        self.fingerprint = loaded.fingerprint()
        hf = byte_level() if type(loaded) is ByteTokenizer else loaded
        self.tokenizer: Any = hf.tokenizer
        self.batch_size = BATCH_SIZE if str(batch_size).startswith("auto") else int(batch_size)
        longest = self.model.max_length or NO_MAX_LENGTH
        self.max_length = longest if max_length is None else int(max_length)
        if not 1 < self.max_length <= longest:
            raise UserError(
                f"max_length {self.max_length} is not valid for a model that reads at most "
                f"{longest:,} tokens: give from 2 to that"
            )
        self.custom_prefix_token_id, self.add_bos_token = None, add_bos_token
        self.enable_thinking, self.chat_template_args = False, {}
        self.chunk_select, self.quiet = chunk_select, quiet
        self.counts: Counter[str] = Counter()

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Keep answers for `use_cache` in a table of their own for each model and setting.

        lm-eval finds an answer by the request alone: one file would serve the answers of one model
        to another.
        """
        super().set_cache_hook(cache_hook)
        answers = cache_hook.dbdict
        if answers is not None:
            prints = self.model.fingerprint(), self.fingerprint
            settings = [*prints, self.add_bos_token, self.max_length, self.chunk_select]
            table = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
            answers.tablename = f"longrnn_{table}"
            columns = "(key TEXT PRIMARY KEY, value BLOB)"
            answers.conn.execute(f'CREATE TABLE IF NOT EXISTS "{answers.tablename}" {columns}')
            answers.commit()

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text: BOS, EOS or a newline."""
        token: int | None = super().prefix_token_id
        return self.tokenizer.encode(NEWLINE)[-1] if token is None else token

    def _prompt(self, text: str, more: int, progress: Progress) -> Ids:
        """Return the ids of a prompt for generation, as `tok_batch_encode` of the `hf` type."""
        begins = utils.has_bos_prefix(text, self.tokenizer.bos_token)
        special = not begins and self.add_bos_token is not False
        ids = self.tok_encode(text, special) or [self.prefix_token_id]
        context = text.rstrip().rpartition("\n")[0]
        if self.chunk_select is not None and context:
            size = min(len(self.tok_encode(context, special)), len(ids) - 1)
            progress.advance(0, len(ids))
            # BOS precedes every chunk.
            start = int(ids[0] == self.tokenizer.bos_token_id)
            prefix, chunks, query = torch.tensor(ids).tensor_split([start, size])
            chosen = select(
                self.model,
                chunks,
                query,
                prefix=prefix,
                chunk=self.chunk_select,
                batch_size=self.batch_size,
            )
            ids = chosen.prompt.tolist()
        return self._fit(ids, more)

    def _fit(self, context: Sequence[int], more: int) -> Ids:
        """Return the end of a context that fits in front of `more` further tokens."""
        if len(context) + more <= self.max_length:
            return tuple(context)
        room = self.max_length - more
        if room < 1:
            raise UserError(
                f"{more} tokens to score or to generate leave no room for a context: the model "
                f"reads at most {self.max_length}; use shorter continuations"
            )
        self.counts["truncated"] += 1
        return tuple(context[-room:])

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        if self.chunk_select is not None:
            raise UserError(
                "chunk_select needs tasks that generate text, and this one compares likelihoods: "
                "remove the task, or evaluate it without chunk_select"
            )
        pairs = []
        for _, context, continuation in requests:
            if not continuation:
                raise UserError(
                    "the task asks for the likelihood of a text without tokens: remove empty texts "
                    "from it"
                )
            pairs.append(Pair(self._fit(context, len(continuation) - 1), tuple(continuation)))
        # A continuation's last token is only predicted.
        self.counts["requested"] += sum(len(a) + len(b) - 1 for a, b in pairs)
        answers: dict[int, tuple[float, bool]] = {}
        # `loglikelihood_rolling` of the `hf` type asks for one batch of windows after another.
        quiet = self.quiet or "override_bs" in options
        with Progress("loglikelihood", len(pairs), unit="tokens", quiet=quiet) as progress:
            scores = score(self.model, pairs, batch_size=self.batch_size, progress=progress)
            for index, result in scores:
                answers[index] = result.nats, result.greedy
                texts = requests[index][0]
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answers[index])
        self._count(progress)
        return [answers[index] for index in range(len(pairs))]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return continuations of prompts, each up to its first stop string."""
        kinds: dict[str, list[int]] = {}
        for index, (_, options) in enumerate(request.args for request in requests):
            kinds.setdefault(json.dumps(options, sort_keys=True), []).append(index)
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        answers = [""] * len(requests)
        with Progress("generate_until", len(requests), unit="tokens", quiet=self.quiet) as progress:
            for options, indices in kinds.items():
                settings = generation(json.loads(options), eos)
                more = settings["max_new_tokens"]
                prompts = [self._prompt(requests[i].args[0], more, progress) for i in indices]
                self.counts["requested"] += sum(map(len, prompts))
                for place, text in complete(
                    self.model,
                    prompts,
                    decode=self.tok_decode,
                    eos=self.eot_token_id,
                    batch_size=self.batch_size,
                    progress=progress,
                    **settings,
                ):
                    index = indices[place]
                    answers[index] = utils.postprocess_generated_text(text, settings["until"], None)
                    args = requests[index].args
                    self.cache_hook.add_partial("generate_until", args, answers[index])
                    progress.advance(1, 0)
        self._count(progress)
        return answers

    def _count(self, progress: Progress) -> None:
        """Count the tokens of finished requests, and warn of what was truncated so far."""
        self.counts["computed"] += progress.units
        if self.counts["truncated"]:
            logger.warning(
                f"the model reads at most {self.max_length:,} tokens: {self.counts['truncated']} "
                "contexts were truncated from the left"
            )

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return this process's value once per process.

        lm-eval compares the numbers of requests in order to repeat requests in processes that have
        fewer. Ours do not wait for each other in a request, and repeated ones would be recorded.
        """
        return torch.stack([tensor] * processes.size())

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return what lm-eval measured in all processes, by rank, in the main process.

        The last thing that lm-eval gathers are the metrics of each task, so the counts of all
        processes are added up there. A process may have had no document of a task; it then has no
        values of its metrics.
        """
        gathered = processes.gather(obj)
        if isinstance(obj, dict) and all(isinstance(value, dict) for value in obj.values()):
            self.counts = sum(processes.gather(self.counts), Counter())
            gathered = [
                {task: defaultdict(list, metrics) for task, metrics in of_process.items()}
                for of_process in gathered
            ]
        return gathered if processes.is_main() else None

    def barrier(self) -> None:
        """Wait for all processes."""
        processes.wait()

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval records with the results."""
        return {
            "model_fingerprint": self.model.fingerprint(),
            "tokenizer_fingerprint": self.fingerprint,
            "max_length": self.model.max_length,
            "tokens_requested": self.counts["requested"],
            "tokens_computed": self.counts["computed"],
            "requests_truncated": self.counts["truncated"],
        }


register_model("longrnn")(LongRNN)


def generation(options: Mapping[str, Any], eos: str | None) -> dict[str, Any]:
    """Return a task's `generation_kwargs` as options of `complete`.

    Raises:
        UserError: an option that is not supported.
    """
    given: dict[str, Any] = dict(utils.normalize_gen_kwargs(dict(options), MAX_NEW_TOKENS))
    changed = {name for name, value in given.items() if NEUTRAL.get(name) != value}
    if unknown := changed - GENERATION_OPTIONS:
        raise UserError(
            f"generation option {min(unknown)} is not supported: leave it out, or use "
            f"{', '.join(sorted(GENERATION_OPTIONS))}"
        )
    return {
        "until": utils.handle_stop_sequences(given["until"], eos=eos),
        "max_new_tokens": given["max_gen_toks"],
        "temperature": given.get("temperature", 0.0),
        "top_p": given.get("top_p") or 1.0,
    }
