"""Run a Medusa engine on a port's prompts and write what it said into one file to bring back.

The build step joins this file with its two parts and fills in REQUEST; what it writes needs only what a TensorRT-LLM
container has (Python 3.10, numpy, torch, tensorrt_llm). It compares nothing.

    python engine/capture.py                 run the engine, write engine/captured.npz
    python engine/capture.py record          after a build by hand: write the record beside the engine
    mpirun -n 2 --allow-run-as-root python engine/capture.py       an engine of two ranks

Every run has an entry in the file, failed ones too, and the file is written again after each: a run that takes the
process down leaves the earlier ones, and the end of the log. Sampling is greedy everywhere.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from porting_kit.engine.capture_evidence import (
    FORMAT,
    LOG_TAIL,
    check_engine_folder,
    check_record,
    current_card,
    digest_file,
    last_error,
    read_file,
    read_json,
    versions,
    write_file,
    write_record,
)
from porting_kit.engine.capture_runtimes import OPENERS, choose_api, current_rank

REQUEST: dict = {}

APIS = ("auto", "ModelRunnerCpp", "ModelRunner", "LLM")
MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def main() -> int:
    """Parse the command line, run, and say where the file is. Returns the exit code."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Run a Medusa engine on a port's prompts.")
    parser.add_argument("what", nargs="?", choices=("run", "record"), default="run")
    parser.add_argument("--engine-dir", type=Path, default=here / "trtllm", help="the engine's folder")
    parser.add_argument("--base-engine-dir", type=Path, help="an engine of the base alone, to compare with")
    parser.add_argument("--out", type=Path, default=here / "captured.npz", help="the file to bring back")
    parser.add_argument("--api", choices=APIS, default="auto", help="auto: the one this release runs Medusa with")
    parser.add_argument("--logits", action="store_true", help="keep logits, if the engine has generation logits")
    parser.add_argument("--in-process", action="store_true", help="run here, not in a child process")
    args = parser.parse_args()
    if not REQUEST:
        print("this copy has no request in it: use the one that the build step writes", file=sys.stderr)
        return 2
    problem = check_engine_folder(args.engine_dir, REQUEST["world_size"])
    if args.what == "record":
        if problem:
            print(problem, file=sys.stderr)
            return 2
        print(write_record(args.engine_dir, here / "build_plan.json", REQUEST))
        return 0
    problem = problem or check_record(args.engine_dir, REQUEST)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    is_parallel = any(int(os.environ.get(name, "1")) > 1 for name in MPI_VARIABLES)
    if args.in_process or is_parallel:
        return capture(args)
    return capture_in_child(args)


def capture_in_child(args: argparse.Namespace) -> int:
    """Run in a child process, so that an abort in the library still leaves a file and a log."""
    log_file = args.out.with_suffix(".log")
    args.out.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--in-process"]
    lines = []
    with log_file.open("w", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        for line in child.stdout:
            log.write(line)
            log.flush()
            sys.stdout.write(line)
            lines.append(line)
        code = child.wait()
    if code < 0 or not args.out.is_file():
        document, arrays = read_file(args.out) if args.out.is_file() else (describe(args, None), {})
        document["died"] = {"code": code, "log": "".join(lines)[-LOG_TAIL:]}
        write_file(args.out, document, arrays)
        print(f"the run ended with code {code}; what was captured so far and the log's end are in {args.out}")
    return 0 if code == 0 else 1


def capture(args: argparse.Namespace) -> int:
    """Make every run and write the file after each."""
    rank = current_rank()
    api = choose_api(args.api)
    document = describe(args, api)
    arrays: dict = {}
    jobs = [("medusa", args.engine_dir)]
    jobs += [("base", args.base_engine_dir)] if args.base_engine_dir else []
    for kind, folder in jobs:
        try:
            runner = OPENERS[api](folder, kind, rank, REQUEST, args.logits)
        except Exception:
            document["runs"].append({"name": f"{kind} opened", "kind": kind, "error": last_error()})
            continue
        for name, groups, options in plan_runs(kind, api):
            entry = {"name": name, "kind": kind, "groups": groups, **options}
            started = time.monotonic()
            try:
                answers = [runner(group, options, args.logits) for group in groups]
            except Exception:
                entry["error"] = last_error()
            else:
                entry["seconds"] = round(time.monotonic() - started, 3)
                for key in ("tokens", "lengths", "accepted", "steps"):
                    entry[key] = [answer.get(key) for answer in answers]
                for call, answer in enumerate(answers):
                    for row, logits in enumerate(answer.get("logits") or ()):
                        arrays[f"logits/{name}/{groups[call][row]}"] = logits
            document["runs"].append(entry)
            if rank == 0:
                write_file(args.out, document, arrays)
    document["complete"] = True
    if rank == 0:
        write_file(args.out, document, arrays)
        failed = [run["name"] for run in document["runs"] if "error" in run]
        print(f"{len(document['runs'])} runs with {api}, {len(failed)} failed: {args.out}")
    return 0


def plan_runs(kind: str, api: str) -> list:
    """Name, calls (prompt numbers of each) and options of every run; logits come from the first."""
    sizes = list(REQUEST["groups"])
    runs = [(f"{kind} batch {size}", REQUEST["groups"][size], {"batch_size": int(size)}) for size in sizes]
    if kind == "base":
        return runs[:1]
    runs.append(("repeat", REQUEST["groups"][sizes[-1]], {"batch_size": int(sizes[-1])}))
    if api != "ModelRunner":
        runs.append(("streamed", REQUEST["groups"][sizes[0]], {"batch_size": int(sizes[0]), "streamed": True}))
    return runs


def describe(args: argparse.Namespace, api: str | None) -> dict:
    """Everything about the run but its results."""
    config = read_json(args.engine_dir / "config.json")
    build_config = config.get("build_config") or {}
    return {
        "format": FORMAT,
        "request": REQUEST,
        "api": api,
        "environment": versions(),
        "card": current_card(),
        "engine": {
            "version": config.get("version"),
            "config": digest_file(args.engine_dir / "config.json"),
            "files": {file.name: digest_file(file) for file in sorted(args.engine_dir.glob("*.engine"))},
            "build_config": {name: value for name, value in build_config.items() if is_plain(value)},
        },
        "base_engine": str(args.base_engine_dir) if args.base_engine_dir else None,
        "runs": [],
        "complete": False,
    }


def is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


if __name__ == "__main__":
    sys.exit(main())
