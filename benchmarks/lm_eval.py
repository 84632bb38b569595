"""lm-eval on the CPU, beside its `hf` model type with the same weights.

Multiple choice with four choices after one long context: how many tokens are computed where the
state of the context is shared, and how much faster is `longrnn` than `hf` with `Mamba2ForCausalLM`?
Two savings are told apart: fewer tokens, and no logits where none are scored. The log-likelihoods
of both are compared before anything is timed. Texts are random token ids.

Example:
    python -m benchmarks.lm_eval --threads 1 --layers 4 --d-model 256 --context 8192
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from benchmarks.models import build, transformers_twin
from benchmarks.timing import interleaved, parser, report, write_json
from longrnn.evaluation.harness import LongRNN
from longrnn.hf.tokenizer import HFTokenizer

CHOICES = 4


def words(vocab: int) -> Any:
    """Returns a Hugging Face tokenizer with one word per id; the first word is its EOS token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {f"w{index}": index for index in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0", unk_token="w0")


def text(length: int, vocab: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocab, (length,), generator=generator).tolist()
    return " ".join(f"w{index}" for index in ids)


@torch.no_grad()
def main() -> None:
    options = parser(__doc__, repeats=3)
    options.add_argument("--context", type=int, default=8192, help="tokens of the shared context")
    options.add_argument("--choice", type=int, default=16, help="tokens per choice")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    context = text(args.context, args.vocab, 0)
    request: Any = Instance
    requests = [
        request("loglikelihood", {}, (context, f" {text(args.choice, args.vocab, 1 + k)}"), 0)
        for k in range(CHOICES)
    ]
    model, longest = build(args), args.context + args.choice
    # The decorator of lm-eval hides the types.
    kind: Any = LongRNN
    peer: Any = HFLM
    ours = kind(model, tokenizer=HFTokenizer(words(args.vocab)), quiet=True)
    twin: Any = transformers_twin(model)
    # Without max_length, the `hf` model type truncates inputs of Mamba-2 to 2,048 tokens.
    theirs = peer(twin, tokenizer=words(args.vocab), max_length=longest, batch_size=1)
    losses, expected = (
        torch.tensor([nats for nats, _ in model.loglikelihood(requests, disable_tqdm=True)])
        for model in (ours, theirs)
    )
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)
    computed, naive = ours.counts["computed"], CHOICES * (longest - 1)
    print(
        f"{CHOICES} choices over {args.context:,} tokens: {computed:,} tokens computed, without a "
        f"shared context {naive:,}: {naive / computed:.2f} times fewer"
    )
    whole = torch.randint(args.vocab, (1, longest), generator=torch.Generator().manual_seed(1))
    calls = {
        "longrnn": lambda: ours.loglikelihood(requests, disable_tqdm=True),
        "longrnn, not shared": lambda: [model(whole, keep=args.choice) for _ in range(CHOICES)],
        "hf": lambda: theirs.loglikelihood(requests, disable_tqdm=True),
    }
    figures = report("multiple choice", naive, interleaved(calls, args.repeats))
    if args.json:
        write_json(args.json, {**figures, "tokens": computed, "tokens_without_sharing": naive})


if __name__ == "__main__":
    main()
