"""Every module imports without the heavy packages; what preflight loads also without torch and other slow ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HEAVY = ("tensorrt_llm", "tensorrt", "flashinfer", "playwright")
SLOW = (*HEAVY, "torch", "transformers", "safetensors.torch", "libcst", "matplotlib", "papermill", "nbconvert")
# What `porting-kit preflight` loads. A name stands for the module and everything below it.
PREFLIGHT = (
    "porting_kit.errors",
    "porting_kit.outcomes",
    "porting_kit.provenance",
    "porting_kit.port",
    "porting_kit.run_folder",
    "porting_kit.releases",
    "porting_kit.architectures",
    "porting_kit.source_tree",
    "porting_kit.conversion.config_fields",
    "porting_kit.conversion.head_layouts",
    "porting_kit.conversion.heads",
    "porting_kit.conversion.plan",
    "porting_kit.conversion.tensor_source",
    "porting_kit.conversion.weight_files",
    "porting_kit.medusa.tree",
    "porting_kit.medusa.choices",
    "porting_kit.medusa.named_trees",
    "porting_kit.medusa.tree_limits",
    "porting_kit.steps.preflight",
    "porting_kit.cli",
)

# Runs in a fresh interpreter: refuses the blocked packages, imports each module, prints the failures. Modules are found
# on the disk, so that a new one is tested unasked.
PROBE = """
import importlib, importlib.abc, json, pkgutil, sys
root, package_name, blocked, only = json.loads(sys.argv[1])
sys.path.insert(0, root)

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == item or name.startswith(item + ".") for item in blocked):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Refuse())
package = importlib.import_module(package_name)
names = [package_name, *(found.name for found in pkgutil.walk_packages(package.__path__, package_name + "."))]
names = [name for name in names if not name.endswith(".__main__")]
if only:
    names = [name for name in names if any(name == item or name.startswith(item + ".") for item in only)]
failures = {}
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"
print(json.dumps({"names": names, "failures": failures}))
"""


def probe_imports(
    root: Path, package: str, blocked: tuple[str, ...], only: tuple[str, ...] = ()
) -> tuple[list[str], dict[str, str]]:
    """Import the package's modules with packages blocked: the names tried, and what failed with which error."""
    argument = json.dumps([str(root), package, blocked, only])
    run = subprocess.run([sys.executable, "-c", PROBE, argument], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout.splitlines()[-1])
    return answer["names"], answer["failures"]


def test_every_module_imports_without_the_heavy_packages(root):
    names, failures = probe_imports(root, "porting_kit", HEAVY)
    assert failures == {}
    modules_on_disk = {path.stem for path in (root / "porting_kit").glob("*.py")} - {"__init__", "__main__"}
    assert {f"porting_kit.{stem}" for stem in modules_on_disk} <= set(names)


def test_preflight_imports_without_torch_and_transformers(root):
    names, failures = probe_imports(root, "porting_kit", SLOW, PREFLIGHT)
    assert failures == {}
    for needed in PREFLIGHT:
        assert needed in names, f"{needed} is gone: bring PREFLIGHT up to date"


def write_package(folder: Path, **modules: str) -> None:
    package = folder / "sample"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, source in modules.items():
        (package / f"{name}.py").write_text(source)


def test_a_heavy_import_at_the_top_of_a_module_is_found(tmp_path):
    write_package(
        tmp_path,
        sound="def run():\n    import flashinfer\n",
        broken="import flashinfer.decode\n",
        behind_another="from sample.broken import decode\n",
    )
    names, failures = probe_imports(tmp_path, "sample", HEAVY)
    assert set(names) == {"sample", "sample.sound", "sample.broken", "sample.behind_another"}
    assert set(failures) == {"sample.broken", "sample.behind_another"}
    assert "flashinfer is blocked" in failures["sample.broken"]
