"""The page of public models: which of them Medusa's kernels take in which release, and what makes the others fit.

`python -m porting_kit.kernel_fit.model_table [--configurations FOLDER] [--out PAGE.md]` reads every config.json in the
folder (named after its model) and judges it as preflight does: the model's class, its positions, every kernel gate, on
the shape as it is and after `fit: auto`. It reads no weights, so a truncation is planned, not yet measured.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from porting_kit.architectures.base_config import BaseConfig, read_base_config
from porting_kit.architectures.release_needs import find_release_faults, find_unmet_needs
from porting_kit.conversion.config_fields import build_config
from porting_kit.errors import BaseModelError
from porting_kit.kernel_fit.plan import FitPlan, plan_fit
from porting_kit.releases.facts import find_release_facts
from porting_kit.releases.kernels import GateResult, evaluate_gates, kernel_profile
from porting_kit.releases.port_gates import position_gate
from porting_kit.releases.shape import attention_shape

FOLDER = Path("notebooks/howto/configurations")
PAGE = Path("notebooks/howto/public_models.md")
RELEASES = ("0.9.0", "0.10.0", "0.11.0.dev2024062500", "0.14.0.dev2024100800", "1.2.0")
LONGEST_TOKENS = 2048
WORKS, FITTED, SILENT, REFUSED = "works", "fit", "silent", "refused"

HEAD = """# Which public models work

Which well-known models can carry Medusa heads in which release, on which conditions?

Every cell is what preflight says from the model's `config.json` alone, for half precision, a card of compute capability
9.0, cache blocks of 64 tokens and sequences up to {longest:,} tokens (or the model's own limit or attention window,
where that is shorter). The configurations are in
`notebooks/howto/configurations/`, written from the models' published figures.

- **works**: no gate of the release stands in the way; the patch and the conversion are all it takes.
- **fit**: `fit: auto` makes it work. The transforms are named; *exact* ones leave the model's function as it is, the
  others are approximate and are judged by two comparisons (see [Making Bloom work](making_bloom_work.md)).
  `KV x 2`: the cache grows to twice its bytes.
- **silent**: the engine builds, runs and is wrong, and no transform mends it.
- **refused**: it cannot be built or stops at its first step, with the reason below. *no class*: the release has no
  model definition for it.

What the page does not know: whether a truncation of 128-dim heads stays within its bound (that takes the weights);
and anything about tokens. `porting-kit align` checks both. Where a release's model code itself differs from Hugging
Face, the faults that a later release mended are counted here; [Coverage](coverage.md) lists all.

This page is generated: `python -m porting_kit.kernel_fit.model_table`.
"""

EIGHT_BITS = """## With an fp8 cache

The same models with `kv_cache_type: fp8`. Before 0.11 the kernel takes the cache's scale as 1, so whatever is built is
wrong without a message. From 0.11 on it is passed; what stands for ALiBi is too coarse in eight bits, so ALiBi models
are out. In 1.2 a card of compute capability 9.0 takes the run-time compiled kernel for groups that divide 64; it wants
rotary positions, and takes any head size that is a multiple of 16, 256 included."""


@dataclass(frozen=True)
class Cell:
    """One model in one release.

    Args:
        kind: `works`, `fit`, `silent` or `refused`.
        text: what the table shows.
        reason: why, for a silent or refused one; empty otherwise.
        transforms: names of the fit's transforms.
        cache_growth: bytes of the KV cache after the fit over those before.
    """

    kind: str
    text: str
    reason: str = ""
    transforms: tuple[str, ...] = ()
    cache_growth: float = 1.0


def judge_model(base: BaseConfig, release: str, cache: str = "auto") -> Cell:
    """What preflight says about a model in a release, from its config alone.

    Args:
        cache: type of the KV cache.
    """
    base = base.for_release(release)
    if base.refusals:
        first = base.refusals[0]
        return _refuse(f"no counterpart for {first.key} = {first.value!r}: {first.effect}")
    needs = find_unmet_needs(base, release)
    if needs:
        since = "in no release" if needs[0].since is None else f"from {needs[0].since} on"
        is_class = needs[0].what.endswith("(its model class)")
        return _refuse(f"{needs[0].what}: {since}", "no class" if is_class else "refused")
    facts = find_release_facts(release)
    gate = position_gate(position_kind=base.position_kind, rope_scaling=base.rope_scaling, facts=facts, release=release)
    if gate.verdict != "pass":
        return _refuse(str(gate.effect))
    faults = find_release_faults(base, release)
    if faults:
        fault = faults[0]
        return Cell(SILENT, SILENT, f"{fault.name}: {fault.effect}; right from {fault.before} on")
    dtype = base.dtype if base.dtype in ("float16", "bfloat16") else "float16"
    length = min(limit for limit in (base.max_positions, base.sliding_window, LONGEST_TOKENS) if limit)
    target = SimpleNamespace(kv_cache_type=cache, max_seq_len=length, tokens_per_block=64, compute_capability="9.0")
    shape = attention_shape(base, target, dtype=dtype, positions_in_graph=True)
    profile = kernel_profile(f"release:{release}")
    config, _ = build_config(base, dtype=dtype)
    try:
        plan = plan_fit(shape, profile, "auto", config=config)
    except BaseModelError:
        return _judge_gates(evaluate_gates(shape, profile))
    return _describe_plan(plan)


def _refuse(reason: str, text: str = "refused") -> Cell:
    return Cell(REFUSED, text, reason)


def _judge_gates(gates: Sequence[GateResult]) -> Cell:
    for verdict, kind in (("refused", REFUSED), ("silent", SILENT)):
        # A gate that some transform mends is not what stands in the way; it is named when there is no other.
        found = sorted((gate for gate in gates if gate.verdict == verdict), key=lambda gate: bool(gate.mended_by))
        if found and (verdict == "silent" or not found[0].mended_by):
            return Cell(kind, kind, f"{found[0].name} {found[0].value}: {found[0].remedy}")
    found = [gate for gate in gates if gate.verdict != "pass"]
    return Cell(REFUSED, REFUSED, "; ".join(f"{gate.name} {gate.value}" for gate in found))


def _describe_plan(plan: FitPlan) -> Cell:
    if not plan.steps:
        return Cell(WORKS, WORKS)
    before, after = plan.cache_bytes_per_token
    growth = after / before
    parts = [*(f"`{name}`" for name in plan.names), "exact" if plan.exact else "approximate"]
    parts += [f"KV x {growth:.3g}"] if growth != 1 else []
    return Cell(FITTED, "fit: " + ", ".join(parts), "", plan.names, growth)


def read_configurations(folder: Path) -> dict[str, BaseConfig]:
    """Model name -> its normalised config, in the order of the table.

    Raises:
        BaseModelError: a file is no config of a decoder, or the folder has none.
    """
    files = sorted(folder.glob("*.json"), key=_size_order)
    if not files:
        raise BaseModelError(
            "no configurations to judge",
            expected="files <model>.json",
            found="none",
            where=folder,
            next_step="name a folder of Hugging Face configs",
        )
    return {file.stem: read_base_config(file) for file in files}


def _size_order(file: Path) -> tuple[str, float, str]:
    """By family, then by size: `bloom-560m` before `bloom-1b7` before `bloom-7b1`."""
    found = re.match(r"(.+)-(\d+(?:\.\d+)?)([bm])(\d*)", file.stem)
    if found is None:
        return file.stem, 0.0, ""
    name, whole, unit, tenths = found.groups()
    return name, float(f"{whole}.{tenths}" if tenths else whole) * (1e-3 if unit == "m" else 1.0), file.stem


def write_page(bases: dict[str, BaseConfig], releases: Sequence[str] = RELEASES) -> str:
    """The whole page as Markdown."""
    cells = {name: [judge_model(base, release) for release in releases] for name, base in bases.items()}
    reasons: dict[str, str] = {}
    lines = [
        "| model | heads | head size | positions | " + " | ".join(releases) + " |",
        "| --- | --- | --- | --- |" + " --- |" * len(releases),
    ]
    for name, base in bases.items():
        shown = [_show(cell, reasons) for cell in cells[name]]
        heads = (
            f"{base.num_heads}" if base.num_heads == base.num_kv_heads else f"{base.num_heads} / {base.num_kv_heads}"
        )
        lines.append(f"| {name} | {heads} | {base.head_size} | {base.position_kind} | " + " | ".join(shown) + " |")
    summary = _count_kinds(cells, releases)
    eight_bits = {name: [judge_model(base, release, "fp8") for release in releases] for name, base in bases.items()}
    guessed = [
        f"- {release}: {facts.kernel.inferred}"
        for release in releases
        if (facts := find_release_facts(release)).kernel.inferred
    ]
    sections = [
        HEAD.format(longest=LONGEST_TOKENS).rstrip(),
        f"## {len(bases)} models, {len(releases)} releases\n\n" + "\n".join(summary),
        "## Model by model\n\n" + "\n".join(lines),
        "## Reasons\n\n" + "\n".join(f"- **{mark}** {text}" for text, mark in reasons.items()),
        EIGHT_BITS + "\n\n" + "\n".join(_count_kinds(eight_bits, releases)),
        "## What is inferred\n\nLimits of a release that were not read in its own sources:\n\n" + "\n".join(guessed),
    ]
    return "\n\n".join(sections if guessed else sections[:-1]) + "\n"


def _count_kinds(cells: Mapping[str, Sequence[Cell]], releases: Sequence[str]) -> list[str]:
    """A table: how many models are of each kind in each release."""
    counts = [
        f"| {kind} | "
        + " | ".join(str(sum(row[column].kind == kind for row in cells.values())) for column in range(len(releases)))
        + " |"
        for kind in (WORKS, FITTED, SILENT, REFUSED)
    ]
    return ["| | " + " | ".join(releases) + " |", "| --- |" + " --- |" * len(releases), *counts]


def _show(cell: Cell, reasons: dict[str, str]) -> str:
    if not cell.reason:
        return cell.text
    return f"{cell.text} {reasons.setdefault(cell.reason, f'R{len(reasons) + 1}')}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configurations", type=Path, default=FOLDER, help="folder of <model>.json files")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--json", action="store_true", help="print the cells as one JSON document instead")
    options = parser.parse_args(arguments)
    bases = read_configurations(options.configurations)
    if options.json:
        document = {
            name: {release: vars(judge_model(base, release)) for release in RELEASES} for name, base in bases.items()
        }
        print(json.dumps(document, indent=1))
        return
    options.out.write_text(write_page(bases), encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
