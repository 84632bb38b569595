"""`load`: a model by the name of an embedded checkpoint, by a folder, or by a name of the hub."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longrnn.checksums import damage_of_model, refusal
from longrnn.errors import UserError, nearest
from longrnn.files import one_line, read_json
from longrnn.hf import hub
from longrnn.hf.embedded import embedded
from longrnn.hf.layouts import LAYOUTS, Layout, rename
from longrnn.hf.specs import mitigated, split_spec
from longrnn.hf.weights import READERS, read_weights
from longrnn.mitigations import Mitigated
from longrnn.models.checkpoint import DTYPES, build_model, cast_weights, load_model
from longrnn.models.recurrent import RecurrentLM

if TYPE_CHECKING:
    from longrnn.hf.adapter import HFLanguageModel

logger = logging.getLogger(__name__)

# Sizes in a configuration of transformers that are sizes of weights.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTHS = ("hidden_size", "head_dim", "intermediate_size", "num_attention_heads", "vocab_size")


def resolve(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The folder that a name or path means; one of the hub is downloaded into the hub's cache.

    Raises:
        UserError: there is none.
    """
    name, known = str(name_or_path), embedded()
    path = known.get(name, Path(name_or_path))
    try:
        path.exists()
    except OSError as error:
        raise UserError(
            f"{name[:80]!r}… cannot be a checkpoint ({error.strerror}): give a name or a folder"
        ) from error
    if path.is_dir():
        if revision is not None:
            raise UserError(f"{name} is a local checkpoint and has no revisions: leave it out")
        return path
    if path.exists():
        raise UserError(f"{path} is a file: give the folder that contains it")
    if hub.is_hub_name(name):
        return hub.download(name, revision)
    beside = [str(one) for one in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(
        f"no checkpoint {name!r}, neither embedded nor a folder: "
        f"{nearest(name, [*known, *(beside if path.name != name else [])])}"
    )


def load(
    name_or_path: str | Path,
    *,
    backend: str = "auto",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    beyond: bool = False,
) -> RecurrentLM | Mitigated | HFLanguageModel:
    """Loads a language model, ready for evaluation.

    Args:
        name_or_path: the name of an embedded checkpoint (`passkey-tiny`); a folder that
            `longrnn train` wrote, of a Mamba-2 as mamba-ssm or transformers writes it, or of
            another causal language model of transformers; or `organisation/model` of the hub. A
            mitigation may follow a plus, `CHECKPOINT+MITIGATION`, unless a path of that whole name
            exists.
        backend: implementation of the recurrence (`auto`, `chunked`, `reference`).
        device: None for the CPU.
        dtype: None for that of the checkpoint. What sets the time scales of a Mamba-2 (A_log,
            dt_bias, D) is never rounded to a narrower one: published checkpoints hold it in
            float32 beside matrices of float16 or bfloat16, and so does the model.
        revision: of a hub checkpoint; local ones have none.
        beyond: whether a transformer may read more tokens than it was made for.

    Returns:
        A `RecurrentLM`, of which every mitigation is available, `Mitigated` where one is named, or
        else an `HFLanguageModel`.

    Raises:
        UserError: unknown name, a folder that is incomplete, damaged or of another kind.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(
            f"a model cannot be computed in {dtype}: give float16, bfloat16, float32 or float64"
        )
    name, spec = split_spec(str(name_or_path))
    if spec is not None:
        plain = load(
            name, backend=backend, device=device, dtype=dtype, revision=revision, beyond=beyond
        )
        assert not isinstance(plain, Mitigated)  # the name has no mitigation left
        return mitigated(plain, spec)
    folder = resolve(name_or_path, revision)
    # Hashing releases the interpreter's lock: it runs beside the reading and building.
    with ThreadPoolExecutor(1) as pool:
        damaged = pool.submit(damage_of_model, folder)
        try:
            model = _open(folder, backend, dtype, beyond)
        except UserError as error:
            # What is wrong in a file says more than that its checksum does not fit.
            if (wrong := damaged.result()) is None:
                raise
            raise UserError(f"{error}; besides, {folder} is damaged ({wrong})") from error
        if (wrong := damaged.result()) is not None:
            raise UserError(refusal(folder, wrong))
    return model.to(device=device)


def _open(
    folder: Path, backend: str, dtype: torch.dtype | None, beyond: bool
) -> RecurrentLM | HFLanguageModel:
    """The model in a folder, on the CPU; its checksums are not verified."""
    config = read_config(folder)
    _check_layers(folder, config)
    layout = layout_of(config)
    if config.get("model_type") == "longrnn":
        return cast_weights(load_model(folder, backend=backend), dtype)
    if layout is not None:
        return cast_weights(load_mamba2(folder, layout, backend), dtype)
    if backend != "auto":
        raise UserError(f"{folder} is run by transformers and has no backend: leave it out")
    return _load_transformer(folder, config, dtype, beyond)


def load_recurrent(
    name_or_path: str | Path, *, device: str | torch.device | None = None
) -> RecurrentLM:
    """`load` for what needs a recurrent model of ours.

    Raises:
        UserError: as `load`, and for any other model.
    """
    model = load(name_or_path, device=device)
    if isinstance(model, Mitigated):
        raise UserError(
            f"{name_or_path} names a mitigation, and this needs the model alone: leave out what "
            "follows the plus"
        )
    if not isinstance(model, RecurrentLM):
        raise UserError(
            f"{name_or_path} is a {model.kind} of transformers, and its recurrence (if it has one) "
            "is not open to longrnn: give an RNN, GRU, LSTM or Mamba-2 checkpoint"
        )
    return model


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's `config.json`.

    Raises:
        UserError: there is none, or it is no mapping.
    """
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} is no checkpoint (it has no config.json): give a folder with one"
        )
    return read_json(folder / "config.json")


def layout_of(config: dict[str, Any]) -> type[Layout] | None:
    """The foreign layout of a Mamba-2 checkpoint; None for every other checkpoint."""
    return next((layout for layout in LAYOUTS.values() if layout.is_described(config)), None)


def load_mamba2(folder: Path, layout: type[Layout], backend: str = "auto") -> RecurrentLM:
    """A Mamba-2 checkpoint of mamba-ssm or of transformers, as a `RecurrentLM` on the CPU.

    Raises:
        UserError: it is incomplete or damaged, or has what `RecurrentLM` does not compute.
    """
    config = layout.read(read_config(folder), str(folder / "config.json"))
    ours = {theirs: own for own, theirs in layout.names.items()}
    # An older name, which transformers still reads.
    ours.setdefault("backbone.embedding.", "embedding.")
    tensors = {rename(name, ours): tensor for name, tensor in read_weights(folder).items()}
    return build_model(
        config,
        tensors,
        source=folder,
        backend=backend,
        source_name=lambda name: rename(name, layout.names),
    )


def _load_transformer(
    folder: Path, config: dict[str, Any], dtype: torch.dtype | None, beyond: bool
) -> HFLanguageModel:
    """Any causal language model that transformers itself has the code of."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from longrnn.hf.adapter import HFLanguageModel

    kind = config.get("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        remedy = nearest(str(kind), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if kind else ""
        if not remedy.startswith("did you mean"):
            remedy = "give one of longrnn, of mamba-ssm (Mamba-2), or of a causal language model"
        raise UserError(
            f"{folder} holds a model of type {kind!r}, which is not a causal language model that "
            f"the installed transformers knows: {remedy}"
        )
    _check_sizes(folder)
    try:
        with _quietly():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype="auto" if dtype is None else dtype,
                trust_remote_code=False,
                local_files_only=True,
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            model, report = loaded
    except Exception as error:  # whatever it raises about a folder that is damaged
        raise UserError(f"{folder} cannot be loaded ({one_line(error)}): copy it again") from error
    for name, found, wanted in sorted(report["mismatched_keys"]):
        raise UserError(
            f"{folder} does not fit its config.json: {name} has shape {tuple(found)}, "
            f"{tuple(wanted)} was expected"
        )
    for name in sorted(report["missing_keys"]):
        shape = tuple(model.state_dict()[name].shape)
        raise UserError(
            f"{folder} does not fit its config.json: {name} has shape None, {shape} was expected"
        )
    # What an architecture is known to leave behind, such as tables of rotary angles, is not in it.
    unused = sorted(report["unexpected_keys"])
    if unused:
        logger.warning(
            f"{folder} has {len(unused)} weights that a {kind} of transformers does not use, the "
            f"first {unused[0]}: look whether its config.json is of this checkpoint"
        )
    return HFLanguageModel(model, beyond=beyond)


def _check_sizes(folder: Path) -> None:
    """Refuses a `config.json` of a model that the files beside it cannot hold.

    transformers would allocate it before it compares. Weights of one bit each are the smallest.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = _stored_bytes(folder)
    try:
        with _quietly():
            config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        text = config.get_text_config(decoder=True)
        layers = getattr(text, "num_hidden_layers", 1)
        if layers < 1:
            raise ValueError(f"num_hidden_layers is {layers}")
        # Each layer has weights with names; each unit of a width has a weight.
        fits = layers <= stored // 64 and all(
            (getattr(text, name, 0) or 0) <= 8 * stored for name in WIDTHS
        )
        if fits:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            fits = sum(weight.numel() for weight in model.parameters()) <= 8 * stored
    except Exception as error:  # whatever a configuration raises that is not valid
        raise UserError(f"{folder} cannot be loaded ({one_line(error)}): copy it again") from error
    if not fits:
        raise UserError(
            f"{folder} cannot be loaded (its config.json describes a model that needs more than "
            f"the {stored:,} bytes of weights in the folder): copy it again"
        )


def _check_layers(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuses more layers than the weights in a folder can have, before anything lists them.

    The configuration classes of transformers hold one entry per layer.
    """
    stored = _stored_bytes(folder)
    for name in LAYERS:
        layers = config.get(name)
        if isinstance(layers, int) and layers > max(stored // 64, 1000):
            raise UserError(
                f"{folder} cannot be loaded (its config.json has {name} {layers}, more layers than "
                f"fit into the {stored:,} bytes of weights in the folder): copy it again"
            )


def _stored_bytes(folder: Path) -> int:
    """Bytes of the weight files in a folder."""
    suffixes = {Path(name).suffix for name in READERS}
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in suffixes)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' bars and reports: what they would say is checked."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
