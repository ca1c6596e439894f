"""A user's existing serving files, as far as Medusa is concerned: Triton's config.pbtxt, scripts and YAML.

Both are read as text: no server, no shell and no protobuf library is needed, and nothing in them is run.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from porting_kit.errors import CapturedFileError
from porting_kit.releases.facts import words
from porting_kit.releases.serve_facts import OTHER_COMMANDS, PROGRAM

PARAMETER = re.compile(
    r"parameters\s*:?\s*\{\s*key\s*:\s*\"(?P<key>[^\"]+)\"\s*,?\s*value\s*:?\s*\{\s*string_value\s*:\s*"
    r"\"(?P<value>(?:[^\"\\]|\\.)*)\"\s*,?\s*\}\s*,?\s*\}"
)
COMMENT = re.compile(r"(?P<text>\"(?:[^\"\\\n]|\\.)*\")|#.*")
"""A comment, or a text in quotes, in which # is a letter like any other."""
TOP_NUMBER = re.compile(r"^\s*(?P<key>max_batch_size)\s*:\s*(?P<value>\S+)", re.MULTILINE)
DECOUPLED = re.compile(r"decoupled\s*:\s*(?P<value>\S+?)[\s}]")
PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
PROGRAMS = ("trtllm-build", "run.py", PROGRAM)
LLM_OPTIONS = frozenset(
    words(
        "build_config kv_cache_config max_batch_size max_beam_width max_num_tokens max_seq_len "
        "pipeline_parallel_size scheduler_config speculative_config tensor_parallel_size"
    )
)
"""Keys by which a YAML file is one of LLM options (llmapi/llm_args.py; documentation of trtllm-serve, 1.1.0)."""
PBTXT_ONLY = re.compile(r"^\s*(?:backend|platform)\s*:\s*\"|^\s*model_transaction_policy\s*:?\s*\{", re.MULTILINE)
"""Lines that only Triton's model configuration has, for a file whose name does not say what it is."""
ENGINE_MODEL = frozenset(
    words(
        "batch_scheduler_policy batching_strategy decoding_mode end_id executor_worker_path gpt_model_path "
        "gpt_model_type kv_cache_free_gpu_mem_fraction max_attention_window_size max_beam_width "
        "max_tokens_in_paged_kv_cache medusa_choices"
    )
)
"""Parameters by which a config.pbtxt is the engine's, not that of the models around it (tensorrtllm_backend
all_models/inflight_batcher_llm: ensemble, preprocessing, postprocessing, tensorrt_llm_bls)."""
OTHER_MODEL = re.compile(r"^\s*platform\s*:\s*\"ensemble\"", re.MULTILINE)
ENGINE_BACKEND = re.compile(r"^\s*backend\s*:\s*\"tensorrtllm\"", re.MULTILINE)
FORMATS = {".pbtxt": "pbtxt", ".yaml": "YAML", ".yml": "YAML", ".sh": "script", ".bash": "script"}
WORD_LISTS = ("entrypoint", "command", "args")
"""Keys whose lists make one command, in this order: `command` and `args` of Kubernetes, the others of compose."""
WORDS_IN_A_LINE = re.compile(r"\[\s*[\"'].*\]")


@dataclass(frozen=True)
class FoundCommand:
    """A command in a script or a YAML file.

    Args:
        program: one of `PROGRAMS`.
        arguments: the words behind it.
        line: its first line's number, from 1.
    """

    program: str
    arguments: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class ServingFile:
    """What a serving file holds for Medusa.

    Args:
        settings: parameters by name, of a config.pbtxt, or of each that is a text within YAML.
        commands: of a script or YAML.
        options: LLM options of a YAML file without commands; empty for none.
    """

    settings: tuple[dict[str, str], ...]
    commands: tuple[FoundCommand, ...]
    options: dict[str, Any]


def read_serving_file(path: str | Path) -> ServingFile:
    """Settings and commands of a file, read as what its name says, else as what its text looks like.

    Raises:
        CapturedFileError: see `read_text_file`; or the file holds neither.
    """
    text = read_text_file(path)
    form = next((FORMATS[suffix] for suffix in reversed(Path(path).suffixes) if suffix in FORMATS), None)
    if form is None:
        form = "pbtxt" if PARAMETER.search(text) or PBTXT_ONLY.search(text) else "text"
    nodes = _read_yaml(text) if form in ("YAML", "text") else []
    texts = [text] if form == "pbtxt" else [one for node in nodes for one in _find_pbtxt_texts(node)]
    settings = tuple(filter(None, map(read_pbtxt, filter(_is_of_engine, texts))))
    commands = () if form == "pbtxt" else tuple(find_commands(text))
    options = _read_options(text, nodes) if not settings and not commands else {}
    if not settings and not commands and not options:
        raise CapturedFileError(
            "the file holds nothing to check",
            expected=f"parameters of a config.pbtxt, commands of {', '.join(PROGRAMS)}, or YAML of LLM options",
            found=_describe(form, text, nodes),
            where=path,
            next_step="name the file that holds them; of other programs and settings nothing is checked",
        )
    return ServingFile(settings, commands, options)


def _read_options(text: str, nodes: list[yaml.Node]) -> dict[str, Any]:
    """The mapping of a YAML file of LLM options, told by one of their names at its top."""
    keys = {key.value for node in nodes[:1] if isinstance(node, yaml.MappingNode) for key, _ in node.value}
    if len(nodes) != 1 or not keys & LLM_OPTIONS:
        return {}
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, TypeError):
        return {}


def _is_of_engine(text: str) -> bool:
    """Whether a config.pbtxt is that of the engine's model; one without parameters may be."""
    names = read_pbtxt(text).keys() - {"max_batch_size", "decoupled"}
    is_other = OTHER_MODEL.search(text) or (names and not names & ENGINE_MODEL and not ENGINE_BACKEND.search(text))
    return not is_other


def _describe(form: str, text: str, nodes: list[yaml.Node]) -> str:
    """What a file is that holds nothing to check."""
    if form == "pbtxt" and not _is_of_engine(text):
        return "a config.pbtxt of another model than the engine's"
    if form == "pbtxt":
        return "a config.pbtxt without parameters"
    keys = [key.value for node in nodes if isinstance(node, yaml.MappingNode) for key, _ in node.value]
    if keys:
        return f"YAML with {', '.join(map(str, keys[:10]))} at its top"
    return f"a {form} without such commands" if form != "YAML" else "YAML without such commands"


def read_text_file(path: str | Path) -> str:
    """A serving file's text. Raises CapturedFileError: missing, empty, or no text."""
    file = Path(path)
    if not file.is_file():
        raise CapturedFileError(
            "the serving file does not exist",
            expected="a file",
            found="a folder" if file.is_dir() else "nothing",
            where=file,
            next_step="correct the path behind --check",
        )
    data = file.read_bytes()
    if not data.strip():
        raise CapturedFileError(
            "the serving file is empty",
            expected="a config.pbtxt, a script or YAML",
            found=f"{len(data)} bytes",
            where=file,
            next_step="name the file that the server or the shell reads",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CapturedFileError(
            "the serving file is no text",
            expected="UTF-8 text",
            found=error,
            where=file,
            next_step="name a config.pbtxt, a script or YAML",
        ) from None


def read_pbtxt(text: str) -> dict[str, str]:
    """Parameters of a config.pbtxt by name, with `max_batch_size` and `decoupled` of the model itself.

    Placeholders of the template (`${decoding_mode}`) stay as they are: the caller decides what they mean.
    """
    text = COMMENT.sub(lambda match: match["text"] or "", text)
    found = {match["key"]: match["value"] for match in PARAMETER.finditer(text)}
    top = TOP_NUMBER.search(text)
    if top:
        found["max_batch_size"] = top["value"]
    decoupled = DECOUPLED.search(text)
    if decoupled:
        found["decoupled"] = decoupled["value"].lower()
    return found


def find_placeholders(settings: dict[str, str]) -> dict[str, str]:
    """Parameter -> name of the placeholder that was never filled in."""
    return {key: match[1] for key, value in settings.items() if (match := PLACEHOLDER.search(value))}


def _read_yaml(text: str) -> list[yaml.Node]:
    """The documents of a YAML text; empty for a script, a template that is no YAML yet, or YAML that holds itself."""
    try:
        documents = [node for node in yaml.compose_all(text, yaml.SafeLoader) if node is not None]
        sum(map(_count_nodes, documents))
    except (yaml.YAMLError, RecursionError):
        return []
    return documents if documents and not isinstance(documents[0], yaml.ScalarNode) else []


def _count_nodes(node: yaml.Node) -> int:
    """Nodes in a node and below it. Raises RecursionError for one that holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    below = [item for pair in node.value for item in pair] if isinstance(node, yaml.MappingNode) else node.value
    return 1 + sum(map(_count_nodes, below))


def _find_pbtxt_texts(node: yaml.Node) -> Iterator[str]:
    """Texts under a key that is named like a config.pbtxt, as in a ConfigMap of Kubernetes."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _find_pbtxt_texts(item)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(value, yaml.ScalarNode) and str(key.value).endswith(".pbtxt"):
                yield value.value
            yield from _find_pbtxt_texts(value)


def find_commands(text: str) -> list[FoundCommand]:
    """Build, run and serve commands in a shell script, or in a YAML file such as those of Kubernetes and compose.

    A script's lines are joined where they end in a backslash. A command may also be a list of words: a YAML list, with
    the lists of `entrypoint`, `command` and `args` beside each other taken as one, or a list within one line, as in a
    Dockerfile.
    """
    documents = _read_yaml(text)
    found = [one for node in documents for one in _find_in_node(node)] if documents else _find_in_script(text, 1)
    return [one for one in found if one.program != PROGRAM or not {*one.arguments[:1]} & OTHER_COMMANDS]


def _find_in_node(node: yaml.Node) -> Iterator[FoundCommand]:
    """Commands in a YAML node: its texts as scripts, its lists of texts as commands."""
    if isinstance(node, yaml.ScalarNode):
        is_block = node.style in ("|", ">")
        yield from _find_in_script(node.value, node.start_mark.line + (2 if is_block else 1))
    elif isinstance(node, yaml.SequenceNode):
        if node.value and all(isinstance(item, yaml.ScalarNode) for item in node.value):
            yield from _find_in_words(node.value)
        else:
            for item in node.value:
                yield from _find_in_node(item)
    elif isinstance(node, yaml.MappingNode):
        values = {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}
        lists = [values.pop(key) for key in WORD_LISTS if isinstance(values.get(key), yaml.SequenceNode)]
        yield from _find_in_words([item for one in lists for item in one.value if isinstance(item, yaml.ScalarNode)])
        for value in values.values():
            yield from _find_in_node(value)


def _find_in_words(items: list[yaml.ScalarNode]) -> Iterator[FoundCommand]:
    """The command that a list of words is; without one, commands in its texts, as behind `sh -c`."""
    for place, item in enumerate(items):
        program = _name_program(item.value)
        if program is not None:
            arguments = tuple(word.value for word in items[place + 1 :])
            yield FoundCommand(program, arguments, item.start_mark.line + 1)
            return
    for item in items:
        yield from _find_in_node(item)


def _find_in_script(text: str, first_line: int) -> Iterator[FoundCommand]:
    joined: list[tuple[int, str]] = []
    start, parts = first_line, []
    for number, line in enumerate(text.splitlines(), start=first_line):
        if not parts:
            start = number
        parts.append(line.rstrip().removesuffix("\\"))
        if not line.rstrip().endswith("\\"):
            joined.append((start, " ".join(parts)))
            parts = []
    if parts:
        joined.append((start, " ".join(parts)))
    for number, line in joined:
        words = _split_list(line) or _split_line(line)
        for place, word in enumerate(words):
            program = _name_program(word)
            if program is not None:
                yield FoundCommand(program, tuple(_until_operator(words[place + 1 :])), number)


def _split_list(line: str) -> list[str]:
    """The words of a list of texts in a line, such as `CMD ["trtllm-build", "--strip_plan"]`; empty for none."""
    match = WORDS_IN_A_LINE.search(line.split("#", maxsplit=1)[0])
    try:
        found = ast.literal_eval(match[0]) if match else []
    except (SyntaxError, ValueError):
        found = []
    return found if all(isinstance(word, str) for word in found) else []


def _split_line(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []  # a quotation that goes on over lines: no command of ours


def _name_program(word: str) -> str | None:
    return next((name for name in PROGRAMS if word == name or word.endswith(f"/{name}")), None)


def _until_operator(words: list[str]) -> Iterator[str]:
    """The words of one command: up to a pipe, a redirection or the next command."""
    for word in words:
        if word in ("|", "||", "&&", ";", "&") or re.fullmatch(r"\d?[<>]+.*", word):
            return
        if word.endswith(";"):
            yield word.removesuffix(";")
            return
        yield word
