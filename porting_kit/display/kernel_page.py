"""The page of the real kernel's figures, written from what `tests.benchmarks.xqa` measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

KERNEL_HEAD = """# The real kernel, measured

What NVIDIA's own kernel computes for a Medusa tree, and how long it takes.

Build: {build},
torch {torch}; measured on {date} by `python -m tests.benchmarks.xqa`. It is TensorRT-LLM's XQA kernel with several
query tokens as flashinfer-python ships it, compiled from source on that machine; keys and values lie in blocks of 64
tokens in shuffled order. Not covered: TensorRT-LLM's own dispatch before the kernel, which may refuse a shape that the
kernel could compute, and the compiled kernels of older releases.

To run a port of your own through it: `porting-kit align PORT.yaml -p kernel=xqa` on a machine with a GPU of compute
capability 9, 10 or 12 and the extra `gpu`. Every tree step of every layer then goes through the kernel; everything else
stays in the emulator. With the bundled definitions, name the release a fit is for as well:
`-p trtllm.release=0.11.0.dev2024062500 -p fit=auto`.
"""


def write_kernel_page(figures: Mapping[str, Any]) -> str:
    """The page of the real kernel as Markdown."""
    build = figures["build"]
    text = (
        f"flashinfer-python {build['version']} (commit {build['commit'][:12]}) on one {build['device']}, CUDA "
        f"{build['cuda']}"
    )
    sections = [
        KERNEL_HEAD.format(build=text, torch=figures["torch"], date=figures["date"]).rstrip(),
        _write_geometry(figures["geometry"]),
        _write_ranks(figures["ranks"], figures["recorded"][0]),
        _write_fp8(figures["fp8"]),
        _write_alibi(figures["alibi"]),
        _write_ports(figures["ports"]),
        _write_times(figures["time"]),
    ]
    return "\n\n".join(sections) + "\n"


def _write_geometry(rows: Sequence[Mapping[str, Any]]) -> str:
    far, near = ([row for row in rows if (row["past"] > 1000) == is_far] for is_far in (True, False))
    shortest = {_geometry(row): row for row in near}
    table = [
        (
            *_geometry(row),
            format_number(shortest[_geometry(row)]["max_error"]),
            format_number(row["max_error"]),
            format_number(row["relative_error"]),
            format_number(row["causal_instead_of_tree"]),
        )
        for row in far
    ]
    names = (
        *("head size", "group", "nodes", "type", f"largest error, past {near[0]['past']}"),
        *(f"largest error, past {far[0]['past']:,}", "relative", "causal mask"),
    )
    return (
        "## The tree, at every geometry\n\n"
        "Two requests, the second with half the past; 4 key/value heads. Errors of the attention output against\n"
        "float32 attention on the same tensors; relative is the norm of the error over the norm of the output.\n"
        f"Rounding the float32 result once is {_span(far, 'float16')} in float16 and {_span(far, 'bfloat16')} in\n"
        "bfloat16. The last column is what a causal mask in place of the tree would give: the mask is read.\n\n"
        + markdown_table(names, table)
        + "\n\nGroups of three and seven are as right as powers of two: from 0.11 on, nothing has to be padded."
    )


def _write_ranks(rows: Sequence[Mapping[str, Any]], recorded: Mapping[str, Any]) -> str:
    table = [
        (
            *(row["rank"], f"{row['kv_heads'] * row['group']} / {row['kv_heads']}", row["head_size"]),
            *(f"{row['past']:,}", format_number(row["max_error"]), format_number(row["relative_error"])),
        )
        for row in rows
    ]
    heads = f"{recorded['query_heads']} / {recorded['kv_heads']} heads of {recorded['head_size']} dims"
    return (
        "## One rank's heads, and real weights\n\n"
        "What one rank has under tensor parallelism, 64 nodes, float16; measured as above.\n\n"
        + markdown_table(("rank of", "heads", "head size", "past", "largest error", "relative"), table)
        + f"\n\nReal queries, keys and values: all {recorded['layers']} layers of SmolLM2-135M ({heads}), recorded\n"
        f"on a text of {recorded['past']} tokens with 64 nodes. The worst layer is off by "
        f"{format_number(recorded['relative_error'])}, at most {format_number(recorded['max_error'])}."
    )


def _write_fp8(rows: Sequence[Mapping[str, Any]]) -> str:
    table = [
        (
            *(row["head_size"], row["group"], row["nodes"], f"{row['past']:,}", format_number(row["relative_error"])),
            *(format_number(row["error_against_causal"]), format_number(row["causal_instead_of_tree"])),
        )
        for row in rows
    ]
    names = ("head size", "group", "nodes", "past", "relative error", "against a causal mask", "causal against tree")
    return (
        "## A cache of fp8 values\n\n"
        "Keys and values stored as e4m3, queries in float16; against float32 attention on the *rounded* cache, so\n"
        "what is left is the kernel's own: it rounds queries and probabilities to fp8 as well, which costs 3 %. Where\n"
        "nodes times group is at most 32, another variant computes in half precision. Both read the tree's mask.\n\n"
        + markdown_table(names, table)
    )


def _write_alibi(rows: Sequence[Mapping[str, Any]]) -> str:
    table = [
        (
            *(f"`{row['transform']}`", row["content_dims"], row["extra_dims"], f"{row['length']:,}"),
            *(f"{row['logit_std']:g}", row["dtype"]),
            *(format_number(row["relative_error"]), format_number(row["relative_error_worst_head"])),
            *(format_number(row["kernel_alone"]), format_number(row["dropped_relative_error"])),
        )
        for row in rows
    ]
    names = (
        *("transform", "content dims", "extra dims", "tokens", "logit spread", "type", "relative error", "worst head"),
        *("kernel alone", "dropped"),
    )
    return (
        "## ALiBi, fitted and dropped\n\n"
        "32 heads, 64 tree nodes at the end of the tokens given, against exact ALiBi in float64. *Kernel alone* is\n"
        "the kernel's error on the fitted tensors. *Dropped* is what it computes when it gets queries and keys as an\n"
        "ALiBi model has them: as wrong as an output of zeros.\n\n" + markdown_table(names, table)
    )


def _write_ports(rows: Sequence[Mapping[str, Any]]) -> str:
    table = [
        (
            *(row["port"], f"`{row['fit']}`" if row["fit"] else "none", row["verdict"]),
            *(format_number(row["tree_error"]), f"{row['tokens_per_step']:.2f}", row["summary"].split(";")[0]),
        )
        for row in rows
    ]
    return (
        "## Whole ports\n\n"
        "`kernel: xqa`: Medusa with a tree, every token judged by the base; float16 unless said. Ports without ALiBi\n"
        "and fitted ones pass; the ALiBi models as they are fail, and the cause is named. Heads and head sizes are\n"
        "those of the real models; weights are random, except bloom-mini's.\n\n"
        + markdown_table(("port", "fit", "verdict", "tree error", "tokens per step", "in words"), table)
    )


def _write_times(rows: Sequence[Mapping[str, Any]]) -> str:
    table = [
        (
            *(f"{row['query_heads']} / {row['kv_heads']}", row["head_size"], row["past"]),
            *(format_number(row["microseconds"]), f"{row['bytes'] / 1e6:.1f}"),
            *(f"{row['bytes_per_second'] / 1e9:.0f}", f"{row['share_of_copy_rate']:.0%}"),
            format_number(row["torch_microseconds"]),
        )
        for row in rows
    ]
    names = (
        *("heads", "head size", "past", "us", "MB moved", "GB/s", "share of the copy rate"),
        "PyTorch's attention, us",
    )
    return (
        "## Time against bytes moved\n\n"
        "One call at batch 1 with 64 nodes in float16; median over CUDA graphs that walk through more cache than\n"
        "the card's L2 holds. Bytes are those of keys, values, queries and output; a plain copy on the same card\n"
        f"moves {rows[0]['copy_bytes_per_second'] / 1e12:.2f} TB/s. The kernel is bound by latency at these sizes,\n"
        "not by memory: twice the past costs far less than twice.\n\n" + markdown_table(names, table)
    )


def _geometry(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["head_size"], row["group"], row["nodes"], row["dtype"]


def _span(rows: Iterable[Mapping[str, Any]], dtype: str) -> str:
    found = sorted(row["rounding_only"] for row in rows if row["dtype"] == dtype)
    return f"{format_number(found[0])} to {format_number(found[-1])}"


def format_number(value: float) -> str:
    """Two significant digits below ten, whole numbers above."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def markdown_table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
