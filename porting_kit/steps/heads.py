"""The heads commands: do the heads fit the base, which tree suits them, and the heads in another project's layout."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from porting_kit.alignment.gguf_settings import load_tokenizer
from porting_kit.alignment.reference import Reference, load_reference
from porting_kit.alignment.streamed_reference import needs_streaming, open_streamed_reference
from porting_kit.architectures import name_base
from porting_kit.conversion.heads import HeadSet
from porting_kit.conversion.heads_export import export_tensors, find_export_layout, write_export
from porting_kit.errors import HeadsError, format_count, placed
from porting_kit.medusa.head_fit import HeadFit, read_fit
from porting_kit.medusa.self_distillation import continue_greedily, cut_prompts
from porting_kit.medusa.training_text import read_text
from porting_kit.outcomes import Coverage, StepOutcome, Verdict
from porting_kit.port import Port
from porting_kit.provenance import hash_value
from porting_kit.steps.context import PortRun, Stopwatch
from porting_kit.steps.preflight import read_port_base, read_port_heads
from porting_kit.steps.prompts import can_tokenize, read_prompts, tokenize_prompts
from porting_kit.whole_files import replace_folder, require_free, require_writable, write_json, write_tensors

FOLDER = "heads"
RANKS_FILE, CHECK_FILE = "ranks.safetensors", "check.json"
PROMPT_TOKENS = (16, 32, 64)

Say = Callable[[str], None]


@dataclass(frozen=True)
class HeadsCheckResult:
    """Whether the heads fit, and how well.

    Args:
        outcome: `pass` when every head fits.
        heads: what was found in the file.
        fit: the readings and the ranks.
    """

    outcome: StepOutcome
    heads: HeadSet
    fit: HeadFit

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        return {**self.outcome.as_dict(), **self.fit.as_dict(), "layout": self.heads.layout}


@dataclass(frozen=True)
class HeadsExportResult:
    """Heads written in a layout."""

    outcome: StepOutcome
    file: Path

    def document(self) -> dict[str, Any]:
        """The `--json` document."""
        return {**self.outcome.as_dict(), "file": str(self.file)}


def open_heads_base(run: PortRun, *, streams: bool | None = None) -> Reference:
    """The base where it is fastest: on a GPU in the port's type, else on the CPU in float32.

    Args:
        run: the port.
        streams: read its layers from disk as they run; None does so where it would not fit the memory that is free.
    """
    has_gpu = torch.cuda.is_available()
    place = {"dtype": run.port.dtype if has_gpu else "float32", "device": "cuda" if has_gpu else "cpu"}
    if streams is None:
        streams = needs_streaming(run.port.base_path, **place)
    return (open_streamed_reference if streams else load_reference)(run.port.base_path, **place)


def check_port_heads(
    run: PortRun,
    *,
    data: Path | None = None,
    prompts: int = 64,
    new_tokens: int = 64,
    streams: bool | None = None,
    say: Say = lambda line: None,
) -> HeadsCheckResult:
    """Compare the heads with the base's own greedy continuations.

    The ranks are kept in the run folder, for the choice of a tree.

    Args:
        run: the port.
        data: text to cut prompts from; None takes the port's own prompts.
        prompts: how many at most.
        new_tokens: tokens of each continuation.
        streams: see `open_heads_base`.
        say: called with lines of progress.

    Raises:
        HeadsError: the heads cannot be read or sit on this base, or no text is left to ask at.
        BaseModelError: the base cannot be loaded or computes what is not finite.
        RunFolderError: the run folder cannot be written.
    """
    watch = Stopwatch()
    folder = require_writable(run.folder.root / FOLDER)
    base = read_port_base(run.port, None)
    texts = [] if data is None else read_data_for(run.port, data)
    heads = read_port_heads(run.port, base, check_values=True)
    inputs = rank_inputs(run, data, prompts, new_tokens)  # before they are read, so that a change in between counts
    reference = open_heads_base(run, streams=streams)
    is_streamed = "streamed" in reference.attention
    if is_streamed:
        say("the base's layers are read from disk at every token: fewer --new-tokens are faster")
    if data is None:
        asked, source = tokenize_prompts(run.port, reference.tokenizer, reference.vocab_size)
        asked = asked[:prompts]
    else:
        with placed(data):
            asked = cut_prompts(reference.tokenizer, texts, lengths_tokens=PROMPT_TOKENS, limit=prompts, seed=0)
        source = data.name
    rows = len(asked) if is_streamed else 64
    said = continue_greedily(reference.model, asked, new_tokens=new_tokens, batch_rows=rows, report=say)
    fit = read_fit(heads, said, reference.model.get_output_embeddings())
    warnings = heads.warnings + heads.compare_base(base)
    verdict, said_of = Verdict.PASS, "the heads fit this base"
    if fit.wrong:
        verdict, said_of = Verdict.FAIL, "these heads do not fit this base"
    elif not fit.fits:
        verdict, said_of = Verdict.NOT_RUN, "the prompts cannot tell whether these heads fit this base"
    sentence = "; ".join(reading.sentence for reading in fit.wrong or fit.readings)
    outcome = StepOutcome(
        step="heads check",
        verdict=verdict,
        summary=f"{said_of}: {sentence}",
        covered=(Coverage.WEIGHTS,),
        figures={"prompts": len(asked), "prompts_from": source, "new_tokens": new_tokens, "warnings": list(warnings)}
        | {"streamed": is_streamed},
        inputs={**run.inputs("preflight"), "prompts": hash_value(asked)},
        seconds=watch.seconds,
        failing_gate=f"heads: {fit.wrong[0].verdict}" if fit.wrong else None,
    )
    result = HeadsCheckResult(outcome, heads, fit)
    write_tensors(folder / RANKS_FILE, {"ranks": fit.ranks}, {"inputs": json.dumps(inputs)})
    write_json(folder / CHECK_FILE, result.document())
    return result


def rank_inputs(run: PortRun, data: Path | None, prompts: int, new_tokens: int) -> dict[str, str]:
    """What kept ranks depend on."""
    inputs = {name: value for name, value in run.inputs("align").items() if "base" in name or "heads" in name}
    texts = read_prompts(run.port) if data is None else read_data(data)
    return {**inputs, "text": hash_value(texts), "prompts": str(prompts), "new_tokens": str(new_tokens)}


def load_ranks(
    run: PortRun, *, data: Path | None = None, prompts: int = 64, new_tokens: int = 64, say: Say = lambda line: None
) -> torch.Tensor:
    """Ranks [rows, C - 1, M]: those kept by a check of the same inputs, or measured now."""
    file = run.folder.root / FOLDER / RANKS_FILE
    wanted = rank_inputs(run, data, prompts, new_tokens)
    if file.is_file():
        with suppress(SafetensorError, ValueError), safe_open(file, "pt") as kept:  # damaged: measured again
            if json.loads((kept.metadata() or {}).get("inputs", "{}")) == wanted:
                return kept.get_tensor("ranks")
    say("measuring the heads' ranks on the base's own continuations")
    return check_port_heads(run, data=data, prompts=prompts, new_tokens=new_tokens, say=say).fit.ranks


def read_data_for(port: Port, file: Path) -> list[str]:
    """Documents of a text file that the port's base can read; asked before any weight is loaded.

    Raises:
        HeadsError: see `read_data`; or the base brings no tokenizer.
    """
    texts = read_data(file)
    if not can_tokenize(load_tokenizer(port.base_path)):
        raise HeadsError(
            "the base model brings no tokenizer, so a text cannot be cut into tokens",
            expected="tokenizer files beside the weights",
            found="none",
            where=port.base_path,
            next_step="put the tokenizer beside the weights; without --data, `heads check` asks at random tokens",
        )
    return texts


def read_data(file: Path) -> list[str]:
    """Documents of a text file.

    Raises:
        HeadsError: the file is not there, or is no text.
    """
    try:
        return read_text(file)
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        raise HeadsError(
            "the text cannot be read",
            expected="a UTF-8 text file with blank lines between documents, or an .xz of training_text",
            found=f"{type(error).__name__}: {error}",
            where=file,
            next_step="name a text file with --data",
        ) from error


def export_port_heads(run: PortRun, layout: str, out: Path, *, as_pickle: bool = False) -> HeadsExportResult:
    """Write the port's heads in another layout.

    Args:
        run: the port.
        layout: a key of `heads_export.EXPORT_LAYOUTS`.
        out: a folder that is not there yet, or empty.
        as_pickle: a .pt file in place of safetensors.

    Raises:
        HeadsError: an unknown layout, or heads that cannot be read.
        RunFolderError: the folder is occupied.
    """
    watch = Stopwatch()
    find_export_layout(layout)
    require_free(out)
    base = read_port_base(run.port, None)
    heads = read_port_heads(run.port, base, check_values=True)
    tensors, config = export_tensors(heads, layout, lambda: _base_matrix(run))
    config = {"base_model_name_or_path": name_base(run.port.base_path), **config}
    with replace_folder(out) as folder:
        name = write_export(folder, tensors, config, as_pickle=as_pickle).name
    outcome = StepOutcome(
        step="heads export",
        verdict=Verdict.PASS,
        summary=f"{format_count(heads.num_heads, 'head')} of the layout {heads.layout} written as {layout}",
        covered=(Coverage.WEIGHTS,),
        figures={"tensors": len(tensors), "warnings": list(heads.warnings)},
        products=(name, "config.json"),
        seconds=watch.seconds,
    )
    return HeadsExportResult(outcome, out / name)


def _base_matrix(run: PortRun) -> torch.Tensor:
    return load_reference(run.port.base_path).output_matrix


def format_check(result: HeadsCheckResult) -> str:
    """A table for a terminal."""
    lines = [f"{'head':>4} {'top-1':>7} {'top-5':>7} {'chance':>7} {'positions':>9}  verdict"]
    for reading in result.fit.readings:
        shares = f"{reading.top1:7.1%} {reading.top5:7.1%} {reading.chance1:7.1%} {reading.positions:9d}"
        lines.append(f"{reading.head + 1:4d} {shares}  {reading.verdict}")
    lines += [f"note: {note}" for note in (*result.outcome.figures["warnings"], *result.fit.notes)]
    lines.append(f"heads check: {result.outcome.said}")
    return "\n".join(lines)


def format_export(result: HeadsExportResult) -> str:
    """One sentence and the file."""
    return f"heads export: {result.outcome.summary}\n{result.file}"
