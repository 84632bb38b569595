"""Functions that lm-eval calls to create the documents of these tasks.

lm-eval passes all metadata as keyword arguments: that of the task, of the model and of the user.
"""

from typing import Any

from datasets import Dataset

from longrnn.evaluation.harness import texts


def passkey(**metadata: Any) -> dict[str, Dataset]:
    return _test(texts.passkey_documents(metadata))


def reverse(**metadata: Any) -> dict[str, Dataset]:
    return _test(texts.reverse_documents(metadata))


def _test(documents: list[texts.Document]) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(documents)}
