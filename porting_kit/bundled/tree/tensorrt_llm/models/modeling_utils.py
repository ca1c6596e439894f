"""What all models share: their config, the list of layers, and the top class that produces logits."""

import copy
import json
from pathlib import Path

from safetensors.torch import load_file

from .._common import default_net
from ..functional import PositionEmbeddingType, gather_last_token_logits
from ..logger import logger
from ..mapping import Mapping
from ..module import Module, ModuleList
from ..quantization import QuantMode


class PretrainedConfig:
    """A checkpoint's config.json. Keys that are no argument here become attributes under their own names."""

    def __init__(
        self,
        *,
        architecture,
        dtype,
        hidden_size,
        num_hidden_layers,
        num_attention_heads,
        vocab_size,
        hidden_act="gelu",
        logits_dtype="float32",
        norm_epsilon=1e-5,
        position_embedding_type=PositionEmbeddingType.learned_absolute,
        max_position_embeddings=None,
        num_key_value_heads=None,
        intermediate_size=None,
        mapping=None,
        quantization=None,
        use_parallel_embedding=False,
        head_size=None,
        **kwargs,
    ):
        if use_parallel_embedding:
            raise NotImplementedError("the bundled definitions keep the whole embedding on every rank")
        if isinstance(position_embedding_type, str):
            position_embedding_type = PositionEmbeddingType.from_string(position_embedding_type)
        self.architecture = architecture
        self.dtype = dtype
        self.logits_dtype = logits_dtype
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_size = hidden_size // num_attention_heads if head_size is None else head_size
        self.intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        self.hidden_act = hidden_act
        self.norm_epsilon = norm_epsilon
        self.position_embedding_type = position_embedding_type
        self.max_position_embeddings = max_position_embeddings
        self.mapping = mapping if isinstance(mapping, Mapping) else Mapping.from_dict(mapping or {})
        self.quantization = dict(quantization or {})
        self.use_parallel_embedding = use_parallel_embedding
        for key, value in kwargs.items():
            setattr(self, key, value)

    @property
    def quant_mode(self):
        return QuantMode.from_quant_algo(
            self.quantization.get("quant_algo"), self.quantization.get("kv_cache_quant_algo")
        )

    @property
    def kv_dtype(self):
        return self.dtype

    def set_if_not_exist(self, key, value):
        """Give a key a default that only some models need."""
        if not hasattr(self, key):
            setattr(self, key, value)

    def set_rank(self, rank):
        """The same grid of ranks, seen from another rank."""
        self.mapping = Mapping.from_dict({**self.mapping.to_dict(), "rank": rank})

    @classmethod
    def from_dict(cls, config):
        """The config class of the architecture's model, filled from config.json's content."""
        from . import MODEL_MAP

        architecture = config["architecture"]
        config_class = getattr(MODEL_MAP[architecture], "config_class", cls)
        return config_class(**config)

    @classmethod
    def from_json_file(cls, config_file):
        return cls.from_dict(json.loads(Path(config_file).read_text(encoding="utf-8")))

    @classmethod
    def from_checkpoint(cls, ckpt_dir):
        return cls.from_json_file(Path(ckpt_dir) / "config.json")

    def to_dict(self):
        """The content of config.json; the rank is no part of it."""
        fields = copy.deepcopy(self.__dict__)
        fields["position_embedding_type"] = str(self.position_embedding_type)
        fields["mapping"] = self.mapping.to_dict()
        fields["mapping"].pop("rank")
        return fields


class DecoderLayerList(ModuleList):
    """The decoder layers of this rank; `forward` runs them one after the other."""

    def __init__(self, cls, config):
        self.layer_list = config.mapping.pp_layers(config.num_hidden_layers)
        super().__init__([cls(config, index) for index in self.layer_list])

    def forward(
        self,
        hidden_states,
        use_cache=False,
        attention_mask=None,
        kv_cache_params=None,
        attention_params=None,
        position_ids=None,
        lora_params=None,
        spec_decoding_params=None,
    ):
        # Handed on only when given: a layer whose forward does not know an argument is never called with it, unless
        # the caller asks for what the argument does.
        optional = {"position_ids": position_ids, "spec_decoding_params": spec_decoding_params}
        given = {name: value for name, value in optional.items() if value is not None}
        presents = []
        for layer, layer_cache in zip(self, kv_cache_params.per_layer(len(self)), strict=True):
            hidden_states = layer(
                hidden_states,
                use_cache=use_cache,
                attention_mask=attention_mask,
                kv_cache_params=layer_cache,
                attention_params=attention_params,
                **given,
            )
            if use_cache:
                hidden_states, present = hidden_states
                presents.append(present)
        return (hidden_states, presents) if use_cache else hidden_states


class PretrainedModel(Module):
    """A model that is made from a config and filled from a checkpoint."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    @classmethod
    def from_config(cls, config):
        return cls(config)

    @classmethod
    def from_checkpoint(cls, ckpt_dir, rank=None, config=None):
        """The model of one rank, from config.json and rank<r>.safetensors."""
        if config is None:
            config = PretrainedConfig.from_checkpoint(ckpt_dir)
        if rank is not None:
            config.set_rank(rank)
        model = cls(config)
        model.load(load_file(Path(ckpt_dir) / f"rank{config.mapping.rank}.safetensors"))
        return model

    def load(self, weights, from_pruned=False):
        """Fill the parameters by name.

        Raises:
            RuntimeError: a tensor is missing, or does not fit. A tensor too many is only logged.
        """
        parameters = dict(self.named_parameters())
        missing = {name for name, parameter in parameters.items() if not parameter.is_inited()} - set(weights)
        if missing:
            raise RuntimeError(f"Required but not provided tensors: {sorted(missing)}")
        surplus = set(weights) - set(parameters)
        if surplus:
            logger.warning("Provided but not expected tensors: %s", sorted(surplus))
        for name, parameter in parameters.items():
            if name in weights:
                try:
                    parameter.value = weights[name]
                except Exception as error:
                    raise RuntimeError(f"tensor {name!r} cannot be loaded: {error}") from error

    def prepare_inputs(self, *args, **kwargs):
        """TensorRT-LLM makes the engine's input tensors here, with the ranges of their sizes."""
        raise NotImplementedError("no engine can be built from the bundled definitions; name a TensorRT-LLM tree")


class DecoderModelForCausalLM(PretrainedModel):
    """A transformer and the matrix that turns its hidden states into logits."""

    def __init__(self, config, transformer, lm_head):
        super().__init__(config)
        self.transformer = transformer
        self.lm_head = lm_head

    def forward(
        self,
        input_ids,
        position_ids=None,
        use_cache=False,
        last_token_ids=None,
        attention_mask=None,
        kv_cache_params=None,
        attention_params=None,
        hidden_states=None,
        lora_params=None,
        spec_decoding_params=None,
    ):
        """Token ids [T] -> logits, one row [Vp] for each entry of last_token_ids, and the hidden states behind them.

        With a KV cache that is not paged, the updated cache stands between the two. A rank that is not the last of
        the pipeline returns hidden states only.
        """
        optional = {"hidden_states": hidden_states, "spec_decoding_params": spec_decoding_params}
        given = {name: value for name, value in optional.items() if value is not None}
        hidden_states = self.transformer.forward(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=use_cache,
            attention_mask=attention_mask,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
            **given,
        )
        presents = None
        if use_cache:
            hidden_states, presents = hidden_states
        plugin_config = default_net().plugin_config
        cache = () if not use_cache or plugin_config.paged_kv_cache else (presents,)

        if not self.config.mapping.is_last_pp_rank():
            hidden_states.mark_output("hidden_states_output", self.config.dtype)
            return (hidden_states, *cache) if cache else hidden_states
        hidden_states = gather_last_token_logits(hidden_states, last_token_ids, plugin_config.remove_input_padding)
        lm_logits = self.lm_head(hidden_states)
        lm_logits.mark_output("logits", self.config.logits_dtype)
        return (lm_logits, *cache, hidden_states)
