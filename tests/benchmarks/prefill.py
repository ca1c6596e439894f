"""Time the emulator against Hugging Face's own forward on the same weights, side by side.

Run `python -m tests.benchmarks.prefill [--quick] [--json] [--source TREE]`. Each round times both sides one after the
other, so that a busy machine slows both; the ratio is the median of the rounds' ratios.

- prefill: one prompt, logits of its last token on both sides;
- decode: one token after the prompt; tree: 64 nodes after the prompt, against Hugging Face's forward of 64 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from porting_kit.emulator import open_emulator
from porting_kit.source_tree import open_source_tree
from tests.emulator.toy_models import ToySize, build_case

# hidden size, layers, query heads, key/value heads, MLP width, vocabulary
SIZES = {"quick": (256, 2, 8, 2, 1024, 2000), "full": (1024, 6, 16, 4, 4096, 8000)}


def measure_ratio(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Median seconds of both, and the median of the rounds' ratios ours / theirs."""
    samples = []
    for function in (ours, theirs):
        function()
    for index in range(rounds):
        pair = {}
        # The order alternates, so that a warm cache favours neither side.
        for function in (ours, theirs) if index % 2 else (theirs, ours):
            started = time.perf_counter()
            function()
            pair[function] = time.perf_counter() - started
        samples.append((pair[ours], pair[theirs]))
    return {
        "emulator_seconds": statistics.median(sample[0] for sample in samples),
        "transformers_seconds": statistics.median(sample[1] for sample in samples),
        "ratio": statistics.median(sample[0] / sample[1] for sample in samples),
        "rounds": rounds,
    }


def measure_family(source: str, family: str, size: str, tokens: int, rounds: int) -> dict[str, Any]:
    """All ratios of one family."""
    E, L, H, K, inner, V = SIZES[size]
    reference, config, tensors = build_case(family, ToySize(E, L, H, K, inner, V, tokens + 128))
    model = open_emulator(open_source_tree(source)).build_model(config, tensors)
    prompt = torch.randint(0, V, (tokens,), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(1, tokens + 128)

    def prefill_emulator() -> None:
        model.prefill([prompt], cache)

    def prefill_reference() -> Any:
        return reference(prompt[None], use_cache=True, logits_to_keep=1)

    results = {"prefill": measure_ratio(prefill_emulator, prefill_reference, rounds)}
    past = prefill_reference().past_key_values
    for name, nodes in (("decode", 1), ("tree", 64)):
        draft = prompt[:nodes][None]

        def decode_emulator(draft: torch.Tensor = draft, nodes: int = nodes) -> None:
            if nodes == 1:
                model.decode(draft, cache)
                return
            model.decode(draft, cache, position_offsets=torch.arange(nodes), packed_mask=pack_chain(nodes))

        def decode_reference(draft: torch.Tensor = draft, nodes: int = nodes) -> None:
            reference(draft, past_key_values=past, use_cache=True)
            past.crop(-nodes)

        if nodes == 1 or has_tree_input(model):
            results[name] = measure_ratio(decode_emulator, decode_reference, rounds * 3)
    return {"family": family, "size": size, "tokens": tokens, **results}


def has_tree_input(model: Any) -> bool:
    """Whether the tree's own model passes a draft tree on (an unpatched one does not)."""
    import inspect

    return any(
        name.startswith(("spec_decoding", "medusa"))
        for name in inspect.signature(model.module.transformer.forward).parameters
    )


def pack_chain(nodes: int) -> torch.Tensor:
    """The packed mask of a chain: every node sees itself and all before it, int32 [N, W]."""
    visible = torch.ones(nodes, -(-nodes // 32) * 32, dtype=torch.int64).tril()
    words = (visible.view(nodes, -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--source", default="bundled", help="source tree whose models run")
    parser.add_argument("--family", action="append", help="llama, bloom ... (default: both)")
    parser.add_argument("--tokens", type=int, help="prompt length")
    options = parser.parse_args(arguments)
    size = "quick" if options.quick else "full"
    tokens = options.tokens or (256 if options.quick else 512)
    rounds = 7 if options.quick else 9
    torch.set_grad_enabled(False)
    rows = [
        measure_family(options.source, family, size, tokens, rounds) for family in options.family or ("llama", "bloom")
    ]
    document = {"torch": torch.__version__, "threads": torch.get_num_threads(), "source": options.source, "rows": rows}
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        for row in rows:
            for phase in ("prefill", "decode", "tree"):
                if phase in row:
                    print(f"{row['family']:8s} {phase:8s} ratio {row[phase]['ratio']:.2f}", file=sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
