"""Run a tree's own argument parser, without its package, TensorRT or a GPU: the check of what we read by parsing."""

from __future__ import annotations

import argparse
import ast
import ctypes
import os
import sys
import types
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from unittest import mock

from porting_kit.source_tree import SourceTree, open_source_tree


def upstream_trees() -> list[SourceTree]:
    """The trees named in TRTLLM_SOURCE (separated by colons) that have a build command."""
    roots = [Path(root) for root in os.environ.get("TRTLLM_SOURCE", "").split(os.pathsep) if root]
    return [open_source_tree(root) for root in roots if (root / "tensorrt_llm/commands/build.py").is_file()]


def parse_with_upstream(tree: SourceTree, arguments: list[str]) -> argparse.Namespace:
    """What the tree's own parse_arguments makes of a command line; SystemExit when it refuses."""
    with mock.patch.object(sys, "argv", ["trtllm-build", *arguments]):
        result = _load_parse_function(tree)()
        return result.parse_args() if isinstance(result, argparse.ArgumentParser) else result


@lru_cache(maxsize=8)
def _load_parse_function(tree: SourceTree) -> Callable[[], object]:
    source = (tree.package / "commands" / "build.py").read_text(encoding="utf-8")
    definition = next(
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "parse_arguments"
    )
    stand_in = mock.MagicMock()
    names = {
        "argparse": argparse,
        "add_plugin_argument": _load_plugin_module(tree)["add_plugin_argument"],
        "cluster_infos": {},
        "_cluster_infos": {},
        "severity_map": {"info": 0},
        "LoraManager": types.SimpleNamespace(LORA_MODULE_IDS={}),
        "KVCacheType": str,
        "enum_type": lambda enum: str,
        "BuildConfig": stand_in,
    }
    exec(compile(ast.Module([definition], []), str(tree.package), "exec", dont_inherit=True), names)
    return names["parse_arguments"]


def _load_plugin_module(tree: SourceTree) -> dict[str, object]:
    """The names of plugin/plugin.py, its imports of the package and of TensorRT replaced by stand-ins."""
    module = ast.parse((tree.package / "plugin" / "plugin.py").read_text(encoding="utf-8"))
    names: dict[str, object] = {"__name__": "upstream_plugin", "__file__": str(tree.package / "plugin" / "plugin.py")}
    kept = []
    for node in module.body:
        package_import = isinstance(node, ast.ImportFrom) and (
            node.level > 0 or (node.module or "").startswith("tensorrt_llm")
        )
        if package_import or (isinstance(node, ast.Import) and node.names[0].name == "tensorrt"):
            names |= {alias.asname or alias.name: mock.MagicMock() for alias in node.names}
        else:
            kept.append(node)
    names |= {"ctypes": ctypes}
    sys.modules["upstream_plugin"] = types.ModuleType("upstream_plugin")  # dataclasses look their module up
    try:
        exec(compile(ast.Module(kept, []), "plugin.py", "exec", dont_inherit=True), names)
    finally:
        del sys.modules["upstream_plugin"]
    return names
