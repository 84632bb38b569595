"""lm-eval on the CPU: multiple choice compared with its `hf` model type, and peak memory.

Both models have the same random weights in float32. Texts are random token ids, encoded by a
tokenizer with one word per id. Two questions:
- Multiple choice with four choices after one long context: how many tokens does it save to compute
  the state of the context once, and how much faster is `longrnn` than the `hf` model type with
  `Mamba2ForCausalLM` of transformers? Both are timed in one process with interleaved calls.
- Does the log-likelihood of a long document need more memory than that of a short one? Each runs in
  a separate process.

Example:
    python -m benchmarks.evaluation_cpu harness --threads 1
    python -m benchmarks.evaluation_cpu harness --layers 24 --d-model 768     # mamba2-130m's shape
    python -m benchmarks.evaluation_cpu harness --context 512 --long 0 --vocab 2048 --repeats 1
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance

from benchmarks.prefill_cpu import build, mebibytes, transformers_twin
from benchmarks.timing import add_threads, in_a_process, interleaved, use_threads, write_json
from longrnn.evaluation.harness import LongRNN
from longrnn.hf.tokenizer import HFTokenizer
from longrnn.models import RecurrentLM

CHOICES = 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=50_288)
    parser.add_argument("--context", type=int, default=8192, help="tokens of the shared context")
    parser.add_argument("--choice", type=int, default=16, help="tokens per choice")
    parser.add_argument("--short", type=int, default=4096, help="tokens of the short document")
    parser.add_argument(
        "--long", type=int, default=131_072, help="tokens of the long one; 0 skips it"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)  # used by child processes
    add_threads(parser)
    return parser.parse_args()


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


def ours(model: RecurrentLM, vocab: int) -> Any:
    kind: Any = LongRNN  # the decorator of lm-eval hides the type
    return kind(model, tokenizer=HFTokenizer(words(vocab)), quiet=True)


def request(kind: str, *texts: str) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=texts, idx=0)  # type: ignore[arg-type]


def multiple_choice(model: RecurrentLM, args: argparse.Namespace) -> dict[str, float]:
    """Returns computed tokens and seconds after checking that log-likelihoods are equal."""
    from lm_eval.models.huggingface import HFLM

    context = text(args.context, args.vocab, 0)
    choices = [f" {text(args.choice, args.vocab, 1 + k)}" for k in range(CHOICES)]
    requests = [request("loglikelihood", context, choice) for choice in choices]
    mine = ours(model, args.vocab)
    # Without max_length, the `hf` model type truncates inputs of Mamba-2 to 2,048 tokens.
    longest = args.context + args.choice
    theirs: Any = HFLM(
        transformers_twin(model),  # type: ignore[arg-type]
        tokenizer=words(args.vocab),
        max_length=longest,
        batch_size=1,
    )
    found = torch.tensor([nats for nats, _ in mine.loglikelihood(requests, disable_tqdm=True)])
    expected = [nats for nats, _ in theirs.loglikelihood(requests, disable_tqdm=True)]
    difference = (found - torch.tensor(expected)).abs().max().item()
    assert difference < 1e-3 * max(1.0, found.abs().max().item()), difference
    tokens = mine.tokens_computed
    naive = CHOICES * (longest - 1)
    seconds = interleaved(
        {
            "longrnn": lambda: mine.loglikelihood(requests, disable_tqdm=True),
            "hf": lambda: theirs.loglikelihood(requests, disable_tqdm=True),
        },
        args.repeats,
        warm=True,
    )
    print(f"{CHOICES} choices over {args.context:,} tokens: {tokens:,} tokens computed, without "
          f"a shared context {naive:,}: {naive / tokens:.2f} x fewer")  # fmt: skip
    for name, value in seconds.items():
        print(f"{name:8} {value:8.2f} s   {value / seconds['longrnn']:5.1f} x")
    return {
        "largest_difference_of_nats": difference,
        "tokens_computed": tokens,
        "tokens_without_forking": naive,
        "tokens_ratio": naive / tokens,
        **{f"seconds_{name}": value for name, value in seconds.items()},
        "speedup": seconds["hf"] / seconds["longrnn"],
    }


def memory_of(args: argparse.Namespace) -> None:
    """Prints the peak memory of this process for one document, after a tiny warm-up document."""
    model = ours(build(args), args.vocab)
    document = text(args.memory_of, args.vocab, 9)
    model.loglikelihood_rolling([request("loglikelihood_rolling", "w1 w2 w3")])
    before, _ = mebibytes()
    model.loglikelihood_rolling([request("loglikelihood_rolling", document)])
    _, peak = mebibytes()
    print(json.dumps({"peak_mib": peak, "peak_over_model_mib": peak - before}))


def memory(args: argparse.Namespace) -> dict[str, float]:
    """Returns the peak memory of both documents. Call this before the parent process allocates much
    memory: ru_maxrss of a child starts at the value of its parent."""
    figures: dict[str, float] = {}
    shape = ["--layers", args.layers, "--d-model", args.d_model, "--vocab", args.vocab]
    for name, length in (("short", args.short), ("long", args.long)):
        command = ["benchmarks.evaluation_cpu.harness", *map(str, shape)]
        command += ["--memory-of", str(length), "--threads", str(torch.get_num_threads())]
        said = in_a_process(*command)
        figures |= {f"{key}_{name}": value for key, value in said.items()}
    figures["peak_mib_ratio"] = figures["peak_mib_long"] / figures["peak_mib_short"]
    print(f"peak memory per document: {figures['peak_mib_short']:.0f} MiB for {args.short:,} "
          f"tokens, {figures['peak_mib_long']:.0f} MiB for {args.long:,}, ratio "
          f"{figures['peak_mib_ratio']:.3f}")  # fmt: skip
    return figures


@torch.no_grad()
def main() -> None:
    args = arguments()
    use_threads(args)
    if args.memory_of:
        memory_of(args)
        return
    figures: dict[str, Any] = {"shape": [args.layers, args.d_model, args.vocab]}
    figures |= {"context": args.context, "choice": args.choice, "repeats": args.repeats}
    if args.long:
        figures |= {"short": args.short, "long": args.long, **memory(args)}
    figures |= multiple_choice(build(args), args)
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
