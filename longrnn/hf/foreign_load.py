"""Loads a model whose code is in transformers from its folder, and opens it for evaluation."""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from longrnn.errors import UserError, require
from longrnn.hf.foreign import ForeignLM
from longrnn.hf.hybrid.families import wide_weights
from longrnn.hf.hybrid.layers import recurrent_layers
from longrnn.hf.hybrid.model import HybridLM
from longrnn.hf.hybrid.shared_cell import UnsupportedLayerError
from longrnn.hf.positions import rotates, scale_rope
from longrnn.hf.probe import probe

logger = logging.getLogger(__name__)

# Name of the code of a function that calls the kernel of another package if that can be imported.
KERNEL_WRAPPER = "use_kernel_func_from_hub_with_fallback.<locals>.decorator.<locals>.wrapped"


def load_transformer(
    folder: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
    rope: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a causal language model whose code is in transformers, with the dtype of its weights.

    Args:
        folder: or a GGUF file, whose weights become float32.
        config: the content of `config.json`.
        dtype: instead of that of the weights.
        rope: options of `scale_rope`; None for the rotary encoding of the configuration.

    Raises:
        UserError: a scaling that is not valid for the model, or a GGUF file without the package
            gguf.
        ValueError: weights are missing, of another shape, or all of them integers.
        Exception: of transformers, for what it cannot load.
    """
    _refuse_integers(folder)
    place, where = folder, {}
    options: dict[str, Any] = {"dtype": dtype or "auto"}
    reading: AbstractContextManager[Any] = nullcontext()
    if folder.is_file():
        require("gguf", str(folder))
        place, where = folder.parent, {"gguf_file": folder.name}
        options = {"dtype": dtype or torch.float32}
        reading = _reading_gguf_once()
    with quietly(), wide_weights(str(config.get("model_type"))), reading:
        if folder.is_file():
            _check_gguf(folder)
        if rope is not None:
            options["config"] = AutoConfig.from_pretrained(place, **where, local_files_only=True)
            scale_rope(options["config"], rope)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place,
            **where,
            **options,
            trust_remote_code=False,
            local_files_only=True,
            weights_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    model, report = loaded
    if rope is not None and not rotates(model):
        raise UserError(
            f"rope is not valid for this {model.config.model_type}, which does not rotate its "
            "queries and keys: leave it out"
        )
    misfits = {name: tuple(shape) for name, shape, _ in report["mismatched_keys"]}
    for name, shape in sorted((misfits | dict.fromkeys(report["missing_keys"])).items()):
        wanted = tuple(model.state_dict()[name].shape)
        raise ValueError(f"{name} has shape {shape}, and {wanted} was expected")
    # Weights that an architecture is known to ignore, such as rotary tables, are not listed here.
    unused = sorted(report["unexpected_keys"])
    if unused:
        logger.warning(
            f"{folder} has {len(unused)} weights that a Hugging Face {model.config.model_type} "
            f"does not use, the first {unused[0]}: check that its config.json belongs to this "
            "checkpoint"
        )
    return model


def _refuse_integers(folder: Path) -> None:
    """Raise a ValueError if no weight is a floating-point number; transformers would cast them."""
    found = set[str]()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    if found and not any(kind.startswith(("F", "BF")) for kind in found):
        raise ValueError(f"its weights are {', '.join(sorted(found))}, not floating-point numbers")


def open_hugging_face(model: PreTrainedModel) -> ForeignLM:
    """Return a Hugging Face model as a `LanguageModel`, after a check that it works in pieces.

    It is a `HybridLM` if the cells of longrnn compute the same as its recurrent layers. Otherwise
    transformers computes all of its layers, which is reported if it has recurrent ones.

    Raises:
        UserError: the model cannot continue a state exactly; see `ForeignLM`.
    """
    use_torch_on_cpu(model)
    reason, kind = None, model.config.model_type
    with quietly():
        if recurrent_layers(model):
            try:
                hybrid = HybridLM(model)
                reason = probe(hybrid)
                if reason is None:
                    return hybrid
            except UnsupportedLayerError as error:
                reason = str(error)
        elif model._is_stateful:
            reason = "there is no cell for them"
        try:
            foreign = ForeignLM(model)
            if (difference := probe(foreign)) is not None:
                raise foreign.refusal(difference)
        except UserError as error:
            if reason is None:
                raise
            raise UserError(
                f"longrnn cannot compute the recurrent layers of this {kind} ({reason}), and "
                f"{error}"
            ) from error
    if reason is not None:
        logger.warning(
            f"longrnn cannot compute the recurrent layers of this {kind} ({reason}): transformers "
            "computes them, without mitigations and diagnoses"
        )
    return foreign


def _reading_gguf_once() -> AbstractContextManager[Any]:
    """A context in which transformers parses a GGUF file, and names its tensors, once.

    It would parse the file several times and build the table of names for every module, which takes
    most of the time of loading.
    """
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    once: Any = {name: cache(getattr(gguf, name)) for name in names}
    return patch.multiple(gguf, **once)


def _check_gguf(path: Path) -> None:
    """Raise a ValueError for a model of other sizes than the tensors of a GGUF file.

    transformers would leave layers out, or initialise weights of any size.
    """
    import gguf

    reader = gguf.GGUFReader(str(path))
    names = [tensor.name.split(".") for tensor in reader.tensors]
    blocks = len({parts[1] for parts in names if parts[0] == "blk"})
    fields = reader.fields.items()
    counts = [field.contents() for key, field in fields if key.endswith(".block_count")]
    if counts != [blocks]:
        raise ValueError(f"block_count is {counts}, and it has the tensors of {blocks} blocks")
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_config(config)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    stored = sum(int(tensor.n_elements) for tensor in reader.tensors)
    if wanted > stored:
        raise ValueError(f"its sizes are those of {wanted:,} weights, and it has {stored:,}")


@contextmanager
def quietly() -> Iterator[None]:
    """A context for calls of transformers whose reports the caller checks: without its messages.

    Without a GPU, flash-linear-attention is hidden while transformers imports a model's code, which
    would import Triton for nothing.
    """
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hides = not torch.cuda.is_available()
    imported = {name: sys.modules[name] for name in ["fla"] if name in sys.modules}
    if hides:
        sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
        if hides:
            del sys.modules["fla"]
            sys.modules |= imported


def use_torch_on_cpu(model: PreTrainedModel) -> None:
    """Make the code of a model compute tensors on a CPU by torch, and not by kernels of a GPU.

    transformers chooses one implementation for all devices, when the code is imported.
    """
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        for name, function in list(vars(module).items()):
            code = getattr(function, "__code__", None)
            if code is not None and code.co_qualname == KERNEL_WRAPPER:
                setattr(module, name, _by_device(function))


def _by_device(with_kernel: Any) -> Callable[..., Any]:
    """Return a function of transformers that computes tensors on a CPU as it is written there."""
    reference = with_kernel.__wrapped__
    accepted = inspect.signature(reference).parameters

    @wraps(reference)
    def choose(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if any(tensor.device.type == "cpu" for tensor in tensors):
            return reference(*args, **{k: v for k, v in kwargs.items() if k in accepted})
        return with_kernel(*args, **kwargs)

    return choose
