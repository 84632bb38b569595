"""`load`: where the name of a checkpoint becomes a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from longrnn import processes
from longrnn.checkpoints import names
from longrnn.checkpoints.adapters import merge_adapter
from longrnn.checkpoints.folder import cast_to, cast_weights, dtypes_of, read_config
from longrnn.checkpoints.layouts import LAYOUTS, layout_of
from longrnn.checksums import verify_folder
from longrnn.errors import UserError
from longrnn.files import one_line
from longrnn.imports import refuse_missing_of
from longrnn.mitigations import mitigation
from longrnn.mitigations.spec import ATTENTION_WINDOW, BEYOND, NONE, ROPE, parse, split
from longrnn.models.base import require_cells
from longrnn.models.recurrent import RecurrentLM
from longrnn.programs import is_out_of_memory
from longrnn.state import load_start
from longrnn.units import parse_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from longrnn.hf.foreign import ForeignLM

    Model: TypeAlias = RecurrentLM | ForeignLM

# Numbers of layers and dimensions of weights in any configuration, and of its parts.
SIZES = re.compile(
    r'"(num_hidden_layers|n_layers?|num_layers|hidden_size|head_dim|intermediate_size|'
    r'num_attention_heads|vocab_size)": (-?\d+)'
)
SUFFIXES = (".safetensors", ".bin")
DAMAGED = (
    "it is incomplete, damaged, not what its config.json says, or of an architecture that "
    "transformers does not read; copy it again, pickles as safetensors"
)


def load(
    name_or_path: str | Path | names.CheckpointName,
    *,
    backend: str = "auto",
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
) -> Model:
    """Load a language model for evaluation.

    Args:
        name_or_path: the name of an embedded checkpoint (`passkey-tiny`); a folder with a
            checkpoint of `longrnn train`, a Mamba-1 or 2 in the layout of mamba-ssm or
            transformers, or any other causal Hugging Face language model; `organisation/model` on
            the Hub; or a GGUF file, whose weights are dequantized. A mitigation may follow after a
            plus, `CHECKPOINT+MITIGATION`, and before it a dtype, `CHECKPOINT+float32`, unless a
            path with that whole name exists. `+state(FILE)` names a file of `state.save` or
            `longrnn train`, from whose state the model starts, at the beginning of every document.
            `+bos` and `+no_bos` are for `load_tokenizer`.
        backend: implementation of the recurrence; see `longrnn.cells.mamba2.Mamba2`.
        device: None for the CPU.
        dtype: also by its name; None for that of the checkpoint, and float32 for an adapter. The
            parameters that set the time scales (A_log, dt_bias, D) are never rounded to a narrower
            dtype: published checkpoints store them in float32 next to matrices in float16 or
            bfloat16.
        revision: branch, tag or commit of a model on the Hub.

    Returns:
        A `RecurrentLM` (which supports all mitigations) or a `ForeignLM`: a `HybridLM`, which
        supports all mitigations, if it has recurrent layers that longrnn can compute. The model is
        under the mitigation that the name has or the checkpoint records.

    Raises:
        UserError: an unknown name, a folder that is incomplete, damaged or not a checkpoint, or a
            run with modules of users (`--import`) that are not imported.
    """
    processes.check_device(device)
    name = names.CheckpointName.parse(name_or_path)
    dtype = _dtype_of(name, dtype)
    folder = names.resolve(name.checkpoint, revision)
    refuse_missing_of(folder)
    parts = name.mitigation
    rope, *others = [part for part in parts or () if is_rope(part)] or [None]
    if others:
        raise UserError(f"{others[0]} is a second scaling of the rotary encoding: give one")
    with _verified(folder):
        stored: Any = _read(folder, backend, dtype, rope)
        if isinstance(stored, RecurrentLM):
            stored.loaded_from = str(folder)
            if parts is None and stored.trained_under is not None:
                stored = stored.under(mitigation(str(stored.trained_under)))
    if device is not None:
        stored.to(device)  # before the check, which chooses kernels
    if isinstance(stored, RecurrentLM):
        model: Model = stored
    else:
        from longrnn.hf.foreign import MITIGATION_KEY
        from longrnn.hf.foreign_load import open_hugging_face

        model = open_hugging_face(stored)
        recorded = getattr(stored.config, MITIGATION_KEY, None)
        parts = split(recorded) if parts is None and recorded else parts
        parts = parts and [part for part in parts if not is_rope(part)]
    model = model if parts is None else mitigated(model, parts)
    start = name.start or names.own_start(folder)
    if start is None:
        return model
    return model.starting_from(load_start(start, model, is_own=name.start is None))


def _dtype_of(name: names.CheckpointName, dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that is given or named; a UserError for two of them or an unknown one."""
    if dtype is None:
        return name.dtype
    given = names.DTYPE_NAMES.get(str(dtype).removeprefix("torch."))
    if given is None or name.dtype not in (None, given):
        raise UserError(
            f"the weights of {name.checkpoint} cannot have the dtype {dtype}: give one of "
            f"{', '.join(names.DTYPE_NAMES)}, in the name or beside it"
        )
    return given


@contextmanager
def _verified(folder: Path) -> Iterator[None]:
    """Verify the checksums of a folder while it is read, and explain errors of reading it."""
    # Hashing releases the global interpreter lock, so it runs in parallel to reading and building.
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(verify_folder, folder)
        try:
            yield
        except UserError as error:
            if str(folder) in str(error):
                raise
            raise UserError(f"{folder} cannot be loaded: {error}") from error
        except Exception as error:  # damaged files raise errors of many kinds
            remedy = DAMAGED
            if isinstance(error, ImportError | PermissionError) or is_out_of_memory(error):
                remedy = "install or permit what is missing, or use a machine with more memory"
            cause = shorten(one_line(error), 160, placeholder=" …")
            raise UserError(f"{folder} cannot be loaded ({cause}): {remedy}") from error
        finally:
            verified.result()  # a wrong checksum is the cause of any other error


def mitigated(model: Any, parts: Sequence[str]) -> Model:
    """Return a model under mitigations; the given one is not changed.

    Two more names are valid for Hugging Face models: `beyond` lifts the maximum length, and
    `attention_window(window=…, sinks=…)` limits their attention. `load` applies `rope(…)`.

    Raises:
        UserError: an unknown mitigation, or one that is not defined for the model.
    """
    others = []
    for part in parts:
        name = part.partition("(")[0]
        if isinstance(model, RecurrentLM) or name not in (BEYOND, ATTENTION_WINDOW):
            others += [part] if part != NONE else []
            continue
        _, options = parse(part)
        if name == BEYOND and not options:
            model = model.beyond()
        elif name == ATTENTION_WINDOW and "window" in options and {*options} <= {"window", "sinks"}:
            sizes = {key: value and parse_length(str(value)) for key, value in options.items()}
            model = model.with_attention_window(**sizes)
        else:
            raise UserError(
                f"{part} is not valid for this {model.kind}: write {BEYOND} or "
                f"{ATTENTION_WINDOW}(window=4096, sinks=4)"
            )
    return model.under(mitigation(others)) if others else model


def load_editable(name_or_path: str | Path | names.CheckpointName, **options: Any) -> Model:
    """Load a model whose recurrent layers can be edited and read, without a mitigation.

    Args:
        name_or_path: see `load`.
        options: of `load`.

    Raises:
        UserError: as `load`, and for any other model.
    """
    model, name = load(name_or_path, **options), names.CheckpointName.parse(name_or_path).checkpoint
    if model.mitigation is not None:
        raise UserError(
            f"{name} is a model under {model.mitigation}, and this needs it without: give "
            f"{name}+{NONE}"
        )
    require_cells(model, name)
    return model


def is_rope(part: str) -> bool:
    """Whether a part of a name scales the rotary encoding, which is done while loading."""
    return part.partition("(")[0] == ROPE


def _read(
    folder: Path, backend: str, dtype: torch.dtype | None, rope: str | None
) -> RecurrentLM | PreTrainedModel:
    """Return the model in a folder, on the CPU, without verifying its checksums."""
    if names.is_adapter(folder):
        name = f"{names.base_of(folder)}+{rope or NONE}"
        base: Any = load(name, backend=backend, dtype=dtype or torch.float32)
        dtypes = {} if isinstance(base, RecurrentLM) else dtypes_of(base.model)
        if dtype not in (None, torch.float32):
            del base  # which is not kept beside the other
            base = load(name, backend=backend, dtype=torch.float32)
        merged = merge_adapter(folder, base)
        if isinstance(merged, RecurrentLM):
            return cast_weights(merged, dtype)
        cast_to(merged, dtypes)
        return merged
    config = {} if folder.suffix == names.GGUF else read_config(folder)
    if config:
        _check_sizes(folder, config)
    layout = layout_of(config)
    if layout is not None:
        return cast_weights(LAYOUTS[layout].load(folder, config, backend), dtype)
    if backend != "auto":
        raise UserError(f"{folder} is computed by transformers and has no backend: leave it out")
    from longrnn.hf.foreign_load import load_transformer

    return load_transformer(folder, config, dtype, parse(rope)[1] if rope else None)


def _check_sizes(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse sizes that the weights in a folder cannot have, before anything of them is allocated.

    At least one bit per weight is assumed, and 64 bytes per layer.
    """
    stored = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in SUFFIXES)
    for name, size in SIZES.findall(json.dumps(config)):
        is_layers = "layer" in name
        most = max(stored // 64, 1000) if is_layers else 8 * stored
        if stored and not is_layers <= int(size) <= most:
            raise ValueError(f"{name} is {size}, and there are {stored:,} bytes of weights")
