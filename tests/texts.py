"""The texts that tests read, so that no test depends on a document or on the source of a test."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from longrnn.data.prompts import ANSWER, FILLER, PROMPT_HEADER, QUESTION
from longrnn.hf.tokenizer import HFTokenizer

DATA = Path(__file__).parent / "data"
BOOK = DATA / "book.txt"  # from Tom Sawyer
TEXTS = [str(path) for path in sorted((DATA / "texts").iterdir())]  # from Moby-Dick, 0.8 to 7 KB


def byte_level_bpe(texts: list[str], size: int, special: list[str], alphabet: list[str]) -> Any:
    """A byte-level BPE of `size` tokens that is trained here; the special ones are the first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    fast: Any = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    fast.train_from_iterator(texts, trainer)
    return fast


@lru_cache
def trained_bpe() -> HFTokenizer:
    """A byte-level BPE tokenizer of all bytes: numbers become several tokens."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    text = [PROMPT_HEADER, FILLER, QUESTION, BOOK.read_text()]
    numbers = [ANSWER.format(key=f"{i:05d}") for i in range(0, 100_000, 501)]
    fast = byte_level_bpe(text * 5 + numbers, 600, ["<s>"], ByteLevel.alphabet())
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>"))
