"""`load`: opens an embedded checkpoint, a checkpoint folder, or a model from the Hub."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from longrnn.checksums import damage_of_model, refusal
from longrnn.errors import UserError, nearest
from longrnn.files import one_line, read_json
from longrnn.hf import hub, lora
from longrnn.hf.embedded import embedded
from longrnn.hf.layouts import LAYOUTS, Layout, rename
from longrnn.hf.sizes import check_sizes, quietly, stored_bytes
from longrnn.hf.specs import NONE, mitigated, split_dtype, split_spec
from longrnn.hf.weights import read_weights
from longrnn.models.checkpoint import DTYPES, build_model, cast_weights, load_model
from longrnn.models.recurrent import RecurrentLM

if TYPE_CHECKING:
    from longrnn.hf.foreign import ForeignLM

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
# A device: the layers of a Hugging Face model are divided among all devices.
BALANCED = "balanced"
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def resolve(name_or_path: str | Path, revision: str | None = None) -> Path:
    """Return the checkpoint folder for a name or path; a model from the Hub is downloaded.

    Raises:
        UserError: there is no such checkpoint.
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
) -> RecurrentLM | ForeignLM:
    """Load a language model for evaluation.

    Args:
        name_or_path: the name of an embedded checkpoint (`passkey-tiny`); a folder with a
            checkpoint of `longrnn train`, a Mamba-2 in the layout of mamba-ssm or transformers, or
            any other causal Hugging Face language model; or `organisation/model` on the Hub. A
            mitigation may follow after a plus, `CHECKPOINT+MITIGATION`, and before it a dtype,
            `CHECKPOINT+float32`, unless a path with that whole name exists.
        backend: implementation of the recurrence; see `longrnn.cells.mamba2.Mamba2`.
        device: None for the CPU; `balanced` divides the layers of a model that transformers runs
            among all devices, as the device_map of that name does, and puts any other on one.
        dtype: None for that of the checkpoint. The parameters that set the time scales of a
            Mamba-2 (A_log, dt_bias, D) are never rounded to a narrower dtype: published
            checkpoints store them in float32 next to matrices in float16 or bfloat16.
        revision: branch, tag or commit of a model on the Hub.
        beyond: whether a transformer may read more tokens than its configuration allows.

    Returns:
        A `RecurrentLM` (which supports all mitigations) or an `ForeignLM`: a `HybridLM`,
        which supports all mitigations, if it has Mamba-2 layers that longrnn can compute. The model
        is under the mitigation that the name has or the checkpoint records.

    Raises:
        UserError: an unknown name, or a folder that is incomplete, damaged or not a checkpoint.
    """
    model, spec = load_plain(
        name_or_path,
        backend=backend,
        device=device,
        dtype=dtype,
        revision=revision,
    )
    if beyond and not isinstance(model, RecurrentLM):
        model = model.beyond()
    return mitigated(model, spec)


def load_plain(
    name_or_path: str | Path,
    *,
    backend: str = "auto",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> tuple[RecurrentLM | ForeignLM, str | None]:
    """Return a model without any mitigation, and what its name gives for `mitigated`; see `load`.

    Raises:
        UserError: as `load`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(
            f"a model cannot be computed in {dtype!r}: give torch.float16, torch.bfloat16, "
            "torch.float32 or torch.float64"
        )
    name, spec = split_spec(str(name_or_path))
    named, spec = split_dtype(spec)
    if named is not None and dtype not in (None, named):
        raise UserError(f"{name_or_path} names another dtype than dtype={dtype}: give one of them")
    folder = resolve(name, revision)
    # Hashing releases the global interpreter lock, so it runs in parallel to reading and building.
    with ThreadPoolExecutor(1) as pool:
        damaged = pool.submit(damage_of_model, folder)
        try:
            model = _open(folder, backend, dtype or named, device)
        except UserError as error:
            # The defect itself is more informative than a wrong checksum: both are reported.
            if (wrong := damaged.result()) is None:
                raise
            raise UserError(f"{error}; besides, {folder} is damaged ({wrong})") from error
        if (wrong := damaged.result()) is not None:
            raise UserError(refusal(folder, wrong))
    if isinstance(model, RecurrentLM):
        model.loaded_from = str(folder)
        if device == BALANCED:
            device = "cuda" if torch.cuda.is_available() else None
        model.to(device=device)
    return model, spec


def _open(
    folder: Path, backend: str, dtype: torch.dtype | None, device: str | torch.device | None
) -> RecurrentLM | ForeignLM:
    """Return the model in a folder, without verifying its checksums.

    Only a model that transformers runs is put on the device here.
    """
    if lora.is_adapter(folder):
        return cast_weights(_load_adapter(folder, backend), dtype)
    config = read_config(folder)
    _check_layers(folder, config)
    layout = layout_of(config)
    if config.get("model_type") == "longrnn" or layout is not None:
        model = _load_own(folder, layout, backend)
        if lora.has_adapter(folder):
            model = lora.merged(folder, model.float())
        return cast_weights(model, dtype)
    if backend != "auto":
        raise UserError(f"{folder} is computed by transformers and has no backend: leave it out")
    return _load_transformer(folder, config, dtype, device)


def _load_own(folder: Path, layout: type[Layout] | None, backend: str) -> RecurrentLM:
    """Return the model in a folder, without an adapter that is there too."""
    if layout is not None:
        return load_mamba2(folder, layout, backend)
    shards = (folder / f"{WEIGHTS}.index.json").is_file() and not (folder / WEIGHTS).is_file()
    return load_model(folder, backend=backend, weights=read_weights(folder) if shards else None)


def _load_adapter(folder: Path, backend: str) -> RecurrentLM:
    """Return the base model of an adapter with the adapter merged in, in float32."""
    base, spec = load_plain(lora.base_of(folder), backend=backend)
    if not isinstance(base, RecurrentLM) or spec is not None:
        raise UserError(
            f"{folder} is an adapter of a model that longrnn does not compute: load it with PEFT, "
            "or give an adapter of an RNN, GRU, LSTM or Mamba-2 checkpoint"
        )
    return lora.merged(folder, base.float())


def load_editable(
    name_or_path: str | Path, *, device: str | torch.device | None = None
) -> RecurrentLM | ForeignLM:
    """Load a model whose recurrent layers can be edited and read, without a mitigation.

    Raises:
        UserError: as `load`, and for any other model.
    """
    model = load(name_or_path, device=device)
    if model.mitigation is not None:
        raise UserError(
            f"{name_or_path} is a model under {model.mitigation}, and this needs it without: give "
            f"{split_spec(str(name_or_path))[0]}+{NONE}"
        )
    if not model.cells:
        raise UserError(
            f"{name_or_path} is a Hugging Face {model.kind}, whose recurrence (if it has one) "
            "longrnn cannot reach: give an RNN, GRU, LSTM or Mamba-2 checkpoint, or a hybrid with "
            "Mamba-2 layers"
        )
    return model


def load_recurrent(
    name_or_path: str | Path, *, device: str | torch.device | None = None
) -> RecurrentLM:
    """Load a `RecurrentLM`, for code that needs all of its layers.

    Raises:
        UserError: as `load_editable`, and for a hybrid.
    """
    model = load_editable(name_or_path, device=device)
    if not isinstance(model, RecurrentLM):
        raise UserError(
            f"{name_or_path} is a Hugging Face {model.kind}, whose other layers longrnn does not "
            "compute: give an RNN, GRU, LSTM or Mamba-2 checkpoint"
        )
    return model


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's `config.json`.

    Raises:
        UserError: there is none, or it is not a mapping.
    """
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} is not a checkpoint folder (it has no config.json): give a folder with one"
        )
    return read_json(folder / "config.json")


def layout_of(config: dict[str, Any]) -> type[Layout] | None:
    """Return the layout of a Mamba-2 checkpoint that is not ours; None for other checkpoints."""
    return next((layout for layout in LAYOUTS.values() if layout.is_described(config)), None)


def load_mamba2(folder: Path, layout: type[Layout], backend: str = "auto") -> RecurrentLM:
    """Load a Mamba-2 checkpoint in another layout as a `RecurrentLM` on the CPU.

    Raises:
        UserError: it is incomplete or damaged, or has options that `RecurrentLM` does not support.
    """
    config = layout.read(read_config(folder), str(folder / "config.json"))
    ours = {theirs: own for own, theirs in layout.names.items()}
    # An older name, which transformers still accepts.
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
    folder: Path,
    config: dict[str, Any],
    dtype: torch.dtype | None,
    device: str | torch.device | None,
) -> ForeignLM:
    """Load a causal language model whose code is in transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from longrnn.hf.hybrid.families import wide_weights
    from longrnn.hf.hybrid.model import open_hugging_face

    kind = config.get("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        remedy = nearest(str(kind), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) if kind else ""
        if not remedy.startswith("did you mean"):
            remedy = "give a checkpoint of longrnn, of mamba-ssm (Mamba-2), or of such a model"
        raise UserError(
            f"{folder} holds a model of type {kind!r}, which is not a causal language model that "
            f"the installed transformers knows: {remedy}"
        )
    check_sizes(folder)
    try:
        with quietly(), wide_weights(kind):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype="auto" if dtype is None else dtype,
                device_map=BALANCED if device == BALANCED else None,
                trust_remote_code=False,
                local_files_only=True,
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
            model, report = loaded
    except Exception as error:  # transformers raises many kinds of errors for a damaged folder
        raise UserError(f"{folder} cannot be loaded ({one_line(error)}): copy it again") from error
    for name, found, wanted in sorted(report["mismatched_keys"]):
        raise UserError(
            f"{folder} does not fit its config.json: {name} has shape {tuple(found)}, "
            f"{tuple(wanted)} was expected; copy both files again"
        )
    for name in sorted(report["missing_keys"]):
        shape = tuple(model.state_dict()[name].shape)
        raise UserError(
            f"{folder} does not fit its config.json: {name} has shape None, {shape} was expected; "
            "copy both files again"
        )
    # Weights that an architecture is known to ignore, such as rotary tables, are not listed here.
    unused = sorted(report["unexpected_keys"])
    if unused:
        logger.warning(
            f"{folder} has {len(unused)} weights that a Hugging Face {kind} does not use, the "
            f"first {unused[0]}: check that its config.json belongs to this checkpoint"
        )
    if device is not None and device != BALANCED:
        model.to(device)  # where its kernels are those that the check will run
    return open_hugging_face(model)


def _check_layers(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuses more layers than the weights in a folder can have, before anything lists them.

    The configuration classes of transformers hold one entry per layer.
    """
    stored = stored_bytes(folder)
    for name in LAYERS:
        layers = config.get(name)
        if isinstance(layers, int) and layers > max(stored // 64, 1000):
            raise UserError(
                f"{folder} cannot be loaded (its config.json has {name} {layers}, more layers than "
                f"fit into the {stored:,} bytes of weights in the folder): copy it again"
            )
