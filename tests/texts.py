"""The texts that tests read, so that no test depends on a document or on the source of a test."""

from functools import lru_cache
from pathlib import Path

from longrnn.data.prompts import ANSWER, FILLER, PROMPT_HEADER, QUESTION
from longrnn.hf.tokenizer import HFTokenizer

DATA = Path(__file__).parent / "data"
BOOK = DATA / "book.txt"  # from Tom Sawyer
TEXTS = [str(path) for path in sorted((DATA / "texts").iterdir())]  # from Moby-Dick, 0.8 to 7 KB


@lru_cache
def trained_bpe() -> HFTokenizer:
    """A byte-level BPE tokenizer, trained here: numbers become several tokens."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>"],
        show_progress=False,
    )
    text = [PROMPT_HEADER, FILLER, QUESTION, BOOK.read_text()]
    numbers = [ANSWER.format(key=f"{i:05d}") for i in range(0, 100_000, 501)]
    fast.train_from_iterator(text * 5 + numbers, trainer)
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>"))
