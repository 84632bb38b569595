"""The model type `longrnn` of lm-eval.

Notable choices:
- lm-eval knows no entry points: importing this module registers the type. `lm_eval.models` comes
  first, because lm-eval fills its registry only while that is empty.
- Texts become ids as in lm-eval's `hf` type, so that both score the same tokens.
- A model without a maximum length reads everything. What another cannot read is counted, said, and
  recorded with the results.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import lm_eval.models  # noqa: F401
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from longrnn.errors import UserError
from longrnn.evaluation.completion import complete
from longrnn.evaluation.harness.options import build_model, generating, rows_in_a_batch
from longrnn.evaluation.likelihood import Pair, Score, score
from longrnn.evaluation.reading import Ids
from longrnn.hf.tokenizer import HFTokenizer, load_tokenizer
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.text import Tokenizer

# What the first token of a text follows where the tokenizer has no special token for it.
NEWLINE = "\n"
# Under this key a cache of answers names the model that gave them.
FINGERPRINT = "longrnn fingerprint"

logger = logging.getLogger(__name__)


@register_model("longrnn")
class LongRNN(TemplateLM):
    """Any `LanguageModel` as a model of lm-eval.

    Args:
        pretrained: what `load` takes, or a model that is loaded.
        tokenizer: what `load_tokenizer` takes, or a tokenizer; None for that of the checkpoint.
        mitigation: of state collapse, such as `sliding_window(window=8192)`, or several.
        backend: of the recurrence.
        dtype: such as `bfloat16`; None for that of the checkpoint.
        device: None takes CUDA where there is one.
        batch_size: rows that are read side by side; `auto` for BATCH_SIZE.
        max_batch_size: taken and not used: nothing is tried out.
        max_length: tokens that the model is to read at most; None for what it can.
        prefix_token_id: what the first token of a text follows; None for the tokenizer's BOS, else
            its EOS, else a newline.
        add_bos_token: whether texts begin with BOS; None leaves it to the tokenizer.
        quiet: no progress.

    Raises:
        UserError: what cannot be loaded.
    """

    def __init__(
        self,
        pretrained: str | Path | LanguageModel,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        mitigation: str | Sequence[str] | None = None,
        backend: str = "auto",
        dtype: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        quiet: bool = False,
    ) -> None:
        super().__init__()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError("lm-eval with longrnn runs in one process: start it without a launcher")
        if tokenizer is None and not isinstance(pretrained, (str, Path)):
            raise UserError("a model that is loaded needs its tokenizer: give tokenizer=…")
        source: Any = pretrained if tokenizer is None else tokenizer
        self.model = build_model(pretrained, mitigation, backend, dtype, device)
        named = isinstance(source, (str, Path))
        self._tokenizer: Tokenizer = load_tokenizer(source) if named else source
        if self._tokenizer.vocab_size > self.model.vocab_size:
            raise UserError(
                f"the tokenizer has {self._tokenizer.vocab_size} ids and the model "
                f"{self.model.vocab_size}: use the tokenizer that the model was trained with"
            )
        hf = self._tokenizer.tokenizer if isinstance(self._tokenizer, HFTokenizer) else None
        self.tokenizer: Any = hf  # by this name lm-eval asks for chat templates
        self.batch_size = rows_in_a_batch(batch_size)
        self.max_length = max_length or getattr(self.model, "max_length", None)
        self.custom_prefix_token_id, self.add_bos_token = prefix_token_id, add_bos_token
        self.quiet = quiet
        self.tokens_computed = 0
        self.truncated: dict[str, int] = {"requests": 0, "tokens": 0, "split_documents": 0}

    # Texts and ids

    @property
    def eot_token_id(self) -> int | None:  # type: ignore[override]
        """The end of a text, where the tokenizer has one."""
        return None if self.tokenizer is None else self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What the first token of a text follows."""
        if self.custom_prefix_token_id is not None:
            return self.custom_prefix_token_id
        if self.tokenizer is not None and self.tokenizer.bos_token_id is not None:
            return self.tokenizer.bos_token_id
        return (
            self._tokenizer.encode(NEWLINE)[-1] if self.eot_token_id is None else self.eot_token_id
        )

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of requests."""
        return self._tokenizer.fingerprint()

    def tok_encode(  # type: ignore[override]
        self, string: str, add_special_tokens: bool | None = None
    ) -> list[int]:
        """The ids of a text, with those special tokens that the `hf` type adds."""
        if self.tokenizer is None:
            return self._tokenizer.encode(string)
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        prefix = self.tokenizer.decode(self.prefix_token_id)
        if add_special_tokens is None and has_bos_prefix(string, prefix):
            special = False
        options = {} if special is None else {"add_special_tokens": special}
        return self.tokenizer.encode(string, **options)

    def tok_decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        if self.tokenizer is None:
            return self._tokenizer.decode(ids)
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as the tokenizer writes it."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise UserError("the tokenizer has no chat template: leave --apply_chat_template out")
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    # The three kinds of requests

    def _loglikelihood_tokens(  # type: ignore[override]
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
    ) -> list[tuple[float, bool]]:
        pairs = []
        for _, context, continuation in requests:
            if not continuation:
                raise UserError("lm-eval asks for the likelihood of a text without tokens")
            pairs.append(Pair(self._fitting(context, len(continuation) - 1), tuple(continuation)))
        found: dict[int, tuple[float, bool]] = {}
        for index, result in self._scores("loglikelihood", pairs, disable_tqdm):
            found[index] = result.nats, result.greedy
            self.cache_hook.add_partial("loglikelihood", requests[index][0], found[index])
        self._report()
        return [found[index] for index in range(len(pairs))]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihoods of documents; a model without a maximum length reads each whole."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for index, text in enumerate(_arguments(requests, 0)):
            windows = self._windows(self.tok_encode(text))
            self.truncated["split_documents"] += len(windows) > 1
            pairs += windows
            owners += [index] * len(windows)
        left = Counter(owners)
        nats = [0.0] * len(requests)
        for number, result in self._scores("loglikelihood_rolling", pairs, disable_tqdm):
            index = owners[number]
            nats[index] += result.nats
            left[index] -= 1
            if left[index] == 0:
                args = requests[index].args
                self.cache_hook.add_partial("loglikelihood_rolling", args, nats[index])
        self._report()
        return nats

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts that go on from prompts, up to the first of their stop strings."""
        prompts, options = _arguments(requests, 0), _arguments(requests, 1)
        kinds: dict[str, list[int]] = {}
        for index, wanted in enumerate(options):
            kinds.setdefault(json.dumps(wanted, sort_keys=True), []).append(index)
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        answers = [""] * len(requests)
        quiet = self.quiet or disable_tqdm
        with Progress("generate_until", len(requests), unit="tokens", quiet=quiet) as progress:
            for indices in kinds.values():
                how = generating(options[indices[0]], eos)
                for place, said in complete(
                    self.model,
                    [self._prompt(prompts[index], how.max_new_tokens) for index in indices],
                    decode=self.tok_decode,
                    eos=self.eot_token_id,
                    batch_size=self.batch_size,
                    progress=progress,
                    **how._asdict(),
                ):
                    index = indices[place]
                    answers[index] = postprocess_generated_text(said, how.until, None)
                    args = requests[index].args
                    self.cache_hook.add_partial("generate_until", args, answers[index])
                    progress.advance(1, 0)
        self.tokens_computed += progress.units
        self._report()
        return answers

    def _scores(self, title: str, pairs: list[Pair], quiet: bool) -> Iterator[tuple[int, Score]]:
        quiet = quiet or self.quiet
        with Progress(title, len(pairs), unit="tokens", quiet=quiet) as progress:
            yield from score(self.model, pairs, batch_size=self.batch_size, progress=progress)
        self.tokens_computed += progress.units

    def _windows(self, ids: list[int]) -> list[Pair]:
        """A document as one pair, or as lm-eval's windows for a model with a maximum length."""
        windows = get_rolling_token_windows(
            ids, self.prefix_token_id, max_seq_len=self.max_length or len(ids) or 1, context_len=1
        )
        return [
            Pair(tuple(context), tuple(wanted))
            for context, wanted in map(make_disjoint_window, windows)
        ]

    def _prompt(self, text: str, more: int) -> Ids:
        return self._fitting(self.tok_encode(text) or [self.prefix_token_id], more)

    def _fitting(self, context: Sequence[int], more: int) -> Ids:
        """What the model can read of a context, from its end, and `more` tokens behind it."""
        if self.max_length is None or len(context) + more <= self.max_length:
            return tuple(context)
        room = self.max_length - more
        if room < 1:
            raise UserError(
                f"{more} tokens to score or to generate leave no room for a context: the model "
                f"reads at most {self.max_length}"
            )
        self.truncated["requests"] += 1
        self.truncated["tokens"] += len(context) - room
        return tuple(context[-room:])

    # What lm-eval and the user are told

    def _report(self) -> None:
        """Warns of what was cut off so far."""
        cut = self.truncated
        if cut["requests"]:
            logger.warning(
                f"{cut['requests']} contexts were truncated from the left, by {cut['tokens']:,} "
                f"tokens in all: the model reads at most {self.max_length:,}"
            )
        if cut["split_documents"]:
            logger.warning(
                f"{cut['split_documents']} documents were read in windows of {self.max_length:,} "
                "tokens, the most that the model reads"
            )

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval records with the results."""
        from longrnn import __version__

        return {
            "longrnn_version": __version__,
            "model_fingerprint": self.model.fingerprint(),
            "tokenizer_fingerprint": self._tokenizer.fingerprint(),
            "tokens_computed": self.tokens_computed,
            "max_length": self.max_length,
            "truncated": dict(self.truncated),
        }

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Takes a cache of answers, unless it holds those of another model."""
        if cache_hook.dbdict is not None:
            mine = f"{self.model.fingerprint()}/{self._tokenizer.fingerprint()}"
            found = cache_hook.dbdict.setdefault(FINGERPRINT, mine)
            if found != mine:
                raise UserError(
                    f"{cache_hook.dbdict.filename} holds the answers of another model: "
                    "give another --use_cache"
                )
        super().set_cache_hook(cache_hook)


def _arguments(requests: Sequence[Instance], place: int) -> list[Any]:
    return [cast("tuple[Any, ...]", request.args)[place] for request in requests]
