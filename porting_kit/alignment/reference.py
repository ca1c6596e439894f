"""The base model as Hugging Face computes it: loading it safely, its greedy settings, its logits.

Nothing is downloaded (`local_files_only`) and no code from the model folder runs unless that is asked for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from porting_kit.alignment.generation_settings import GenerationSettings, read_settings
from porting_kit.alignment.gguf_settings import find_settings, load_tokenizer, without_progress_bars
from porting_kit.errors import BaseModelError, EnvironmentMissing

_SDPA_ONLY = {"falcon": "transformers' eager Falcon attention adds the ALiBi bias twice (modeling_falcon.py, 5.24)"}


class LogitsSource(Protocol):
    """Anything that judges tokens: next-token logits at every position of given texts."""

    @property
    def vocab_size(self) -> int:
        """V."""

    def logits(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """float [S, V] per text, padding columns removed."""


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Reference:
    """A Hugging Face causal model in evaluation mode.

    Args:
        model: the model; run with `logits`.
        settings: the greedy settings.
        tokenizer: None when the folder has none.
        attention: attention implementation and why it was chosen.
        where: folder or file it came from.
    """

    model: Any
    settings: GenerationSettings
    tokenizer: Any = None
    attention: str = ""
    where: str = ""

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in."""
        return next(self.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.model.parameters()).device

    @torch.inference_mode()
    def logits(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Next-token logits after every token of each text, [S, V] in the model's dtype; each text runs on its own."""
        return [self.run(text).logits[0, :, : self.vocab_size] for text in texts]

    def hidden_states(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """What the output matrix reads at every token of each text, [S, E]: the input of Medusa heads."""
        return [self.read(text)[1] for text in texts]

    @torch.inference_mode()
    def read(self, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Both of one text from one pass: logits [S, V] and hidden states [S, E]."""
        seen: list[torch.Tensor] = []
        reader = find_projection(self.model) or self.model.get_output_embeddings()
        handle = reader.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0]))
        try:
            logits = self.run(text).logits[0, :, : self.vocab_size]
        finally:
            handle.remove()
        return logits, seen[0]

    @property
    def chooses_experts(self) -> bool:
        """Whether some of its layers send each token to a few experts only."""
        config = self.model.config.get_text_config()
        holders = (config, getattr(config, "ffn_config", None))
        return any((getattr(holder, name, None) or 0) > 1 for holder in holders for name in EXPERT_COUNTS)

    @property
    def output_matrix(self) -> torch.Tensor:
        """From `hidden_states` to logits, [V, E]."""
        matrix, projection = self.model.get_output_embeddings().weight.detach(), find_projection(self.model)
        return matrix if projection is None else matrix @ projection.weight.detach()

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Hugging Face's own greedy loop with `settings`, one prompt at a time, up to and with the first end id."""
        from transformers import GenerationConfig

        end_ids = list(self.settings.end_ids) or None
        config = GenerationConfig(
            max_new_tokens=max_new_tokens, eos_token_id=end_ids, pad_token_id=0, do_sample=False, num_beams=1
        )
        # transformers fills what a given config leaves unset from the model's own, so that is replaced as well.
        own, self.model.generation_config = self.model.generation_config, config
        try:
            texts = [self._tokens(prompt) for prompt in prompts]
            rows = [
                self.model.generate(text, attention_mask=torch.ones_like(text), generation_config=config)
                for text in texts
            ]
        finally:
            self.model.generation_config = own
        return [row[0, len(prompt) :].tolist() for row, prompt in zip(rows, prompts, strict=True)]

    def _tokens(self, text: Sequence[int]) -> torch.Tensor:
        return torch.as_tensor(text, dtype=torch.long, device=self.device)[None]

    @torch.inference_mode()
    def run(self, text: Sequence[int], *, use_cache: bool = False) -> Any:
        """One forward pass over one text: the model's own output, with its cache when asked for."""
        return self.model(input_ids=self._tokens(text), use_cache=use_cache)


def find_projection(model: Any) -> Any | None:
    """OPT-350m's projection of the last state to the width of its embeddings; None where a model has none.

    A port multiplies it into the output matrix, so that Medusa heads read the state before it.
    """
    decoder = getattr(getattr(model, "model", None), "decoder", None)
    return getattr(decoder, "project_out", None)


def cached_keys(output: Any) -> dict[int, torch.Tensor]:
    """Layer -> its keys as the cache of a forward pass holds them, float64 [S, K*D]; empty without a cache."""
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        return {}
    if hasattr(cache, "layers"):  # transformers 5
        keys = [getattr(layer, "keys", None) for layer in cache.layers]
    else:
        keys = getattr(cache, "key_cache", None) or [layer[0] for layer in cache]
    usable = {index: tensor for index, tensor in enumerate(keys) if tensor is not None and tensor.dim() == 4}
    return {index: tensor[0].transpose(0, 1).flatten(1).double() for index, tensor in usable.items()}


def load_reference(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    attention: str | None = None,
) -> Reference:
    """Load a base model from disk.

    Args:
        path: a model folder, or a GGUF file.
        dtype: what to compute in; float32 unless the comparison is about a half precision.
        device: where.
        trust_remote_code: run Python code that the folder brings along.
        attention: `eager` or `sdpa`; None chooses: eager, except where transformers' eager path is known to be wrong.

    Raises:
        BaseModelError: transformers cannot load it.
        EnvironmentMissing: a GGUF file without the gguf extra.
    """
    path = Path(path).expanduser()
    where, options = _location(path)
    options |= {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        with without_progress_bars():
            config, model_class = _read_config(where, options)
            chosen, reason = choose_attention(config.model_type, attention)
            model = model_class.from_pretrained(
                where, config=config, attn_implementation=chosen, **_dtype_option(resolve_dtype(dtype)), **options
            )
    except ImportError as error:
        raise EnvironmentMissing(
            "The base model needs a package that is missing",
            expected="every package that the model's own code imports",
            found=error,
            where=path,
            next_step="install the package that the error names",
        ) from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BaseModelError(
            "transformers cannot load the base model",
            expected="a complete causal language model on disk",
            found=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            where=path,
            next_step="Load it with AutoModelForCausalLM first; pass trust_remote_code if it brings code of its own.",
        ) from error
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    model = model.to(device).eval().requires_grad_(False)
    return reference_from_model(model, tokenizer=tokenizer, attention=f"{chosen}: {reason}", where=str(path))


def _unreadable_config(error: Exception, path: str | Path) -> BaseModelError:
    return BaseModelError(
        "transformers cannot read the base model's config",
        expected="a config.json that this transformers reads",
        found=error,
        where=path,
        next_step="correct config.json, or install the transformers that the model asks for",
    )


def read_base_config(path: str | Path) -> tuple[Any, Any]:
    """The base's config as transformers reads it, and the class of its model.

    Raises:
        BaseModelError: transformers cannot read it.
    """
    where, options = _location(Path(path).expanduser())
    try:
        return _read_config(where, options | {"local_files_only": True, "trust_remote_code": False})
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise _unreadable_config(error, path) from error


def read_reference_settings(path: str | Path) -> tuple[GenerationSettings, Any]:
    """The settings a base would be compared with, and its tokenizer (None without one); reads no weights.

    Raises:
        BaseModelError: transformers cannot read the config.
    """
    from transformers import GenerationConfig

    path = Path(path).expanduser()
    where, options = _settings_location(path)
    options |= {"local_files_only": True, "trust_remote_code": False}
    try:
        with without_progress_bars():
            config, _ = _read_config(where, options)
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise _unreadable_config(error, path) from error
    generation_config = None
    with contextlib.suppress(OSError, ValueError):
        generation_config = GenerationConfig.from_pretrained(_location(path)[0], local_files_only=True)
    tokenizer = load_tokenizer(path)
    return read_settings(config, generation_config, tokenizer), tokenizer


def _read_config(where: str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The config and the class to load: by `model_type`, and where that is a house name, by `architectures`."""
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(where, **options), transformers.AutoModelForCausalLM
    except (ValueError, KeyError):
        file = Path(where) / "config.json"
        names = json.loads(file.read_text(encoding="utf-8")).get("architectures") if file.is_file() else None
        model_class = getattr(transformers, str((names or [""])[0]), None)
        if model_class is None:
            raise
        return model_class.config_class.from_pretrained(where, **options), model_class


def reference_from_model(model: Any, *, tokenizer: Any = None, attention: str = "", where: str = "") -> Reference:
    """Wrap a model that is already in memory."""
    settings = read_settings(model.config, getattr(model, "generation_config", None), tokenizer)
    if hasattr(model, "set_experts_implementation"):  # transformers 5: its grouped product takes no float64
        model.set_experts_implementation("eager")
    return Reference(model.eval(), settings, tokenizer, attention or model.config._attn_implementation, where)


def choose_attention(model_type: str, asked: str | None = None) -> tuple[str, str]:
    """Attention implementation and the reason. Eager is the plain formula; some families' eager path is wrong."""
    if asked is not None:
        return asked, "asked for"
    if model_type in _SDPA_ONLY:
        return "sdpa", _SDPA_ONLY[model_type]
    return "eager", "the plain formula"


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """`float32`, `float16`, `bfloat16` or `float64` to torch's dtype.

    Raises:
        BaseModelError: no such floating-point dtype.
    """
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise BaseModelError(
            "Unknown dtype",
            expected="float32, float16, bfloat16 or float64",
            found=dtype,
            next_step="set dtype to one of them",
        )
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """`float16` for torch.float16."""
    return str(dtype).removeprefix("torch.")


def _dtype_option(dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """transformers renamed `torch_dtype` to `dtype` in 4.56."""
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return {"dtype" if (major, minor) >= (4, 56) else "torch_dtype": dtype}


def _location(path: Path) -> tuple[str, dict[str, Any]]:
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        return str(path), {}
    raise BaseModelError(
        "The base model is not there",
        expected="a model folder or a .gguf file",
        found="another file" if path.is_file() else "no such file or folder",
        where=path,
        next_step="correct base in the port file, or fetch the model",
    )


def _settings_location(path: Path) -> tuple[str, dict[str, Any]]:
    """Where the config is read from: for a GGUF file what was taken out of it, if that could be kept."""
    where, options = _location(path)
    settings = find_settings(path) if "gguf_file" in options else None
    return (where, options) if settings is None else (str(settings), {})
