"""HybridLM as a transformers model, for generate, Trainer and lm-evaluation-harness.

    import lineate.integrations.auto                                # registers model_type "lineate"
    model = AutoModelForCausalLM.from_pretrained("folder of HybridLM.save_pretrained")
    model = LineateForCausalLM.from_hybrid(HybridLM.from_pretrained("Qwen/..."))   # any family; shares the weights

The parameters have HybridLM's names and config.json its keys, so each class reads the folders that the other writes.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from os import PathLike
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lineate import layers
from lineate.forms.sequences import locate
from lineate.models.checks import check_ids, check_mask, check_state
from lineate.models.config import HybridConfig
from lineate.models.files.filling import KEPT_FLOAT32
from lineate.models.files.saving import check_described
from lineate.models.hybrid import HybridLM, drawn_mixer, empty_model, next_token_loss
from lineate.models.state import ModelState
from lineate.models.stepping import Ends, NativeSteps
from lineate.parallel.tensor.ranks import Ranks
from lineate.quantised.which import quantised_parameters

try:
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
    from transformers import initialization as init
    from transformers.cache_utils import Cache
    from transformers.generation import GenerationMixin
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError as missing:
    raise ImportError(f"transformers 5 must be installed, got {missing}; run pip install 'lineate[hf]'") from missing

HYBRID_FIELDS = tuple(f.name for f in fields(HybridConfig) if f.init)
# Keys that transformers itself may pass to a configuration, besides the fields of HybridConfig.
FROM_TRANSFORMERS = frozenset({
    "model_type", "auto_map", "torch_dtype", "name_or_path", "_name_or_path", "_commit_hash", "num_labels",
    "attn_implementation", "experts_implementation", "output_attentions",
})  # fmt: skip
MODEL_PARTS = ("embed", "layers", "norm", "head", "prediction")


class LineateConfig(PreTrainedConfig):  # type: ignore[misc]
    """The fields of HybridConfig as in config.json; its parts (linear, memory, attention, ...) are dicts."""

    model_type = "lineate"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_position",
        "tie_word_embeddings": "tie_embeddings",
    }

    vocab_size: int
    hidden_size: int
    n_layers: int
    pattern: str = "GGGA"
    linear: dict[str, Any] | None = None
    mamba: dict[str, Any] | None = None
    rwkv: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    attention: dict[str, Any] | None = None
    latent: dict[str, Any] | None = None
    feed: dict[str, Any] | None = None
    experts: dict[str, Any] | None = None
    dense_layers: tuple[int, ...] = ()
    mixer_only: tuple[int, ...] = ()
    norm: str = "rms"
    norm_eps: float = 1e-6
    zero_centred_norm: bool = False
    norm_after: str = ""
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    tie_embeddings: bool = False
    initializer_range: float = 0.02
    max_position: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    family: str = "lineate"
    mixers: dict[str, Any] | None = None
    prediction: bool = False

    def __post_init__(self, **others: Any) -> None:  # transformers passes keys that are not fields
        if "weights" in others:
            raise ValueError(
                f"transformers cannot read weights of {others['weights']}; use "
                "LineateForCausalLM.from_hybrid(HybridLM.from_pretrained(folder))"
            )
        if unknown := sorted(set(others) - FROM_TRANSFORMERS):
            raise ValueError(
                f"LineateConfig has unknown keys {', '.join(map(repr, unknown))}; known are {', '.join(HYBRID_FIELDS)}"
            )
        if others.pop("model_type", self.model_type) != self.model_type:
            raise ValueError(f"model_type must be {self.model_type!r}; use HybridLM.from_pretrained for other families")
        others["name_or_path"] = others.pop("_name_or_path", None) or others.get("name_or_path") or ""
        super().__post_init__(**others)
        _ = self.hybrid  # checks the values

    @classmethod
    def from_hybrid(cls, config: HybridConfig) -> "LineateConfig":
        """Make it from a HybridConfig with the same values.

        Args:
            config: The configuration of a HybridLM.
        """
        return cls(**config.to_dict())

    @property
    def hybrid(self) -> HybridConfig:
        """The HybridConfig with the same values."""
        return HybridConfig.from_dict({name: getattr(self, name) for name in HYBRID_FIELDS})

    def to_dict(self) -> dict[str, Any]:
        """Return the values for config.json, without use_cache, which Trainer sets for its own run, or empty mixers."""
        left_out = {"use_cache"} if self.mixers else {"use_cache", "mixers"}
        return {key: value for key, value in super().to_dict().items() if key not in left_out}

    @property
    def eos_token_id(self) -> list[int] | None:
        """eos_token_ids under the name that transformers looks for."""
        return list(self.eos_token_ids) or None

    @eos_token_id.setter
    def eos_token_id(self, tokens: int | list[int] | None) -> None:
        self.eos_token_ids = () if tokens is None else (tokens,) if isinstance(tokens, int) else tuple(tokens)


class LineateCache(Cache):  # type: ignore[misc]
    """A ModelState as transformers' cache; the model updates it in place.

    A state cannot be cropped. To return to a point in the text, keep copy.copy(cache), which copies no tensors.

    Args:
        state: The state of a HybridLM to continue from; None for an empty cache.
        columns: Columns of input_ids that the state has read, padding included.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, state: ModelState | None = None, columns: int = 0) -> None:
        super().__init__(layers=[])
        self.state = state
        self.columns = columns
        """Columns of input_ids read so far, padding included."""

    def __repr__(self) -> str:
        return f"LineateCache(rows={self.batch_size}, columns={self.columns})"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns read so far, padding included."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1, as a state has no largest length."""
        return -1  # which transformers reads as no limit

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether anything has been read."""
        return self.state is not None

    @property
    def batch_size(self) -> int:
        """The number of rows; -1 before anything is read."""
        return -1 if self.state is None else self.state.rows

    @property
    def is_initialized(self) -> bool:
        """Whether anything has been read."""
        return self.state is not None

    def reset(self) -> None:
        """Forget everything that was read."""
        self.state, self.columns = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the rows of a beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at these indices, in this order."""
        if self.state is not None:
            self.state = self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.state is not None:
            self.state = self.state.select(torch.arange(self.state.rows, device="cpu").repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError, as a state cannot be cropped, unless there is nothing to remove."""
        if tokens_to_remove:
            raise ValueError(
                f"a LineateCache cannot be cropped, got tokens_to_remove = {tokens_to_remove}; "
                "keep copy.copy(cache) of the point to return to"
            )

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Raise TypeError, as the model updates the state itself."""
        raise TypeError("a LineateCache holds the state of a lineate model, not the keys and values of another")


class LineateForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A HybridLM with the interface of a transformers model; its modules have HybridLM's names.

    Args:
        config: The sizes and the pattern of the model.
    """

    config_class = LineateConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # forward takes num_items_in_batch
    _input_embed_layer = "embed"
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    _keep_in_fp32_modules_strict: ClassVar[set[str]] = KEPT_FLOAT32
    _is_stateful = True  # transformers then refuses assisted generation, which crops the cache
    _gradient_checkpointing_func: Callable[..., Any]
    embed: nn.Embedding
    layers: nn.ModuleList
    norm: nn.Module
    head: nn.Linear | None
    prediction: nn.Module | None
    ranks: Ranks | None = None
    """Those that share the model, if it was made of a HybridLM with ranks."""

    def __init__(self, config: LineateConfig) -> None:
        super().__init__(config)
        model = HybridLM(config.hybrid)
        for name in MODEL_PARTS:
            setattr(self, name, getattr(model, name))
        self._steps = NativeSteps()
        self.gradient_checkpointing = False
        self.generation_config.eos_token_id = config.eos_token_id
        if not self.embed.weight.is_meta:
            for module in self.modules():  # HybridLM has already initialised them
                module._is_hf_initialized = True
        self.post_init()

    @classmethod
    def from_hybrid(cls, model: HybridLM) -> "LineateForCausalLM":
        """Wrap a HybridLM; both share their parameters.

        Args:
            model: A model of any family.
        """
        with torch.device("meta"):
            wrapped = cls(LineateConfig.from_hybrid(model.config))
        for name in MODEL_PARTS:
            setattr(wrapped, name, getattr(model, name))
        wrapped.ranks = model.ranks
        wrapped.config.dtype = model.dtype
        return wrapped.train(model.training)

    def to_hybrid(self) -> HybridLM:
        """Return a HybridLM that shares this model's parameters."""
        with torch.device("meta"):
            model = HybridLM(self.config.hybrid)
        for name in MODEL_PARTS:
            setattr(model, name, getattr(self, name))
        model.ranks = self.ranks
        return model.train(self.training)

    def save_pretrained(self, save_directory: str | PathLike[str], *given: Any, **named: Any) -> None:
        """Save as transformers does; refuse a model that its configuration does not describe.

        Args:
            save_directory: The folder.
            *given: Further arguments of transformers' save_pretrained.
            **named: Further arguments of transformers' save_pretrained.
        """
        check_described(self.to_hybrid(), empty_model(self.config.hybrid), around=self)
        if quantised_parameters(self):
            raise ValueError(
                "transformers cannot write quantised weights; use model.to_hybrid().save_pretrained(folder)"
            )
        super().save_pretrained(save_directory, *given, **named)

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the head; None if it is the embedding."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the head."""
        if self.head is None:
            raise ValueError("set_output_embeddings needs tie_embeddings=False; the head is the embedding")
        self.head = new_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LineateCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Return logits, the loss if there are labels, and the cache.

        Attentions, hidden states, inputs_embeds, and tuples instead of a CausalLMOutputWithPast are not supported.

        Args:
            input_ids: Tokens `b t`.
            attention_mask: 0 where a token is padding; its last t columns are used.
            position_ids: With b = 1, a position of 0 begins a packed sequence. They are ignored if there is padding or
                past_key_values.
            past_key_values: The cache to continue from, which is updated in place.
            labels: Targets `b t`, shifted by the model; -100 is ignored.
            use_cache: Whether to return a cache; by default outside of training, and if past_key_values is given.
            logits_to_keep: Return the logits of only this many last columns; 0 returns all.
            num_items_in_batch: Divide the sum of the losses by this number instead of the number of targets.
            return_dict: True or None.
        """
        if return_dict is False:
            raise ValueError("return_dict must be True or None, got False; the result is a CausalLMOutputWithPast")
        if past_key_values is not None and not isinstance(past_key_values, LineateCache):
            raise TypeError(
                f"past_key_values must be a LineateCache or None, got {type(past_key_values).__name__}; "
                "use lineate.integrations.auto.LineateCache()"
            )
        check_ids(input_ids, self.config.vocab_size)
        (b, t), state = input_ids.shape, None if past_key_values is None else past_key_values.state
        kept = _padding(attention_mask, input_ids, 0 if past_key_values is None else past_key_values.columns)
        cu_seqlens = None
        if kept is not None:  # rows without their padding become packed sequences
            cu_seqlens = F.pad(kept.sum(1).cumsum(0), (1, 0))
            input_ids = input_ids[kept][None]
        elif position_ids is not None and state is None:
            cu_seqlens = _packed(position_ids, b, t)
        check_state(state, self.layers, b)

        x, state = self._hidden(self.embed(input_ids), state, cu_seqlens)
        loss = None
        if labels is not None:
            if logits_to_keep:
                raise ValueError(f"logits_to_keep must be 0 with labels, got {logits_to_keep}")
            logits = self._logits(x)
            own = labels if kept is None else labels[kept][None]
            loss = next_token_loss(logits, own, cu_seqlens)
            if num_items_in_batch is not None:
                loss = loss * (_targets(own, cu_seqlens) / num_items_in_batch)
            if kept is not None:
                logits = _unpacked(logits, kept)
        else:
            logits = self._logits((x if kept is None else _unpacked(x, kept))[:, -logits_to_keep:])
        if use_cache is None:
            use_cache = past_key_values is not None or (getattr(self.config, "use_cache", True) and not self.training)
        if not use_cache:
            return CausalLMOutputWithPast(loss=loss, logits=logits)
        past_key_values = LineateCache() if past_key_values is None else past_key_values
        past_key_values.state, past_key_values.columns = state, past_key_values.columns + t
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def _hidden(self, x: Tensor, state: ModelState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, ModelState]:
        blocks: list[Callable[..., Any]] = list(self.layers)
        if self.gradient_checkpointing and self.training:
            blocks = [partial(self._gradient_checkpointing_func, block) for block in blocks]
        ends = Ends(self.embed, self.norm, self.head)
        carries = any(getattr(block, "carries", False) for block in self.layers)
        parts = SimpleNamespace(layers=blocks, norm=self.norm, ends=ends, carries=carries, _steps=self._steps)
        return HybridLM.hidden(cast(HybridLM, parts), x, state, cu_seqlens)

    def _logits(self, x: Tensor) -> Tensor:
        return HybridLM.logits(cast(HybridLM, self), x)

    def adjust_generation_fn(self, *given: Any, **named: Any) -> None:  # transformers calls it after loading
        super().adjust_generation_fn(*given, **named)
        if self.generation_config.eos_token_id is None:  # a folder that HybridLM wrote has no generation_config.json
            self.generation_config.eos_token_id = self.config.eos_token_id

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward makes the cache, not generate

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what a checkpoint lacks, and resized embeddings; `init` leaves loaded tensors unchanged."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, 0.0, std)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, layers.RMSNorm | layers.GatedRMSNorm):
            init.constant_(module.weight, 0.0 if getattr(module, "zero_centred", False) else 1.0)
        elif isinstance(module, layers.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, layers.ShortConvolution):
            module.reset_parameters()
        elif isinstance(module, layers.MixtureOfExperts):
            init.normal_(module.experts_gate_up, 0.0, std)
            init.normal_(module.experts_down, 0.0, std)
            if module.router_bias is not None:
                init.zeros_(module.router_bias)

    def initialize_weights(self) -> None:
        """Initialise what a checkpoint lacks; transformers calls it after loading."""
        is_new = getattr(self, "_is_hf_initialized", False)  # HybridLM has initialised it
        super().initialize_weights()
        if not is_new:
            self._draw_mixers()

    def _draw_mixers(self) -> None:
        """Give tensors of the mixers that a checkpoint lacks the values that they have in a new model.

        This serves mixers of any class, also those whose reset_parameters would overwrite loaded tensors.
        """
        config = self.config.hybrid
        for layer, (letter, block) in enumerate(zip(config.letters, self.layers, strict=True)):
            own = _tensors(cast(nn.Module, block.mixer))
            if all(x.is_meta or getattr(x, "_is_hf_initialized", False) for x in own.values()):
                continue
            with torch.device("cpu"):
                new = _tensors(drawn_mixer(config, letter, layer))
            for name in own.keys() & new.keys():
                init.copy_(own[name], new[name])


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers by their names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _padding(attention_mask: Tensor | None, input_ids: Tensor, past: int) -> Tensor | None:
    """Return which tokens `b t` are not padding, or None if there is no padding."""
    if attention_mask is None:
        return None
    b, t = input_ids.shape
    if attention_mask.shape not in ((b, t), (b, past + t)):
        both = f"{(b, past + t)} or {(b, t)}" if past else f"{(b, t)}"
        raise ValueError(f"attention_mask must have shape (b, past + t) = {both}, got {tuple(attention_mask.shape)}")
    return check_mask(attention_mask[:, -t:], input_ids)


def _packed(position_ids: Tensor, b: int, t: int) -> Tensor | None:
    """Return cu_seqlens of packed sequences, from positions that restart at 0; None if a row is one sequence."""
    if position_ids.shape not in ((b, t), (1, t)):
        raise ValueError(f"position_ids must have shape (b, t) = {(b, t)}, got {tuple(position_ids.shape)}")
    plain = torch.arange(t, device=position_ids.device)
    if bool((position_ids == plain).all()):
        return None
    starts = (position_ids[0] == 0).nonzero().flatten()
    cu_seqlens = F.pad(starts, (0, 1), value=t)
    if b > 1 or position_ids[0, 0] != 0 or not torch.equal(locate(cu_seqlens, t)[1], position_ids[0]):
        raise ValueError("position_ids must count from 0, or, with b = 1, from 0 again in every packed sequence")
    return cu_seqlens


def _unpacked(x: Tensor, kept: Tensor) -> Tensor:
    """Return x `1 tokens n` as `b t n`, with 0 at the padding."""
    return x.new_zeros(*kept.shape, x.shape[-1]).masked_scatter(kept[..., None], x)


def _targets(labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Count the tokens over which the loss is a mean."""
    if cu_seqlens is not None:
        labels = labels.index_fill(1, cu_seqlens[:-1][cu_seqlens.diff() > 0], -100)
    return (labels[:, 1:] != -100).sum()


AutoConfig.register(LineateConfig.model_type, LineateConfig, exist_ok=True)
AutoModelForCausalLM.register(LineateConfig, LineateForCausalLM, exist_ok=True)
