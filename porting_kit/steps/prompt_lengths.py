"""Lengths of the prompts: kept on one side of a threshold, and what they leave out said beside the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from porting_kit.errors import PortFileError


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


def keep_below(
    prompts: Sequence[Sequence[int]], new_tokens: int, threshold: int | None, draft_tokens: int = 0
) -> tuple[list[list[int]], str | None]:
    """Prompts cut from the front so that no text crosses a length threshold, and a sentence when one was cut.

    Beyond the threshold the rotary factors of all positions change (`BaseConfig.length_threshold`). Generation with a
    cache keeps the keys of before; one pass over the whole text has none of them, so it cannot judge a text that
    crosses. The choice is made for a batch as a whole, draft tokens included.

    Args:
        prompts: token ids.
        new_tokens: tokens that each text goes on for.
        threshold: tokens, prompt and answer together; None for no threshold.
        draft_tokens: of one step.

    Raises:
        PortFileError: no prompt of even one token stays below it.
    """
    if threshold is None:
        return [list(prompt) for prompt in prompts], None
    most = threshold - draft_tokens
    room = most - new_tokens
    if room < 1:
        smaller = f"alignment: {{new_tokens: {most // 2}}}" if most > 1 else "a smaller tree"
        raise PortFileError(
            "every text would cross the length at which the base's rotary factors change",
            expected=f"alignment.new_tokens below {most} ({threshold} less {draft_tokens} draft tokens)",
            found=new_tokens,
            next_step=f"write {smaller}",
        )
    count = sum(len(prompt) > room for prompt in prompts)
    if not count:
        return [list(prompt) for prompt in prompts], None
    said = f"{count} cut to their last {room} tokens: past {threshold} the base's rotary factors change (not covered)"
    return [list(prompt[-room:]) for prompt in prompts], said
