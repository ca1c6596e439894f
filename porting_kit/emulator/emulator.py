"""Open a source tree and build its models: the entry of the emulator."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from porting_kit.emulator.collectives import connect_ranks
from porting_kit.emulator.kernel_view import KernelView
from porting_kit.emulator.model import EmulatedModel
from porting_kit.emulator.namespace import Namespace
from porting_kit.emulator.tensorrt_types import TORCH_DTYPE_OF_NAME, TORCH_DTYPES
from porting_kit.errors import CheckpointError, EmulatorError
from porting_kit.whole_files import read_json


def open_emulator(tree: Any, *, kernel: Any = None, device: str | torch.device = "cpu") -> Emulator:
    """Prepare a tree's own Python to run in PyTorch.

    The tree's code is executed: open only trees that you trust.

    Args:
        tree: a SourceTree (its `root` holds the package folder tensorrt_llm).
        kernel: a KernelProfile; None is exact arithmetic.
        device: "cpu", "cuda", or a torch device.
    """
    return Emulator(tree, kernel=kernel, device=torch.device(device))


class Emulator:
    """A source tree whose models run in PyTorch.

    Attributes:
        namespace: the tree's modules; `namespace.import_module("tensorrt_llm.models.falcon.convert")` gives upstream's
            own converter.
    """

    def __init__(self, tree: Any, *, kernel: Any, device: torch.device) -> None:
        self.tree = tree
        self.kernel = kernel
        self.device = device
        self.namespace = Namespace(Path(tree.root))

    def build_model(
        self,
        config: dict[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        module_source: str | None = None,
        class_name: str | None = None,
        dtype: str | None = None,
        rank: int = 0,
    ) -> EmulatedModel:
        """Build a model from a checkpoint's config and tensors in memory.

        Args:
            config: content of config.json; it is copied, not changed.
            tensors: name -> tensor of this rank; used as they are, without a copy, when type and device fit.
            module_source: text of a model module that takes the place of MODEL_MAP's class (a patched model).
            class_name: class in it; required with module_source.
            dtype: run in this type instead of the config's; "float64" is there for checks.
            rank: rank of a sharded checkpoint.

        Raises:
            RuntimeError: the library's own errors for missing tensors and wrong shapes.
            CheckpointError: tensors that the model does not take, or of another type than the config states.
        """
        model_class = None
        if module_source is not None:
            model_class = find_class(self.namespace.load_source(module_source), class_name, "module_source")
        return self._build(config, tensors, model_class, dtype, rank)

    def load_checkpoint(
        self,
        folder: Path,
        *,
        module_file: Path | None = None,
        class_name: str | None = None,
        dtype: str | None = None,
        rank: int = 0,
    ) -> EmulatedModel:
        """Load a checkpoint folder, as trtllm-build does.

        Args:
            folder: holds config.json and rank*.safetensors.
            module_file: a file loaded the way trtllm-build loads --model_cls_file; config.json keeps the base's
                architecture.
            class_name: class in it (--model_cls_name).
            dtype: as in build_model.
            rank: which rank of a sharded checkpoint.

        Raises:
            CheckpointError: a file is missing or damaged.
            EmulatorError: the module file cannot be executed, or lacks the class.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        files = {"config": folder / "config.json", "weights": folder / f"rank{rank}.safetensors"}
        for file in files.values():
            if not file.is_file():
                raise CheckpointError(
                    "a checkpoint file is missing",
                    expected=file.name,
                    found=", ".join(sorted(path.name for path in folder.glob("*"))) or "nothing",
                    where=folder,
                    next_step="convert the checkpoint again",
                )
        try:
            config = read_json(files["config"])
            tensors = load_file(files["weights"])
        except (ValueError, OSError, SafetensorError) as error:
            raise CheckpointError(
                "a checkpoint file is damaged",
                expected="a JSON config and a safetensors file",
                found=error,
                where=folder,
                next_step="convert the checkpoint again",
            ) from error
        model_class = None
        if module_file is not None:
            model_class = find_class(self.namespace.load_file(Path(module_file)), class_name, module_file)
        return self._build(config, tensors, model_class, dtype, rank)

    def find_model_class(self, architecture: str) -> Any:
        """The class that MODEL_MAP gives an architecture.

        Raises:
            EmulatorError: the tree does not know the architecture.
        """
        models = self.namespace.import_module("tensorrt_llm.models")
        if architecture not in models.MODEL_MAP:
            raise EmulatorError(
                f"the source tree has no architecture {architecture!r}",
                expected="a key of MODEL_MAP",
                found=architecture,
                where=models.__file__,
                items=sorted(models.MODEL_MAP),
                next_step="keep the base's own architecture name in config.json",
            )
        return models.MODEL_MAP[architecture]

    def _build(
        self,
        config: dict[str, Any],
        tensors: Mapping[str, torch.Tensor],
        model_class: Any,
        dtype: str | None,
        rank: int,
    ) -> EmulatedModel:
        config = copy.deepcopy(dict(config))
        torch_dtype, config["dtype"] = read_dtype(dtype or str(config.get("dtype", "float16")))
        default_class = self.find_model_class(str(config.get("architecture")))
        utils = self.namespace.import_module("tensorrt_llm.models.modeling_utils")
        # Releases before 0.11 take keys out of the dict they are given.
        own_config = utils.PretrainedConfig.from_dict(copy.deepcopy(config))
        if rank or own_config.mapping.world_size > 1:
            own_config.set_rank(rank)
        connect_ranks(own_config.mapping.world_size, self.device)
        self.namespace.network.plugin_config.gpt_attention_plugin = config["dtype"]
        self.namespace.network.plugin_config.moe_plugin = config["dtype"]
        module = (model_class or default_class)(own_config)
        if getattr(own_config, "use_parallel_embedding", False) and hasattr(utils, "load_model"):
            # Before 0.11 it is load_model, not the class, that splits the embedding (0.10.0.dev2024043000). What it
            # shares it would hold once; the checkpoint holds it twice, and both are loaded here.
            module = utils.optimize_model(module, use_parallel_embedding=True)
        self._load(module, tensors, torch_dtype, is_cast=dtype is not None)
        return EmulatedModel(
            self.namespace,
            module,
            config,
            kernel=KernelView.of(self.kernel, config),
            dtype=torch_dtype,
            device=self.device,
        )

    def _load(
        self, module: Any, tensors: Mapping[str, torch.Tensor], torch_dtype: torch.dtype, *, is_cast: bool
    ) -> None:
        """Load tensors through the release's own PretrainedModel.load, and place them."""
        parameters = dict(module.named_parameters())
        is_double = torch_dtype is torch.float64
        prepared: dict[str, torch.Tensor] = {}
        wrong_types = []
        for name, tensor in tensors.items():
            parameter = parameters.get(name)
            if parameter is None:
                prepared[name] = tensor
                continue
            wanted = TORCH_DTYPES[parameter.dtype]
            wanted = torch.float64 if is_double and wanted is torch.float32 else wanted
            if tensor.dtype is not wanted and not is_cast:
                wrong_types.append(f"{name}: {tensor.dtype}, config says {wanted}")
            prepared[name] = tensor.to(self.device, wanted)
        surplus = [name for name in tensors if name not in parameters]
        if surplus:
            raise CheckpointError(
                "the checkpoint has tensors that the model does not take",
                expected=f"{len(parameters)} parameters of {type(module).__name__}",
                found=f"{len(surplus)} more",
                items=sorted(surplus),
                next_step="TensorRT-LLM ignores them with a warning, so a wrong name hides here: convert again",
            )
        if wrong_types:
            raise CheckpointError(
                "tensors have another type than the checkpoint's config states",
                expected="one type throughout",
                items=wrong_types,
                next_step="convert again, or pass dtype to run in another type",
            )
        # The library's own checks of names and shapes. Architectures in its WEIGHT_LOADER_MODELS are loaded by slicing
        # whole tensors per rank; load does that too.
        module.load(prepared)
        placed: dict[int, torch.Tensor] = {}
        for parameter in parameters.values():
            parameter.move_to(self.device, is_double, placed)


def read_dtype(name: str) -> tuple[torch.dtype, str]:
    """(torch type of the run, the word for it that the release's own tables know)."""
    if name not in TORCH_DTYPE_OF_NAME or not TORCH_DTYPE_OF_NAME[name].is_floating_point or name == "fp8":
        raise EmulatorError(
            f"the emulator cannot run in {name!r}",
            expected="float16, bfloat16, float32 or float64",
            found=name,
            next_step="set dtype to one of them",
        )
    return TORCH_DTYPE_OF_NAME[name], "float32" if name == "float64" else name


def find_class(module: Any, class_name: str | None, where: object) -> Any:
    """A class of a module that was loaded as --model_cls_file."""
    if class_name is None or not isinstance(getattr(module, class_name, None), type):
        raise EmulatorError(
            "the model module has no such class",
            expected="class_name, the name of a class in the module",
            found=class_name,
            where=where,
            items=[name for name, value in vars(module).items() if isinstance(value, type)],
            next_step="give the class that trtllm-build would get as --model_cls_name",
        )
    return getattr(module, class_name)
