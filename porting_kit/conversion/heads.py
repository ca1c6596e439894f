"""Medusa heads as one set of tensors, whatever project wrote them.

The layout, the number of heads M and of residual layers R are read from the tensors; the config beside them is only
compared, because published configs are often stale. Values are read on demand; `check_values` looks at them. This
module does not decide whether heads are any good (an offline acceptance check does that).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from porting_kit.architectures.base_config import name_base
from porting_kit.conversion.head_files import BASE_KEYS, COUNT_KEYS, LAYER_KEYS, open_heads
from porting_kit.conversion.head_layouts import HeadNames, match_layout
from porting_kit.conversion.tensor_source import TensorSource
from porting_kit.errors import HeadsError, format_count

if TYPE_CHECKING:
    import torch

    from porting_kit.architectures.base_config import BaseConfig

MISSING_SHOWN = 10
GGUF_KIND = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)
"""How a GGUF file's name ends that says what its weights are stored as."""
HEAD_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class HeadSet:
    """Heads found in a file. M heads of R residual layers on hidden size E, vocabulary V.

    Args:
        layout: name of the layout.
        num_heads: heads in use (M).
        found_heads: heads in the file.
        num_layers: residual layers per head (R).
        hidden_size: E of the heads.
        vocab_size: rows of the heads' own output matrices; None when they use the base's.
        dtype: dtype of the file's tensors, as torch names it.
        origins: `medusa_heads...` name -> name in the file; None for a bias that the file lacks (zeros).
        warnings: what the user should know.
        stated: counts and base name that the config beside the file states.
        where: the file or folder read.
    """

    layout: str
    num_heads: int
    found_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int | None
    dtype: str
    origins: dict[str, str | None]
    warnings: tuple[str, ...]
    stated: dict[str, Any]
    where: Path
    source: TensorSource = field(repr=False, compare=False)

    @property
    def own_output(self) -> bool:
        """Whether the heads bring output matrices of their own (else the base's is copied)."""
        return self.vocab_size is not None

    @property
    def ignored_names(self) -> tuple[str, ...]:
        """Names in the file that belong to heads not in use."""
        used = {name for name in self.origins.values() if name is not None}
        return tuple(name for name in self.source.names() if name not in used)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a `medusa_heads...` tensor."""
        origin = self.origins[name]
        return (self.hidden_size,) if origin is None else self.source.shape(origin)

    def read(self, name: str) -> torch.Tensor:
        """Values of a `medusa_heads...` tensor in the file's dtype; zeros for a bias that the file lacks."""
        import torch

        origin = self.origins[name]
        if origin is None:
            return torch.zeros(self.hidden_size, dtype=getattr(torch, self.dtype))
        return self.source.read(origin)

    def compare_base(self, base: BaseConfig) -> tuple[str, ...]:
        """A warning when the heads' config names another base than this one, judged by the last part of the names."""
        stated = str(self.stated.get("base_model_name_or_path") or "")
        given = Path(base.where) if base.where.endswith(".gguf") else Path(base.where).parent
        names = {name_base(given), str(base.raw.get("_name_or_path") or "").rstrip("/").split("/")[-1]}
        if given.suffix == ".gguf":
            names |= {given.parent.name, GGUF_KIND.sub("", given.stem)}
        elif given.name == "base":  # says what it is to its port; which one, the folder around it says
            names.add(given.parent.name)
        if not stated or stated.rstrip("/").split("/")[-1].lower() in {name.lower() for name in names}:
            return ()
        return (f"the heads' config names the base {stated}; the one given is {given}",)

    def check_against(self, base: BaseConfig) -> None:
        """Raise HeadsError when the heads cannot sit on this base: hidden size or vocabulary differ."""
        if self.hidden_size != base.hidden_size:
            raise HeadsError(
                "the heads do not fit this base: another hidden size",
                expected=f"{base.hidden_size} (the base)",
                found=f"{self.hidden_size} (the heads)",
                where=self.where,
                next_step="use the heads that were trained on this base",
            )
        if self.vocab_size is not None and self.vocab_size != base.vocab_size:
            smaller, larger = sorted((self.vocab_size, base.vocab_size))
            odd = "the heads lack" if self.vocab_size == smaller else "the base lacks"
            raise HeadsError(
                "the heads and the base have different vocabularies",
                expected=f"{base.vocab_size} rows (the base)",
                found=f"{self.vocab_size} rows (the heads)",
                where=self.where,
                next_step=f"{odd} {larger - smaller} rows: train the heads on this base, "
                "or add rows for the new tokens to the smaller file",
            )

    def check_values(self) -> tuple[str, ...]:
        """Read all values once. Returns warnings (untrained or doubled heads).

        Raises:
            HeadsError: a tensor is not finite, or an output matrix is all zero.
        """
        import torch

        warnings: list[str] = []
        digests: dict[object, int] = {}
        for head in range(self.num_heads):
            names = [name for name in self.origins if name.startswith(f"medusa_heads.{head}.")]
            tensors = {name: self.read(name) for name in names}
            for name, tensor in tensors.items():
                if not bool(torch.isfinite(tensor).all()):
                    raise HeadsError(
                        "a head tensor is not finite",
                        expected="finite values",
                        found=f"{int((~torch.isfinite(tensor)).sum())} values are inf or nan",
                        where=f"{self.where}: {self.origins[name]}",
                        next_step="the heads were saved from a run that diverged; take an earlier checkpoint",
                    )
                if name.endswith("lm_head.weight") and not bool(tensor.any()):
                    raise HeadsError(
                        f"the output matrix of head {head + 1} is all zero",
                        expected="a trained matrix",
                        found="zeros alone",
                        where=f"{self.where}: {self.origins[name]}",
                        next_step="the head was never written; save the heads again",
                    )
            weights = [tensor for name, tensor in tensors.items() if name.endswith("linear.weight")]
            if not any(bool(weight.any()) for weight in weights):
                warnings.append(f"head {head + 1}: its residual layers are all zero, as before training")
            digest = tuple(_digest(tensors[name]) for name in sorted(names, key=lambda n: n.split(".", 2)[2]))
            if digest in digests:
                warnings.append(f"heads {digests[digest] + 1} and {head + 1} are identical")
            digests.setdefault(digest, head)
        return tuple(warnings)


def _digest(tensor: torch.Tensor) -> str:
    import hashlib

    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def read_head_set(path: str | Path, *, use: int | None = None, check_values: bool = True) -> HeadSet:
    """Read Medusa heads.

    Args:
        path: the head file, its folder, or a model with merged heads.
        use: how many heads to use, from the first; None uses all.
        check_values: read all values and refuse what is not finite. False reads headers only and needs no torch.

    Raises:
        HeadsError: no heads, an unknown layout, gaps between heads or layers, a bias without its weight, heads that are
            not alike, a reduced vocabulary, shapes that do not
            belong together, tensors that are not in floating point, more heads asked for than exist, two files that
            disagree, values that are not finite.
    """
    path = Path(path)
    source, config = open_heads(path)
    names = match_layout(source.names(), path)
    names, shares_base = _take_original_matrix(names, config)
    num_found, num_layers = _count(names, path)
    if use is not None and not 1 <= use <= num_found:
        raise HeadsError(
            f"{use} heads were asked for",
            expected=f"1 to {num_found}",
            found=f"{format_count(num_found, 'head')} in the file",
            where=path,
            next_step=f"ask for at most {format_count(num_found, 'head')}",
        )
    _refuse_reduced_vocabulary(names, config, source, path)
    num_heads = num_found if use is None else use
    origins, hidden_size, vocab_size = _collect(names, source, num_heads, num_layers, path)
    if names.layout.inside_base:
        config = {key: value for key, value in config.items() if key not in BASE_KEYS}
    warnings = _compare_config(config, num_found, num_layers, num_heads)
    if shares_base:
        warnings.append("the config says that the heads use the base's output matrix; the file's copy of it is left")
    if len(set(names.weights.values())) < len(names.weights):
        warnings.append(f"each head uses one residual block {num_layers} times")
    if not names.biases:
        warnings.append(f"{num_heads * num_layers} residual layers have no bias; zeros are written")
    if "lm_head.weight" in names.extras:
        warnings.append("the file's lm_head.weight is the base's output matrix and is left; the base's own is used")
    if vocab_size is None:
        warnings.append("the heads have no output matrix of their own; the base's is copied into each")
    heads = HeadSet(
        layout=names.layout.name,
        num_heads=num_heads,
        found_heads=num_found,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        dtype=source.dtype(next(iter(names.weights.values()))),
        origins=origins,
        warnings=tuple(warnings),
        stated=config,
        where=path,
        source=source,
    )
    if not check_values:
        return heads
    return HeadSet(**{**heads.__dict__, "warnings": heads.warnings + heads.check_values()})


def _take_original_matrix(names: HeadNames, config: dict[str, Any]) -> tuple[HeadNames, bool]:
    """vLLM's `original_lm_head`: the first head's matrix, if any, is a copy of the base's and serves every head."""
    if not config.get("original_lm_head") or set(names.outputs) - {0}:
        return names, False
    return replace(names, outputs={}), bool(names.outputs)


def _count(names: HeadNames, where: Path) -> tuple[int, int]:
    heads = sorted({head for head, _ in names.weights})
    if not heads:
        raise HeadsError(
            "the file holds output matrices but no residual layers",
            expected="residual layers beside each output matrix",
            where=where,
            items=names.outputs.values(),
            next_step="name the file that holds the whole heads",
        )
    _pair_biases(names, where)
    if heads != list(range(len(heads))):
        missing = list(islice((head for head in range(max(heads)) if head not in heads), MISSING_SHOWN))
        raise HeadsError(
            "the heads are not numbered without gaps",
            expected=f"numbers 0 to {max(heads)} in the tensors' names",
            found=f"{heads}; missing {missing}",
            where=where,
            next_step="the file is incomplete, or heads were removed: renumber them or fetch it again",
        )
    layers = {head: sorted(layer for h, layer in names.weights if h == head) for head in heads}
    uneven = {head: found for head, found in layers.items() if found != list(range(len(layers[0])))}
    if uneven:
        raise HeadsError(
            "the heads do not all have the same residual layers",
            expected=f"layers 0 to {len(layers[0]) - 1} in every head",
            found=", ".join(f"head {head + 1}: {found}" for head, found in uneven.items()),
            where=where,
            next_step="save the heads again, all with the same layers",
        )
    if names.outputs and set(names.outputs) != set(heads):
        raise HeadsError(
            "some heads have an output matrix of their own and some have none",
            expected=f"one in each of the {len(heads)} heads, or in none",
            found=f"heads {[head + 1 for head in sorted(names.outputs)]} have one",
            where=where,
            next_step="save the heads again, all with an output matrix or all without",
        )
    return len(heads), len(layers[0])


def _pair_biases(names: HeadNames, where: Path) -> None:
    """Every bias needs its weight, and either all residual layers have a bias or none has."""
    if lone := sorted(name for place, name in names.biases.items() if place not in names.weights):
        raise HeadsError(
            f"{len(lone)} biases of the heads have no weight beside them",
            expected=f"{names.layout.weight} for each {names.layout.bias}",
            found="the biases alone",
            where=where,
            items=lone,
            next_step="fetch the file or save the heads again, or remove what is not part of the heads",
        )
    bare = list(dict.fromkeys(name for place, name in names.weights.items() if place not in names.biases))
    if names.biases and bare:
        raise HeadsError(
            "some residual layers have a bias and some have none",
            expected=f"{names.layout.bias} for each {names.layout.weight}, or for none",
            found=f"{len(bare)} of {len(set(names.weights.values()))} without one",
            where=where,
            items=sorted(bare),
            next_step="the file is incomplete: fetch it or save the heads again",
        )


def _refuse_reduced_vocabulary(names: HeadNames, config: dict[str, Any], source: TensorSource, where: Path) -> None:
    truncated, full = config.get("truncated_vocab_size"), config.get("vocab_size")
    if "token_map" in names.extras or (truncated is not None and full is not None and truncated < full):
        rows = source.shape("token_map")[0] if "token_map" in names.extras else truncated
        raise HeadsError(
            "the heads predict a reduced vocabulary, which TensorRT-LLM's Medusa cannot express",
            expected="output matrices with one row per token of the base",
            found=f"a token map of {rows} tokens",
            where=where,
            next_step="train heads with the full vocabulary, or export them without the token map",
        )


def _collect(
    names: HeadNames, source: TensorSource, num_heads: int, num_layers: int, where: Path
) -> tuple[dict[str, str | None], int, int | None]:
    flat = [name for name in (*names.weights.values(), *names.outputs.values()) if len(source.shape(name)) != 2]
    if flat:
        raise HeadsError(
            "weights of the heads are no matrices",
            expected="weights of two dimensions",
            where=where,
            items=sorted(flat),
            next_step="save the heads again",
        )
    unlike = [name for name in (*names.weights.values(), *names.biases.values(), *names.outputs.values())
              if source.dtype(name) not in HEAD_DTYPES]  # fmt: skip
    if unlike:
        raise HeadsError(
            "tensors of the heads are not in floating point",
            expected=f"one of {list(HEAD_DTYPES)}",
            found=", ".join(sorted({source.dtype(name) for name in unlike})),
            where=where,
            items=sorted(unlike),
            next_step="the heads are quantised or damaged: save them in 16 or 32 bit",
        )
    hidden_size = source.shape(names.weights[0, 0])[-1]
    vocab_size = source.shape(names.outputs[0])[0] if names.outputs else None
    origins: dict[str, str | None] = {}
    wrong: list[str] = []

    def expect(target: str, origin: str | None, shape: tuple[int, ...]) -> None:
        origins[target] = origin
        if origin is not None and source.shape(origin) != shape:
            wrong.append(f"{origin} {list(source.shape(origin))} instead of {list(shape)}")

    for head in range(num_heads):
        for layer in range(num_layers):
            prefix = f"medusa_heads.{head}.medusa_layers.{layer}.linear"
            expect(f"{prefix}.weight", names.weights[head, layer], (hidden_size, hidden_size))
            expect(f"{prefix}.bias", names.biases.get((head, layer)), (hidden_size,))
        if vocab_size is not None:
            expect(f"medusa_heads.{head}.lm_head.weight", names.outputs[head], (vocab_size, hidden_size))
    if wrong:
        raise HeadsError(
            "the shapes of the heads do not belong together",
            expected="one hidden size and one vocabulary in all heads",
            where=where,
            items=wrong,
            next_step="save the heads again, or name heads of one base",
        )
    return origins, hidden_size, vocab_size


def _compare_config(config: dict[str, Any], num_found: int, num_layers: int, num_heads: int) -> list[str]:
    warnings = []
    for keys, count, noun in ((COUNT_KEYS, num_found, "heads"), (LAYER_KEYS, num_layers, "residual layers a head")):
        stated = next((config[key] for key in keys if config.get(key) is not None), None)
        if stated is not None and stated != count:
            warnings.append(f"the config says {stated} {noun}, the file holds {count}; the file counts")
    if num_heads < num_found:
        warnings.append(f"{num_heads} of {num_found} heads are used")
    return warnings
