"""The command line: one thin command per step, `run` for all of them.

Exit codes: 0 the verdict is pass; 1 it is fail or refused; 2 the input is unusable; 3 the machine lacks something;
130 it was interrupted.
`--json` prints one document on stdout; everything else goes to stderr. Each command is one function of
`porting_kit.steps`, imported when it is called, so that `preflight` starts without torch.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from porting_kit.cli_heads import build_heads_app
from porting_kit.errors import PortFileError, PortingKitError
from porting_kit.outcomes import StepOutcome, Verdict
from porting_kit.steps.overrides import parse_overrides

app = typer.Typer(
    name="porting-kit",
    help="Port a Hugging Face decoder model and its Medusa heads to TensorRT-LLM, and prove that the result is right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PortFile = Annotated[Path, typer.Argument(metavar="PORT.yaml", help="The port file.")]
OutFolder = Annotated[Path | None, typer.Option("--out", help="The run folder; runs/<name> when not given.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-p", "--parameter", metavar="NAME=VALUE", help="Override a field of the port file; VALUE is YAML."),
]
Edited = Annotated[bool, typer.Option("--edited", help="Take what patch and convert made though it was edited since.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


@app.command()
def preflight(port_file: PortFile, out: OutFolder = None, parameter: Overrides = None, as_json: AsJson = False) -> None:
    """Say before anything heavy whether this port can work: under a second, no weights read."""
    from porting_kit.steps.preflight import check_port_file, format_preflight

    _report(
        lambda: check_port_file(port_file, run_folder=out, overrides=parse_overrides(parameter)),
        format_preflight,
        as_json,
    )


@app.command()
def patch(port_file: PortFile, out: OutFolder = None, parameter: Overrides = None, as_json: AsJson = False) -> None:
    """Patch the base's model.py: a module for --model_cls_file and a unified diff. Edits no installed package."""
    from porting_kit.steps.patch import format_patch, patch_port

    _report(lambda: patch_port(_open_run(port_file, out, parameter)), format_patch, as_json)


@app.command()
def convert(
    port_file: PortFile,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read both sides again and prove every tensor; converts first if needed.")
    ] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say what it would need (disk, memory, time) and convert nothing.")
    ] = False,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Threads; the bytes are the same.")] = None,
    out: OutFolder = None,
    parameter: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Convert the base's weights and the heads to a TensorRT-LLM Medusa checkpoint; go on where a run stopped."""
    from porting_kit.steps.convert import convert_port, estimate_port, format_conversion, format_estimate
    from porting_kit.steps.proof import format_proof, prove_port

    if estimate:
        _report(lambda: estimate_port(_open_run(port_file, out, parameter)), format_estimate, as_json)
    elif verify:
        _report(lambda: prove_port(_open_run(port_file, out, parameter), workers=workers), format_proof, as_json)
    else:
        _report(
            lambda: convert_port(_open_run(port_file, out, parameter), verify=False, workers=workers),
            format_conversion,
            as_json,
        )


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Compare two TensorRT-LLM checkpoints, tensor by tensor and config field by config field."""
    from porting_kit.steps.compare import compare_folders, format_comparison

    _report(lambda: compare_folders(first, second), format_comparison, as_json)


@app.command()
def build(
    port_file: PortFile,
    plan_only: Annotated[bool, typer.Option("--plan-only", help="Write the command line, run nothing.")] = False,
    keep_logits: Annotated[
        bool, typer.Option("--keep-logits", help="The engine keeps generation logits, so that they can be compared.")
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", metavar="SECONDS", min=1, help="Stop the build after this time.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--log", help="Explain the log of a build made elsewhere; build nothing.")
    ] = None,
    out: OutFolder = None,
    parameter: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Build the engine where tensorrt_llm and a GPU are; elsewhere write the exact command line."""
    from porting_kit.steps.build import build_port, explain_log, format_build, format_log

    if log is not None:
        _report(lambda: explain_log(log), format_log, as_json)

    def call() -> Any:
        run = _open_run(port_file, out, parameter)
        return build_port(run, plan_only=plan_only, keep_logits=keep_logits, time_limit_seconds=time_limit)

    _report(call, format_build, as_json)


@app.command()
def serving(
    port_file: PortFile,
    engine: Annotated[Path | None, typer.Option("--engine", help="The engine's folder; the run's own.")] = None,
    check: Annotated[
        list[Path] | None,
        typer.Option("--check", help="A config.pbtxt, script or YAML to check; may be given again."),
    ] = None,
    out: OutFolder = None,
    parameter: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Write the serving settings that go with the engine; find contradictions in existing serving files."""
    from porting_kit.steps.serving import format_serving, write_serving

    def call() -> Any:
        run = _open_run(port_file, out, parameter)
        return write_serving(run, engine_dir=engine, check=check or ())

    _report(call, format_serving, as_json)


@app.command()
def align(
    port_file: PortFile,
    edited: Edited = False,
    out: OutFolder = None,
    parameter: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check that the port says what the base model says; where it does not, name the cause."""
    from porting_kit.steps.prompts import require_captured

    def call() -> Any:
        run = _open_run(port_file, out, parameter)
        require_captured(run.port)  # before the import of torch, which takes seconds
        from porting_kit.steps.align import align_port

        return align_port(run, edited=edited)

    def show(result: Any) -> str:
        from porting_kit.steps.align import format_alignment

        return format_alignment(result)

    _report(call, show, as_json)


@app.command()
def diagnose(
    port_file: PortFile,
    observed: Annotated[Path, typer.Option("--observed", help="Tokens of an engine: --output_npy or --output_csv.")],
    logits: Annotated[Path | None, typer.Option("--logits", help="Logits of that run: --output_logits_npy.")] = None,
    edited: Edited = False,
    out: OutFolder = None,
    parameter: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say which fault explains the tokens that an engine produced."""
    from porting_kit.steps.diagnose import diagnose_port, format_diagnosis

    def call() -> Any:
        run = _open_run(port_file, out, parameter)
        return diagnose_port(run, observed, logits, edited=edited)

    _report(call, format_diagnosis, as_json)


@app.command()
def report(port_file: PortFile, out: OutFolder = None, parameter: Overrides = None, as_json: AsJson = False) -> None:
    """Write the run's report as one HTML file that needs no network."""
    from porting_kit.steps.report import write_report

    _report(
        lambda: write_report(_open_run(port_file, out, parameter)),
        lambda result: f"{result.outcome.summary}\n{result.file}",
        as_json,
    )


@app.command()
def run(
    port_file: PortFile,
    out: OutFolder = None,
    parameter: Overrides = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Run the later notebooks after a failing gate, to see it happen.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run all notebooks through papermill; the exit code follows the verdict."""
    from porting_kit.steps.workbook import format_workbook, run_workbook

    _report(
        lambda: run_workbook(port_file, run_folder=out, overrides=parse_overrides(parameter), keep_going=keep_going),
        format_workbook,
        as_json,
    )


@app.command()
def coverage(
    source: Annotated[
        str, typer.Option("--source", help="A TensorRT-LLM checkout, its package, installed or bundled.")
    ],
    arch: Annotated[
        list[str] | None, typer.Option("--arch", help="Only this architecture of the tree; may be given again.")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float32, or float16 or bfloat16 within four times the measured rounding.")
    ] = "float32",
    tp: Annotated[
        list[int] | None, typer.Option("--tp", help="Also on so many tensor-parallel ranks; may be given again.")
    ] = None,
    pp: Annotated[
        list[int] | None, typer.Option("--pp", help="Also on so many pipeline ranks; may be given again.")
    ] = None,
    part: Annotated[
        str, typer.Option("--part", help="K/N: only the K-th of N parts of the rows, for N processes.")
    ] = "1/1",
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes that share the rows.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Patch, run and compare every decoder of a tree with Hugging Face. Runs the tree's code: trust it."""
    from porting_kit.steps.coverage import check_coverage, format_coverage

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    _report(
        lambda: check_coverage(
            source,
            architectures=arch or (),
            dtype=dtype,
            tp_sizes=tp or (),
            pp_sizes=pp or (),
            part=part,
            jobs=jobs,
            progress=say,
        ),
        format_coverage,
        as_json,
    )


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Where the demo's run folders go.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Port the embedded Bloom on kernels that drop its ALiBi bias, in exact arithmetic, and fitted to those kernels."""
    from porting_kit.steps.demo import format_demo, run_demo

    _report(lambda: run_demo(out), format_demo, as_json)


@app.command()
def quantised(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A quantised TensorRT-LLM checkpoint.")],
    base: Annotated[Path | None, typer.Option("--base", help="The Hugging Face base, to compare with.")] = None,
    source: Annotated[str | None, typer.Option("--source", help="A tree, for what is taken for absent fields.")] = None,
    heads: Annotated[
        Path | None, typer.Option("--heads", help="Medusa heads: to add in 16 bit with --out, or to compare with.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the checkpoint with heads goes; the run folder with --port.")
    ] = None,
    dequantised: Annotated[
        Path | None, typer.Option("--dequantised", help="Where the 16-bit twin for the emulator goes.")
    ] = None,
    max_draft_len: Annotated[
        int | None, typer.Option("--max-draft-len", help="Draft tokens of the tree, 63 at most; written with --out.")
    ] = None,
    port: Annotated[
        Path | None, typer.Option("--port", help="Align it as this port: Medusa on its 16-bit twin, against the base.")
    ] = None,
    parameter: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check an FP8, INT8 or INT4 checkpoint against its config and its base; add heads in 16 bit."""
    from porting_kit.steps.quantised import check_quantised, format_quantised

    if port is not None:
        from porting_kit.steps.align import format_alignment
        from porting_kit.steps.quantised_alignment import align_quantised

        def align_call() -> Any:
            if base or source or heads or dequantised or max_draft_len is not None:
                found = "--base, --source, --heads, --dequantised or --max-draft-len"
                raise PortFileError(
                    "with --port base, heads and tree are the port's",
                    expected="--port without them",
                    found=found,
                    next_step="leave them out, or leave --port out",
                )
            return align_quantised(_open_run(port, out, parameter), checkpoint)

        _report(align_call, format_alignment, as_json)

    def call() -> Any:
        if parameter:
            raise PortFileError(
                "-p changes fields of a port file",
                expected="--port PORT.yaml",
                found=parameter[0],
                next_step="name the port file with --port, or leave -p out",
            )
        written = {"dequantised": dequantised, "out": out, "max_draft_len": max_draft_len}
        return check_quantised(checkpoint, base=base, source=source, heads=heads, **written)

    _report(call, format_quantised, as_json)


def _open_run(port_file: Path, out: Path | None, parameter: Sequence[str] | None) -> Any:
    """The port with its overrides, and its run folder."""
    from porting_kit.steps.context import open_port_run

    return open_port_run(port_file, run_folder=out, overrides=parse_overrides(parameter))


def _report(call: Callable[[], Any], format_result: Callable[[Any], str], as_json: bool) -> NoReturn:
    """Run one step, print its result once, leave with the verdict's exit code."""
    is_first = os.environ.get("RANK", "0") == "0"  # under torchrun the other ranks only take part
    try:
        result = call()
    except PortingKitError as error:
        if as_json and is_first:
            verdict = {1: Verdict.REFUSED, 3: Verdict.NOT_RUN}.get(error.exit_code, Verdict.NOT_RUN)
            print(json.dumps({"verdict": verdict.value, "covered": [], "error": error.as_dict()}, indent=2))
        if is_first:
            print(f"error: {error.message}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error
    except EOFError as error:  # typer would take it for a user who left a prompt: "Aborted", exit code 1
        raise RuntimeError("a file ended too early") from error
    outcome: StepOutcome = result.outcome
    if is_first:
        print(json.dumps(result.document(), indent=2, default=str) if as_json else format_result(result))
    raise typer.Exit(outcome.verdict.exit_code)


app.add_typer(build_heads_app(_report, parse_overrides))


def main() -> None:
    """The console entry point. A crash that is no known error prints its traceback and exits with 70."""
    try:
        app()
    except SystemExit as end:
        if end.code == 130 and os.environ.get("RANK", "0") == "0":  # typer's, for an interrupt, without a word
            said = "what was written is complete or absent: the same command goes on where it can, or starts again"
            print(f"interrupted; {said}", file=sys.stderr)
        raise
    except Exception:
        traceback.print_exc()
        print("this is a defect of porting-kit: please report the lines above", file=sys.stderr)
        sys.exit(70)


if __name__ == "__main__":
    main()
