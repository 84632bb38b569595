"""A `RecurrentLM`, with or without a mitigation, as `AutoModelForCausalLM` of transformers.

Notable choices:
- The model holds a `RecurrentLM`; its weights have the names there, after `model.`. Checkpoints of
  `longrnn train` and of `save_pretrained` are read by `longrnn.load` and `from_pretrained` alike.
- A mitigation shares the weights and is not a submodule: a state dict has each weight once.
- An argument that a recurrent model cannot follow is refused, not ignored.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, GenerationMixin, PreTrainedConfig

from longrnn.checkpoints.folder import CHECKPOINT_FORMAT, OPTIONS, read_config
from longrnn.checkpoints.load import load
from longrnn.checkpoints.names import (
    GENERATION,
    INITIAL_STATE,
    base_folder,
    embedded,
    is_adapter,
    resolve,
)
from longrnn.checksums import remove_checksums
from longrnn.errors import UserError, nearest
from longrnn.hf.auto.forward import RecurrentForward
from longrnn.hf.auto.generation import RecurrentGeneration
from longrnn.hf.auto.hybrid import HybridForCausalLM
from longrnn.hf.tokenizer import TOKENIZER_FILES, byte_level
from longrnn.imports import refuse_missing_of
from longrnn.mitigations import mitigation
from longrnn.models.recurrent import RecurrentConfig, RecurrentLM

INITIALISED = "_is_hf_initialized"  # the attribute by which transformers knows loaded weights

# Arguments of `from_pretrained` that have a meaning for a model that `load` opens.
IMPLEMENTATIONS = {"attn_implementation", "experts_implementation"}
HUB = {"cache_dir", "force_download", "local_files_only", "token"}
FOLLOWED = {"device_map", "dtype", "torch_dtype", "revision", "subfolder", "use_cache"}
FOLLOWED |= IMPLEMENTATIONS | HUB
# Those that the Auto class or a library adds, which change nothing here.
OF_AUTO = {"_from_auto", "adapter_kwargs", "low_cpu_mem_usage", "trust_remote_code", "weights_only"}


class LongRNNConfig(PreTrainedConfig, RecurrentConfig):
    """The content of the `config.json` of a checkpoint of longrnn, as transformers reads it.

    The options are those of `RecurrentConfig`, and these:

    Attributes:
        tokenizer: `bytes`, or the path of a tokenizer, relative to the checkpoint.
        format: version of the checkpoint format.
        mitigation: the spec of a mitigation, such as `sliding_window(window=512)`; None for none.
        use_cache: whether the model returns its state in eval mode.
        num_attention_heads: there are none; PEFT divides the width by their number.
    """

    model_type: ClassVar[str] = "longrnn"
    auto_map: ClassVar[dict[str, str]] = {}  # TRL reads it
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "tie_word_embeddings": "tie_embeddings",
    }

    architectures: list[str] | None = field(default_factory=lambda: ["LongRNNForCausalLM"])
    tokenizer: str = "tokenizer.json"
    format: int = CHECKPOINT_FORMAT
    mitigation: str | None = None
    use_cache: bool = True
    num_attention_heads: int = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """See `PreTrainedConfig`; PEFT looks for the name of transformers."""
        return super().to_dict() | {"tie_word_embeddings": self.tie_embeddings}


# transformers looks for GenerationMixin among the direct base classes.
class LongRNNForCausalLM(RecurrentForward, RecurrentGeneration, GenerationMixin):  # pyright: ignore
    """A recurrent language model with the interface of Hugging Face.

    Its cache is a `StateCache`, whose `state` is the `LMState` after the consumed tokens. Padding
    (`attention_mask`) never changes a state.

    Args:
        config: a `LongRNNConfig`.

    Raises:
        UserError: options that do not fit together, as for `RecurrentLM`.
    """

    config_class = LongRNNConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    # A device_map puts the whole model on one device, where its state lives.
    _no_split_modules = ["RecurrentLM"]  # noqa: RUF012
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012

    # A tuple, because a module would be registered and repeat every weight.
    _mitigated: tuple[str, RecurrentLM] | None = None

    def __init__(self, config: LongRNNConfig) -> None:
        super().__init__(config)
        options = {name: getattr(config, name) for name in OPTIONS}
        self.model = RecurrentLM(RecurrentConfig(**options))
        for weight in self.model.parameters():
            # RecurrentLM has initialised itself, unless it is on the meta device.
            setattr(weight, INITIALISED, not weight.is_meta)
        self._keep_in_fp32_modules_strict = {
            f"mixer.{name}" for mixer in self.model.cells for name in mixer.wide_weights
        }
        self.post_init()
        if self.model.head.weight.is_meta:
            # Until weights are loaded: transformers marks a tied head as initialised, which would
            # hide that the embedding is missing.
            self.model.head.weight = nn.Parameter(torch.empty_like(self.model.head.weight))

    @classmethod
    def of(cls, model: Any, *, tokenizer: str = "tokenizer.json") -> Any:
        """A Hugging Face model that shares the weights of a model of `longrnn.load`.

        Args:
            model: a recurrent model or a hybrid, whose mitigation becomes part of the
                configuration.
            tokenizer: see `LongRNNConfig`.

        Raises:
            UserError: a model without recurrent layers that longrnn computes.
        """
        if not isinstance(model, RecurrentLM):
            if model.cells:
                return HybridForCausalLM(model)
            raise UserError(
                f"a Hugging Face {model.kind} has a class in transformers already: load its folder "
                "with AutoModelForCausalLM, or evaluate the model of longrnn.load"
            )
        plain = model.under(None)
        config = LongRNNConfig(**asdict(plain.config), tokenizer=tokenizer, mitigation=model.spec)
        if plain.loaded_from is not None and model.spec == plain.trained_under:
            # From there trainers of TRL load a reference model, and PEFT notes it in an adapter.
            config.name_or_path = plain.loaded_from
        with torch.device("meta"):
            whole = cls(config)
        whole.model = plain
        return whole.train(plain.training)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        """See `PreTrainedModel`; it may be any other model that `load` opens and `of` takes.

        An adapter is merged, as by `load`: PEFT would know neither the mitigation of `longrnn
        train` nor the parameters that were trained as a whole, and transformers cannot add all.

        Raises:
            UserError: as `load` and `of`, and for arguments that `load` does not have.
        """
        name = pretrained_model_name_or_path
        # The Auto class gives the name of an adapter there, and its base model as first argument.
        options = kwargs.get("adapter_kwargs") or {}
        adapter = options.get("_adapter_model_path")
        subfolder = kwargs.get("subfolder") or ""
        if (place := adapter or name) is not None:
            refuse_missing_of(Path(place) / subfolder)
            starts = os.path.isfile(os.path.join(place, subfolder, INITIAL_STATE))
            if adapter or starts or not isinstance(config, LongRNNConfig):
                revision = options.get("revision") if adapter else kwargs.get("revision")
                hub = {option: kwargs[option] for option in HUB & kwargs.keys()}
                folder = resolve(place, revision, **hub) / subfolder
                if _is_read_by_load(folder):
                    return cls._load(folder, kwargs)
        place = embedded().get(str(name), name)
        return super().from_pretrained(place, *args, config=config, **kwargs)

    @classmethod
    def _load(cls, folder: Path, options: Mapping[str, Any]) -> Any:
        """A model that `load` opens, with those options of `from_pretrained` that it can follow."""
        given = {
            name for name, value in options.items() if value is not None and value is not False
        }
        for name in sorted(given - FOLLOWED - OF_AUTO):
            raise UserError(
                f"{name} is not an argument for {folder}, which longrnn.load opens: leave it out "
                f"({nearest(name, FOLLOWED)})"
            )
        dtype = options.get("dtype", options.get("torch_dtype", "auto"))
        dtype = None if dtype == "auto" else dtype
        model = cls.of(load(folder, dtype=dtype, device=_device_of(options.get("device_map"))))
        for name in sorted(given & IMPLEMENTATIONS):
            getattr(model, f"set_{name}")(options[name])
        model.config.use_cache = options.get("use_cache", model.config.use_cache)
        if isinstance(model, cls):
            model._follow_tokens(base_folder(str(folder)))
        return model

    def _follow_tokens(self, folder: Path) -> None:
        """Takes BOS, EOS and PAD, and how to generate, from the folder of a checkpoint."""
        if "model_type" in read_config(folder):  # which that of mamba-ssm lacks
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(self.config, name, getattr(config, name))
            self.generation_config = GenerationConfig.from_model_config(self.config)
        if (folder / GENERATION).is_file():
            self.generation_config = GenerationConfig.from_pretrained(folder)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """See `PreTrainedModel`; a model of bytes also gets a tokenizer that transformers reads."""
        folder, is_main = Path(save_directory), kwargs.get("is_main_process", True)
        remove_checksums(folder)
        super().save_pretrained(save_directory, *args, **kwargs)
        if is_main:
            self.save_start(folder)
        has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
        if is_main and self.config.tokenizer == "bytes" and not has_tokenizer:
            byte_level().save(folder)

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Gives weights that a checkpoint lacks the values of those of a new `RecurrentLM`."""
        missing = [
            f"{path}.{name}"
            for path, module in self.model.named_modules()
            for name, weight in module.named_parameters(recurse=False)
            if not getattr(module, INITIALISED, getattr(weight, INITIALISED, False))
        ]
        if missing:
            with torch.device("cpu"):
                fresh = RecurrentLM(self.model.config)
            for name in missing:
                self.model.get_parameter(name).copy_(fresh.get_parameter(name))

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        """See `PreTrainedModel`; a stored head that differs from the embedding stays untied."""
        super().tie_weights(*args, **kwargs)
        if not self.model.head.weight.is_meta:
            is_tied = self.model.head.weight is self.model.embedding.weight
            self.config.tie_embeddings = self.model.config.tie_embeddings = is_tied

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """See `PreTrainedModel`."""
        self.model.head = new_embeddings  # type: ignore[assignment]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """See `PreTrainedModel`."""
        resized = super().resize_token_embeddings(*args, **kwargs)
        self.config.vocab_size = resized.num_embeddings
        self.model.vocab_size = self.model.config.vocab_size = resized.num_embeddings
        self._mitigated = None  # a copy that has the old size
        return resized

    @property
    def language_model(self) -> RecurrentLM:
        """The `longrnn` model that computes: `model`, under `config.mitigation` if there is one."""
        spec, plain = self.config.mitigation, self.model
        if spec is None:
            return plain
        known = self._mitigated
        # A replica of DataParallel has the attributes of the model that it was copied from.
        if known is None or known[0] != spec or known[1].embedding is not plain.embedding:
            known = self._mitigated = spec, plain.under(mitigation(spec))
        return known[1]


def _is_read_by_load(folder: Path) -> bool:
    """Whether `load` reads a folder, and not transformers: of an adapter, or of another kind."""
    is_special = (folder / INITIAL_STATE).is_file() or is_adapter(folder)
    return is_special or read_config(folder).get("model_type") != "longrnn"


def _device_of(device_map: Any) -> Any:
    """The device on which a `device_map` puts a whole model; None for the CPU."""
    if isinstance(device_map, Mapping):
        device_map = next(iter(device_map.values()))
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return "cuda" if torch.cuda.is_available() else None
    return device_map
