"""`porting-kit heads`: train, check and export Medusa heads, and choose their tree. Thin, like `cli`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from porting_kit.errors import RunFolderError, TreeError

Report = Callable[[Callable[[], Any], Callable[[Any], str], bool], None]

PortFile = Annotated[Path, typer.Argument(metavar="PORT.yaml", help="The port file.")]
RunOut = Annotated[Path | None, typer.Option("--run-folder", help="The run folder; runs/<name> when not given.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("-p", "--parameter", metavar="NAME=VALUE", help="Override a field of the port file; VALUE is YAML."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Text = Annotated[Path | None, typer.Option("--data", help="A text file to cut prompts from; default: the port's own.")]
Prompts = Annotated[int, typer.Option("--prompts", min=1, help="Prompts at most.")]
NewTokens = Annotated[int, typer.Option("--new-tokens", min=2, help="Tokens the base continues each prompt by.")]


def build_heads_app(report: Report, parse_overrides: Callable[[Any], dict[str, Any]]) -> typer.Typer:
    """The commands, with `cli`'s way of reporting a result and of reading overrides."""
    app = typer.Typer(
        name="heads",
        help="Train, check and export Medusa heads, and choose their tree.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    def open_run(port_file: Path, run_folder: Path | None, parameter: list[str] | None, **defaults: Any) -> Any:
        from porting_kit.steps.context import open_port_run

        # Processes of one torchrun make the folder at the same time: one may see it half made.
        attempts = 1 if int(os.environ.get("WORLD_SIZE", "1")) == 1 else 30
        for attempt in range(attempts):
            try:
                overrides = parse_overrides(parameter)
                return open_port_run(port_file, run_folder=run_folder, overrides=overrides, defaults=defaults)
            except RunFolderError:
                if attempt == attempts - 1:
                    raise
                time.sleep(0.5)
        return None

    @app.command()
    def train(
        port_file: PortFile,
        data: Annotated[Path | None, typer.Option("--data", help="A text to cut prompts from.")] = None,
        self_chat: Annotated[
            int | None, typer.Option("--self-chat", metavar="N", help="Prompts that a chat base makes itself.")
        ] = None,
        self_chat_tokens: Annotated[
            int | None, typer.Option("--self-chat-tokens", help="Tokens of such a user's turn at most.")
        ] = None,
        self_chat_temperature: Annotated[
            float | None, typer.Option("--self-chat-temperature", help="Of the sampling of such turns.")
        ] = None,
        self_chat_top_p: Annotated[
            float | None, typer.Option("--self-chat-top-p", help="Share of the probability they are sampled from.")
        ] = None,
        out: Annotated[Path | None, typer.Option("--out", help="Where the heads go.")] = None,
        variant: Annotated[str, typer.Option("--variant", help="v2: the base's output matrix; v1: one each.")] = "v2",
        num_heads: Annotated[int | None, typer.Option("--heads", help="How many heads.")] = None,
        num_layers: Annotated[int | None, typer.Option("--layers", help="Residual layers a head.")] = None,
        prompts: Annotated[int | None, typer.Option("--prompts", help="Prompts to cut from the text.")] = None,
        prompt_tokens: Annotated[list[int] | None, typer.Option("--prompt-tokens", help="Lengths of prompts.")] = None,
        new_tokens: Annotated[int | None, typer.Option("--new-tokens", help="Tokens of a continuation.")] = None,
        steps: Annotated[int | None, typer.Option("--steps", help="Training steps.")] = None,
        learning_rate: Annotated[list[float] | None, typer.Option("--learning-rate", help="Several are tried.")] = None,
        batch_positions: Annotated[int | None, typer.Option("--batch-positions", help="Positions of a step.")] = None,
        seed: Annotated[int | None, typer.Option("--seed", help="For prompts and order.")] = None,
        restart: Annotated[bool, typer.Option("--restart", help="Forget the progress of an earlier run.")] = False,
        run_folder: RunOut = None,
        parameter: Overrides = None,
        as_json: AsJson = False,
    ) -> None:
        """Train heads over the frozen base on its own continuations; resumes. torchrun spreads it over GPUs."""
        from porting_kit.steps.heads_training import format_training, train_port_heads

        settings = {
            "variant": variant,
            "num_heads": num_heads,
            "num_layers": num_layers,
            "prompts": prompts,
            "self_chat": self_chat,
            "self_chat_tokens": self_chat_tokens,
            "self_chat_temperature": self_chat_temperature,
            "self_chat_top_p": self_chat_top_p,
            "prompt_tokens": tuple(prompt_tokens) if prompt_tokens else None,
            "new_tokens": new_tokens,
            "steps": steps,
            "learning_rates": tuple(learning_rate) if learning_rate else None,
            "batch_positions": batch_positions,
            "seed": seed,
        }

        def call() -> Any:
            # training reads no heads, so a port file without any is whole
            run = open_run(port_file, run_folder, parameter, heads=str(out or "heads"))
            return train_port_heads(run, data, out=out, settings=settings, restart=restart, say=_say)

        report(call, format_training, as_json)

    @app.command()
    def check(
        port_file: PortFile,
        data: Text = None,
        prompts: Prompts = 64,
        new_tokens: NewTokens = 64,
        stream: Annotated[
            bool | None,
            typer.Option("--stream/--no-stream", help="Read the base layer by layer; default: if too large."),
        ] = None,
        run_folder: RunOut = None,
        parameter: Overrides = None,
        as_json: AsJson = False,
    ) -> None:
        """Do the heads fit the base: their agreement with the base's own continuations, against chance."""
        from porting_kit.steps.heads import check_port_heads, format_check

        def call() -> Any:
            run = open_run(port_file, run_folder, parameter)
            return check_port_heads(run, data=data, prompts=prompts, new_tokens=new_tokens, streams=stream, say=_say)

        report(call, format_check, as_json)

    @app.command()
    def export(
        port_file: PortFile,
        layout: Annotated[str, typer.Option("--layout", help="original, merged, modelopt, tensorrt_llm, vllm or tgi.")],
        out: Annotated[Path, typer.Option("--out", help="A new folder.")],
        as_pickle: Annotated[bool, typer.Option("--pickle", help="A .pt file in place of safetensors.")] = False,
        run_folder: RunOut = None,
        parameter: Overrides = None,
        as_json: AsJson = False,
    ) -> None:
        """Write the heads in the layout that another project reads."""
        from porting_kit.steps.heads import export_port_heads, format_export

        report(
            lambda: export_port_heads(open_run(port_file, run_folder, parameter), layout, out, as_pickle=as_pickle),
            format_export,
            as_json,
        )

    @app.command()
    def tree(
        port_file: PortFile,
        max_nodes: Annotated[int, typer.Option("--max-nodes", help="Nodes at most, the root included.")] = 64,
        max_depth: Annotated[int | None, typer.Option("--max-depth", help="Levels at most.")] = None,
        batch: Annotated[int, typer.Option("--batch", min=1, help="Requests at a time.")] = 1,
        costs: Annotated[Path | None, typer.Option("--costs", help="JSON: tokens of a step to milliseconds.")] = None,
        measure_costs: Annotated[bool, typer.Option("--measure-costs", help="Time steps on this machine.")] = False,
        data: Text = None,
        prompts: Prompts = 64,
        new_tokens: NewTokens = 64,
        run_folder: RunOut = None,
        parameter: Overrides = None,
        as_json: AsJson = False,
    ) -> None:
        """Choose the tree from measured joint ranks, and say what it is worth."""
        from porting_kit.medusa.step_costs import read_step_costs
        from porting_kit.medusa.tree_choice import TreeLimits
        from porting_kit.steps.heads_tree import choose_port_tree, format_tree_choice, measure_step_costs

        def call() -> Any:
            if costs and measure_costs:
                raise TreeError(
                    "the step costs are given and to be measured",
                    expected="--costs or --measure-costs",
                    found=f"--costs {costs} beside --measure-costs",
                    next_step="leave one out: --costs holds an engine's times, --measure-costs takes this machine's",
                )
            limits = TreeLimits(max_nodes=max_nodes, max_depth=max_depth)
            run = open_run(port_file, run_folder, parameter)
            known = read_step_costs(costs) if costs else measure_step_costs(run, batch=batch) if measure_costs else None
            return choose_port_tree(
                run, limits, batch=batch, costs=known, data=data, prompts=prompts, new_tokens=new_tokens, say=_say
            )

        report(call, format_tree_choice, as_json)

    return app


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
