"""The function that lm-eval calls to create the documents of the task.

lm-eval passes all metadata as keyword arguments: that of the task, of the model and of the user.
"""

from typing import Any

from datasets import Dataset

from longrnn.evaluation.harness import texts


def passkey(**metadata: Any) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(texts.passkey_documents(metadata))}
