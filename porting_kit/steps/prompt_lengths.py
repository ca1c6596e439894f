"""What the lengths of an alignment's prompts leave out, said beside the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def note_lengths(prompts: Sequence[Sequence[int]], new_tokens: int, thresholds: Mapping[str, int | None]) -> str | None:
    """What the prompts' lengths leave out, as a sentence; None when they leave out nothing.

    A batch needs prompts of unequal lengths to show a wrong index, and a length at which a model changes needs texts on
    both sides of it.

    Args:
        prompts: token ids.
        new_tokens: tokens that each text goes on for.
        thresholds: what acts beyond a length -> the length in tokens; None where it never acts.
    """
    shortest, longest = min(map(len, prompts)), max(map(len, prompts)) + new_tokens
    said = []
    if len(prompts) == 1:
        said.append("one prompt: batches are not covered")
    elif len(set(map(len, prompts))) == 1:
        said.append("prompts of one length: batches of unequal lengths are not covered")
    for what, tokens in thresholds.items():
        if tokens is None:
            continue
        if longest <= tokens:
            said.append(f"no text reaches {tokens} tokens, beyond which {what}: longer texts are not covered")
        elif shortest > tokens:
            said.append(f"every text is longer than {tokens} tokens, beyond which {what}: shorter ones are not covered")
        else:
            said.append(f"texts on both sides of {tokens} tokens, beyond which {what}")
    return "; ".join(said) or None
