"""The lm-eval model type `longrnn`.

Notable choices:
- lm-eval has no entry points for models: importing this module registers the type.
  `lm_eval.models` is imported first, because lm-eval fills its registry only while it is empty.
- Texts are tokenized as in lm-eval's `hf` type, so that both score the same tokens.
- A model without a maximum length reads everything. What is truncated for other models is counted,
  logged, and recorded with the results.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import lm_eval.models  # noqa: F401
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook, TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, postprocess_generated_text

from longrnn.errors import UserError
from longrnn.evaluation.harness.divided import Divided
from longrnn.evaluation.harness.limit import Limit
from longrnn.evaluation.harness.options import build_model, parse_batch_size, parse_generation
from longrnn.hf.opened import refuse_unfit
from longrnn.hf.tokenizer import HFTokenizer, load_tokenizer
from longrnn.inference.engine import Pair, Score, complete, refuse_long, score
from longrnn.models import LanguageModel
from longrnn.progress import Progress
from longrnn.text import Tokenizer

# Precedes the first token of a text if the tokenizer has neither BOS nor EOS.
NEWLINE = "\n"
# Key in a cache of answers under which the model and settings are recorded.
FINGERPRINT = "longrnn fingerprint"


@register_model("longrnn")
class LongRNN(Divided, TemplateLM):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Any `LanguageModel` as an lm-eval model.

    Args:
        pretrained: a checkpoint as `load` takes it, or a loaded model.
        tokenizer: a tokenizer, or its name as `load_tokenizer` takes it; None for that of the
            checkpoint.
        mitigation: one or several mitigations, such as `sliding_window(window=8192)`.
        backend: implementation of the recurrence.
        dtype: such as `bfloat16`; None for that of the checkpoint.
        device: None for CUDA if it is available.
        batch_size: rows per batch; `auto` for BATCH_SIZE.
        max_batch_size: accepted for lm-eval and ignored.
        max_length: maximum length in tokens; None for that of the model.
        prefix_token_id: the token in front of the first token of a text; None for the tokenizer's
            BOS, else its EOS, else a newline.
        add_bos_token: whether texts begin with BOS, as in the `hf` type; None for the setting of
            the tokenizer.
        quiet: show no progress.

    Raises:
        UserError: the model or tokenizer cannot be loaded, or the options do not fit it.
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
        self.join_processes()
        if tokenizer is None and not isinstance(pretrained, (str, Path)):
            raise UserError("a loaded model needs its tokenizer: give tokenizer=…")
        source: Any = pretrained if tokenizer is None else tokenizer
        self.model = build_model(pretrained, mitigation, backend, dtype, device)
        named = isinstance(source, (str, Path))
        # As in the `hf` type, add_bos_token changes a tokenizer that is loaded here, but not one
        # that is given, and determines whether special tokens are added.
        self._tokenizer: Tokenizer = (
            load_tokenizer(source, add_bos_token=add_bos_token) if named else source
        )
        refuse_unfit(self._tokenizer, self.model)
        hf = self._tokenizer.tokenizer if isinstance(self._tokenizer, HFTokenizer) else None
        self.tokenizer: Any = hf  # lm-eval reads chat templates from this attribute
        self.batch_size = parse_batch_size(batch_size)
        if isinstance(max_length, int):
            refuse_long(self.model, max_length)
        self.limit = Limit(self.model.max_length if max_length is None else max_length)
        self.custom_prefix_token_id, self.add_bos_token = prefix_token_id, add_bos_token
        self.quiet = quiet
        self.tokens_computed = self.tokens_requested = 0

    # Texts and ids

    @property
    def eot_token_id(self) -> int | None:  # type: ignore[override]
        """The tokenizer's EOS; None if it has none."""
        return None if self.tokenizer is None else self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token in front of the first token of a text."""
        if self.custom_prefix_token_id is not None:
            return self.custom_prefix_token_id
        if self.tokenizer is not None and self.tokenizer.bos_token_id is not None:
            return self.tokenizer.bos_token_id
        if self.eot_token_id is not None:
            return self.eot_token_id
        return self._tokenizer.encode(NEWLINE)[-1]

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's fingerprint, a key of lm-eval's cache of requests."""
        return self._tokenizer.fingerprint()

    def tok_encode(  # type: ignore[override]
        self, string: str, add_special_tokens: bool | None = None
    ) -> list[int]:
        """Return the ids of a text, with the special tokens that the `hf` type adds."""
        if self.tokenizer is None:
            return self._tokenizer.encode(string)
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        prefix = self.tokenizer.decode(self.prefix_token_id)
        if add_special_tokens is None and has_bos_prefix(string, prefix):
            special = False
        options = {} if special is None else {"add_special_tokens": special}
        return self.tokenizer.encode(string, **options)

    def _encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt for generation, as `tok_batch_encode` of the `hf` type."""
        if self.tokenizer is None:
            return self._tokenizer.encode(text)
        special = False if has_bos_prefix(text, self.tokenizer.bos_token) else self.add_bos_token
        options = {} if special is None else {"add_special_tokens": special}
        return self.tokenizer.encode(text, **options)

    def tok_decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens."""
        if self.tokenizer is None:
            return self._tokenizer.decode(ids)
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the text that the tokenizer's chat template gives."""
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise UserError("the tokenizer has no chat template: leave --apply_chat_template out")
        ends = {"add_generation_prompt": add_generation_prompt}
        ends["continue_final_message"] = not add_generation_prompt
        return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **ends)

    # The three kinds of requests

    def _loglikelihood_tokens(  # type: ignore[override]
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
    ) -> list[tuple[float, bool]]:
        pairs = []
        for _, context, continuation in requests:
            if not continuation:
                raise UserError(
                    "the task asks for the likelihood of a text without tokens: remove empty texts "
                    "from it"
                )
            pairs.append(Pair(self.limit.fit(context, len(continuation) - 1), tuple(continuation)))
        found: dict[int, tuple[float, bool]] = {}
        for index, result in self._scores("loglikelihood", pairs, disable_tqdm):
            found[index] = result.nats, result.greedy
            self.cache_hook.add_partial("loglikelihood", requests[index][0], found[index])
        self.limit.report()
        return [found[index] for index in range(len(pairs))]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log-likelihoods of documents, in windows if they exceed the maximum length."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for index, text in enumerate(_arguments(requests, 0)):
            windows = self.limit.windows(self.tok_encode(text), self.prefix_token_id)
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
        self.limit.report()
        return nats

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return continuations of prompts, each up to its first stop string."""
        texts, options = _arguments(requests, 0), _arguments(requests, 1)
        kinds: dict[str, list[int]] = {}
        for index, option in enumerate(options):
            kinds.setdefault(json.dumps(option, sort_keys=True), []).append(index)
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        answers = [""] * len(requests)
        quiet = self.quiet or disable_tqdm
        with Progress("generate_until", len(requests), unit="tokens", quiet=quiet) as progress:
            for indices in kinds.values():
                settings = parse_generation(options[indices[0]], eos)
                prompts = [
                    self.limit.fit(
                        self._encode_prompt(texts[i]) or [self.prefix_token_id],
                        settings.max_new_tokens,
                    )
                    for i in indices
                ]
                self.tokens_requested += sum(map(len, prompts))
                for place, text in complete(
                    self.model,
                    prompts,
                    decode=self.tok_decode,
                    eos=self.eot_token_id,
                    batch_size=self.batch_size,
                    progress=progress,
                    **settings._asdict(),
                ):
                    index = indices[place]
                    answers[index] = postprocess_generated_text(text, settings.until, None)
                    args = requests[index].args
                    self.cache_hook.add_partial("generate_until", args, answers[index])
                    progress.advance(1, 0)
        self.tokens_computed += progress.units
        self.limit.report()
        return answers

    def _scores(self, title: str, pairs: list[Pair], quiet: bool) -> Iterator[tuple[int, Score]]:
        quiet = quiet or self.quiet
        # A continuation's last token is only predicted.
        self.tokens_requested += sum(len(a) + len(b) - 1 for a, b in pairs)
        with Progress(title, len(pairs), unit="tokens", quiet=quiet) as progress:
            yield from score(self.model, pairs, batch_size=self.batch_size, progress=progress)
        self.tokens_computed += progress.units

    # Records and cache

    def own_counts(self) -> Counter[str]:
        """Return the tokens computed and what was truncated in this process."""
        tokens = {"requested": self.tokens_requested, "computed": self.tokens_computed}
        return Counter(
            {f"tokens_{name}": count for name, count in tokens.items()} | self.limit.truncated
        )

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval records with the results."""
        from longrnn import __version__

        counts = self.counts()
        return {
            "longrnn_version": __version__,
            "model_fingerprint": self.model.fingerprint(),
            "tokenizer_fingerprint": self._tokenizer.fingerprint(),
            "tokens_requested": counts["tokens_requested"],
            "tokens_computed": counts["tokens_computed"],
            "max_length": self.limit.max_length,
            "truncated": {name: counts[name] for name in self.limit.truncated},
        }

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Set the cache of answers; refuse one of another model or with other settings."""
        cache: Any = cache_hook.dbdict
        if cache is not None:
            own = [self.model.fingerprint(), self._tokenizer.fingerprint(), self.limit.max_length]
            own += [self.prefix_token_id, self.add_bos_token]
            if len(cache) == 0:
                cache[FINGERPRINT] = own
            if cache.get(FINGERPRINT) != own:
                raise UserError(
                    f"{cache.filename} holds answers of another model or other settings: give "
                    "another --use_cache"
                )
        super().set_cache_hook(cache_hook)


def _arguments(requests: Sequence[Instance], place: int) -> list[Any]:
    return [cast("tuple[Any, ...]", request.args)[place] for request in requests]
