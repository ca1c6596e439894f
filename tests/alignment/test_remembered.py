"""One pass over a text gives its logits and its states, to the bit what two passes give."""

from collections import Counter

import pytest
import torch

from porting_kit.alignment.fit import ContextOracle
from porting_kit.alignment.reference import Reference
from porting_kit.alignment.remembered import RememberedOracle
from porting_kit.alignment.run import AlignmentOptions, align_port_outputs


def count_texts(monkeypatch, owner, method):
    """How often a text is run, whole, by a method of this class."""
    counts, run = Counter(), getattr(owner, method)

    def counting(self, text, **options):
        counts[tuple(text)] += 1
        return run(self, text, **options)

    monkeypatch.setattr(owner, method, counting)
    return counts


@pytest.mark.parametrize("side", ["base", "port"])
def test_both_come_from_one_pass_and_are_what_two_give(side, port_of, monkeypatch):
    port = port_of("llama")
    source = port.reference if side == "base" else ContextOracle(port.state.build())
    texts = port.prompts[:2]
    logits, states = source.logits(texts), [source.read(text)[1] for text in texts]
    counts = count_texts(monkeypatch, type(source), "read")
    known = RememberedOracle(source, texts)
    for _ in range(2):
        for kept, own in ((known.logits(texts), logits), (known.hidden_states(texts), states)):
            assert all(torch.equal(one, other) for one, other in zip(kept, own, strict=True))
    assert set(counts.values()) == {1}
    for _ in range(2):
        known.logits([port.prompts[2]])
    assert counts[tuple(port.prompts[2])] == 2, "other texts are not kept"


def test_a_rank_without_states_has_none():
    class Source:
        vocab_size = 5

        def read(self, text):
            return torch.zeros(len(text), 5), None

    known = RememberedOracle(Source(), [[1, 2]])
    assert known.hidden_states([[1, 2]]) is None
    assert known.logits([[1, 2]])[0].shape == (2, 5)


@pytest.mark.parametrize("notes", [(), ("an approximate fit",)])
def test_an_alignment_runs_each_emitted_text_once(notes, port_of, monkeypatch):
    """On the port's side for the logits, the comparison of the fit and the states of its heads; on the base's for the
    choice of differences, as it is, and rounded: once for the noise of the logits and for that of the heads."""
    port = port_of("llama")
    options = AlignmentOptions(new_tokens=8, batch_sizes=(1,), differences=port.differences, fit_notes=notes)
    on_port = count_texts(monkeypatch, ContextOracle, "read")
    on_base = count_texts(monkeypatch, Reference, "run")
    result = align_port_outputs(
        port.reference, port.state.build(), port.prompts, port.state.tree, heads=port.heads, options=options
    )
    assert result.verdict.value == "pass", result.summary
    texts = [(*prompt, *text.tokens) for prompt, text in zip(result.prompts, result.texts, strict=True)]
    assert {on_port[text] for text in texts} == {1}
    chosen, plain, rounded = 1, 1, 1
    assert {on_base[text] for text in texts} == {chosen + plain + rounded}
