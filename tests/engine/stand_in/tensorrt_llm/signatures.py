"""The recorded signatures: names only, as `recorded.json` has them from the releases' own sources."""

import inspect
import json
import os
from pathlib import Path

RELEASE = os.environ["STAND_IN_RELEASE"]
RECORDED = json.loads((Path(__file__).parents[1] / "recorded.json").read_text())[RELEASE]
KEYWORD = inspect.Parameter.KEYWORD_ONLY
FIRST = inspect.Parameter.POSITIONAL_OR_KEYWORD


def offers(name):
    """Whether the release has a class of this name."""
    return any(entry.split(".")[0] == name for entry in RECORDED)


def words_of(name):
    """The recorded names of an entry; none for one that the release has not."""
    return RECORDED.get(name, "").split()


def is_from(number):
    """Whether the release is this one or a later one."""
    return tuple(map(int, RELEASE.split(".")[:2])) >= number


def is_late():
    """From 1.0 on the engine's LLM stands in a module of its own."""
    return is_from((1, 0))


def signature_of(name):
    """The signature of a recorded function or the fields of a recorded class, every one with a default."""
    names = RECORDED[name].split()
    parameters = [inspect.Parameter(word, FIRST, default=None) for word in names if word != "**"]
    if "**" in names:
        parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def bind(name, args, kwargs):
    """The arguments by name; TypeError for one that the release does not take, as Python itself would say it."""
    bound = signature_of(name).bind(*args, **kwargs).arguments
    return {**bound.pop("kwargs", {}), **bound}
