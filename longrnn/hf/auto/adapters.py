"""The mitigation of a LoRA adapter, which `adapter.json` records beside the files of PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from longrnn.errors import UserError
from longrnn.files import read_json
from longrnn.hf.lora import BASE, CONFIG


def adapter_record(source: Any, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the content of `adapter.json` for the arguments of `from_pretrained`.

    Args:
        source: the name or folder given to `from_pretrained`.
        options: its keyword arguments; the Auto class puts the name of an adapter there and gives
            the base model as `source`.

    Returns:
        None if no adapter is loaded, or one that longrnn did not write.
    """
    named = (options.get("adapter_kwargs") or {}).get("_adapter_model_path")
    adapter = named or (source if source and (Path(source) / CONFIG).is_file() else None)
    if adapter is None:
        return None
    path = cached_file(
        adapter,
        BASE,
        revision=(options.get("adapter_kwargs") or {}).get("revision"),
        local_files_only=bool(options.get("local_files_only", False)),
        token=options.get("token"),
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else read_json(Path(path))


def refuse_to_save(has_own_adapter: bool) -> None:
    """Raise a UserError for a model with an adapter of `longrnn train`.

    transformers would save neither its mitigation nor the parameters that were trained as a whole.
    """
    if has_own_adapter:
        raise UserError(
            "transformers cannot save this adapter completely: copy its folder, or save the "
            "merged model of longrnn.load(folder) with LongRNNForCausalLM.of"
        )
