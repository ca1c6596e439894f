"""Write the capture script into a run folder: one file with the port's prompts and tree in it.

The script's three modules are joined into one, because what travels to the build machine must need nothing of this
package. Names must therefore differ between them; joining checks that.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from porting_kit.engine import capture_evidence, capture_runtimes, capture_script
from porting_kit.engine.capture_evidence import digest_file
from porting_kit.errors import CapturedFileError

SCRIPT_NAME = "capture.py"
CAPTURED_NAME = "captured.npz"
NO_END_ID = -1
PARTS = (capture_evidence, capture_runtimes)
PLACE_OF_REQUEST = "REQUEST: dict = {}\n"


def make_request(
    *,
    port: str,
    release: str,
    prompts: Sequence[Sequence[int]],
    groups: Mapping[int, Sequence[Sequence[int]]],
    new_tokens: int,
    choices: Sequence[Sequence[int]],
    end_ids: Sequence[int],
    pad_id: int | None,
    vocab_size: int,
    num_heads: int,
    max_draft_len: int,
    world_size: int,
    checkpoint: str,
) -> dict[str, Any]:
    """What the script is to run, JSON-ready.

    Args:
        port: the port's name.
        release: the release the build is planned for.
        prompts: token ids.
        groups: batch size -> calls, each the numbers of its prompts; a prompt may stand in a call twice.
        new_tokens: tokens each prompt may emit.
        choices: the tree, every node listed.
        end_ids: every end id; the runtime takes the first, -1 when there is none.
        pad_id: fills short prompts; the first end id when None.
        vocab_size: V.
        num_heads: M.
        max_draft_len: what the engine is built for.
        world_size: ranks.
        checkpoint: from `digest_checkpoint`.

    Raises:
        CapturedFileError: no prompt, an empty one, or a call with a prompt that does not exist.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise CapturedFileError(
            "there is an empty prompt",
            expected="at least one token in each of at least one",
            found=f"{len(prompts)} prompts, {sum(not len(prompt) for prompt in prompts)} of them empty",
            next_step="correct alignment.prompts",
        )
    calls = [index for group in groups.values() for call in group for index in call]
    if not calls or not 0 <= min(calls) <= max(calls) < len(prompts):
        raise CapturedFileError(
            "a call names a prompt that does not exist",
            expected=f"0 to {len(prompts) - 1}",
            found="none" if not calls else f"{min(calls)} to {max(calls)}",
            next_step="group prompts by their own numbers",
        )
    end_id = end_ids[0] if end_ids else NO_END_ID
    return {
        "port": port,
        "release": release,
        "prompts": [[int(token) for token in prompt] for prompt in prompts],
        "groups": {str(size): [list(call) for call in calls] for size, calls in sorted(groups.items())},
        "new_tokens": new_tokens,
        "medusa_choices": [[int(rank) for rank in path] for path in choices],
        "end_id": end_id,
        "end_ids": list(end_ids),
        "pad_id": max(end_id, 0) if pad_id is None else pad_id,
        "vocab_size": vocab_size,
        "num_medusa_heads": num_heads,
        "max_draft_len": max_draft_len,
        "world_size": world_size,
        "checkpoint": checkpoint,
    }


def fill_batch(group: Sequence[int], size: int) -> list[int]:
    """One call of exactly `size` prompts: the group's own, again from the front when there are too few."""
    return [group[place % len(group)] for place in range(size)]


def digest_checkpoint(folder: Path) -> str:
    """A digest of a checkpoint's config and weights that every copy of it shares."""
    files = [folder / "config.json", *sorted(folder.glob("rank*.safetensors"))]
    return capture_evidence.digest_texts([f"{file.name} {digest_file(file)}" for file in files])


def write_script(path: Path, request: Mapping[str, Any]) -> Path:
    """Write the joined script with the request in it, executable. Replaces a file that is there."""
    text = join_script(request)
    path.parent.mkdir(parents=True, exist_ok=True)
    capture_evidence.write_atomically(path, text.encode())
    path.chmod(0o755)
    return path


def join_script(request: Mapping[str, Any]) -> str:
    """The script's text: header and imports of all parts first, then the parts, the entry point last."""
    sources = [Path(module.__file__).read_text(encoding="utf-8") for module in (*PARTS, capture_script)]
    trees = [ast.parse(source) for source in sources]
    _check_names(trees)
    imports = sorted({line for tree in trees for line in _imports(tree)}, key=_import_order)
    bodies = [_body(source, tree) for source, tree in zip(sources, trees, strict=True)]
    filled = bodies[-1].replace(PLACE_OF_REQUEST, f"REQUEST = json.loads({json.dumps(request)!r})\n", 1)
    head = f'#!/usr/bin/env python3\n"""{ast.get_docstring(trees[-1])}\n"""\n\nfrom __future__ import annotations\n'
    return "\n".join([head, *imports, "", "", *bodies[:-1], filled])


def _check_names(trees: Sequence[ast.Module]) -> None:
    seen: dict[str, int] = {}
    for number, tree in enumerate(trees):
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and seen.setdefault(node.name, number) != number:
                raise ValueError(f"two parts of the capture script define {node.name}")


def _imports(tree: ast.Module) -> list[str]:
    """The import lines at the top of a module, this package's own left out."""
    lines = []
    for node in tree.body:
        if isinstance(node, ast.Import) or (
            isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in ("__future__", "porting_kit")
        ):
            lines.append(ast.unparse(node))
    return lines


def _import_order(line: str) -> tuple[bool, str]:
    return (line.startswith("from"), line)


def _body(source: str, tree: ast.Module) -> str:
    """A module's text behind its docstring and imports."""
    first = next(node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr))
    lines = source.splitlines(keepends=True)
    return "".join(lines[first.lineno - 1 :])
