"""Settings of every mitigation for the study of state collapse, and their calibration.

Notable choices:
- `SETTINGS` has one entry per registered mitigation, so a new mitigation is part of the study as
  soon as its settings are written here.
- Settings are multiples of the training length, so that they apply to any model.
- Calibrated files are kept, and refused for other texts or lengths.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longrnn.data import Passkey
from longrnn.errors import UserError, nearest
from longrnn.evaluation.calibrate import Settings, calibrate
from longrnn.evaluation.texts import Document
from longrnn.files import write_atomic
from longrnn.intervals import mean
from longrnn.mitigations import MITIGATIONS
from longrnn.mitigations.base import Calibration
from longrnn.mitigations.bind import check_defined
from longrnn.mitigations.spec import write_calibration
from longrnn.models import RecurrentLM
from longrnn.results import Row
from longrnn.text import Tokenizer

Spec = Mapping[str, Any]
# A setting by its name: options of the mitigation, or how to calibrate them.
Named = dict[str, Spec | Settings]


class Variant(NamedTuple):
    """A mitigation at one setting.

    Attributes:
        name: unique name, which is also that of its files.
        method: the registered name of the mitigation.
        setting: its options, or how to calibrate them.
    """

    name: str
    method: str
    setting: Spec | Settings


def _state_norm(trained: int, target: int) -> Named:
    margins = {"0.7x": 0.7, "1x": 1.0, "1.5x": 1.5}
    return {name: Settings(trained, margin=one, windows=16) for name, one in margins.items()}


def _forget_more(trained: int, target: int) -> Named:
    pairs = {
        "1x": (1 - 1 / trained, 1.0),
        "4x": (1 - 1 / (4 * trained), 1.0),
        "published-1.0": (0.9999, 1.0),
        "published-0.75": (0.9999, 0.75),
    }
    return {
        name: {"decay_scale": decay, "input_scale": given} for name, (decay, given) in pairs.items()
    }


def _sliding_window(trained: int, target: int) -> Named:
    return {f"{times}x": {"window": times * trained} for times in (1, 4, 16)}


def _token_filter(trained: int, target: int) -> Named:
    shares = {"": None, "half": 0.5, "nine-tenths": 0.9}
    return {
        name: Settings(trained, target, windows=16, quantile=one) for name, one in shares.items()
    }


def _search(trained: int, target: int) -> Settings:
    # A search reads windows of the target length many times, so it gets fewer of them.
    return Settings(trained, target, windows=1, steps=20)


def _scale_delta(trained: int, target: int) -> Named:
    return {
        "search": _search(trained, target),
        "selective": Settings(trained, target, windows=16, share=0.2),
        "quarter": {"scale": 0.25},
    }


def _scale_decay(trained: int, target: int) -> Named:
    return {"search": _search(trained, target), "4": {"scale": 4.0}, "16": {"scale": 16.0}}


def _power_decay(trained: int, target: int) -> Named:
    return {"search": _search(trained, target), "half": {"scale": 0.5}, "quarter": {"scale": 0.25}}


SETTINGS: dict[str, Callable[[int, int], Named]] = {
    "none": lambda trained, target: {"": {}},
    "state_norm": _state_norm,
    "forget_more": _forget_more,
    "sliding_window": _sliding_window,
    "token_filter": _token_filter,
    "scale_delta": _scale_delta,
    "scale_decay": _scale_decay,
    "power_decay": _power_decay,
}


def variants(model: RecurrentLM, trained: int, target: int) -> dict[str, Variant]:
    """Return every setting of every mitigation that is defined for a model, by name.

    Args:
        model: the model; mitigations that are not defined for its cells are left out.
        trained: its training length.
        target: the length at which the mitigated model should work.
    """
    found = {}
    for method, settings in SETTINGS.items():
        if MITIGATIONS[method].undefined(type(model.cells[0])) is not None:
            continue
        for suffix, setting in settings(trained, target).items():
            name = "-".join(filter(None, (method, suffix)))
            found[name] = Variant(name, method, setting)
    return found


def select(found: Mapping[str, Variant], names: Sequence[str]) -> dict[str, Variant]:
    """Return the named variants; all of them if no name is given.

    Raises:
        UserError: there is no variant of a name.
    """
    for name in names:
        if name not in found:
            raise UserError(f"the study has no variant {name!r}: {nearest(name, found)}")
    return {name: found[name] for name in names} if names else dict(found)


class Calibrator:
    """Calibrates the variants of one model, and keeps the files.

    Args:
        model: a recurrent model.
        documents: texts that are not evaluated.
        folder: for the files.
        trained: the training length of the model.
        target: see `variants`.
        quiet: show no progress.

    Raises:
        UserError: the folder has files that were calibrated on other texts or for other lengths.
    """

    def __init__(
        self,
        model: RecurrentLM,
        documents: Sequence[Document],
        folder: Path,
        *,
        trained: int,
        target: int,
        quiet: bool = False,
    ) -> None:
        self.model, self.documents, self.folder = model, documents, folder
        self.trained, self.quiet = trained, quiet
        about = {
            "train_length": trained,
            "target_length": target,
            "text_sha256": [document.sha256 for document in documents],
        }
        path = folder / "about.json"
        if path.is_file() and json.loads(path.read_text()) != about:
            raise UserError(
                f"{folder} was made with other texts or lengths: choose another --output"
            )
        write_atomic(path, json.dumps(about) + "\n")

    def spec(self, variant: Variant) -> Spec | Path:
        """Return what `mitigation` builds a variant from; calibrate it if there is no file yet.

        Raises:
            UserError: the variant is not defined for the model, or cannot be calibrated.
        """
        check_defined(MITIGATIONS[variant.method], type(self.model.cells[0]))
        if not isinstance(variant.setting, Settings):
            return {"kind": variant.method, **variant.setting}
        path = self.folder / f"{variant.name}.yaml"
        if not path.is_file():
            member = calibrate(
                self.model, self.documents, variant.method, variant.setting, quiet=self.quiet
            )
            hashes = tuple(document.sha256 for document in self.documents)
            record = Calibration(str(path), self.model.fingerprint(), self.trained, hashes)
            write_calibration(path, [member], record)
        return path


def keyed_prompts(tokenizer: Tokenizer, length: int, count: int, seed: int = 0) -> Document:
    """Return passkey prompts with keys of training, one after the other, as one document.

    A `state_norm` that is calibrated on text without keys takes its thresholds from states that
    hold no key. These prompts are what the model was trained on.

    Args:
        tokenizer: makes the ids.
        length: tokens of a prompt, without its answer.
        count: number of prompts.
        seed: seed of the keys.
    """
    task = Passkey(tokenizer)
    tokens = task.sample(count, length=length, seed=seed).tokens[:, :length].flatten()
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    return Document("passkey prompts", digest, tokens, None, tokenizer.fingerprint())


def refuse_shared(*uses: Sequence[Document]) -> None:
    """Refuse a text that is given for two purposes.

    Raises:
        UserError: names the text.
    """
    seen: dict[str, str] = {}
    for documents in uses:
        for one in documents:
            if one.sha256 in seen:
                raise UserError(
                    f"{one.name} is the same text as {seen[one.sha256]}, and calibration, choice "
                    "and evaluation must not share text: give three different texts"
                )
        seen |= {one.sha256: one.name for one in documents}


def best(found: Mapping[str, Sequence[Row]], chosen_from: Mapping[str, Variant]) -> dict[str, str]:
    """Return for every mitigation the variant of the lowest mean loss.

    Args:
        found: rows of `perplexity.evaluate` by variant, on text for choosing settings.
        chosen_from: the variants.

    Returns:
        Names of variants by method; methods without rows are left out.
    """
    losses = {
        name: mean([row["nats_per_token"] for row in rows]).mean for name, rows in found.items()
    }
    methods = dict.fromkeys(chosen_from[name].method for name in found)
    return {
        method: min(
            (name for name in found if chosen_from[name].method == method), key=losses.__getitem__
        )
        for method in methods
    }
