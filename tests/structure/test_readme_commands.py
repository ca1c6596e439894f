"""What the README tells a reader to type exists: make targets, commands, their options, the port file's fields."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
import yaml

from porting_kit.cli import app
from porting_kit.errors import PortFileError
from porting_kit.port import Port, make_port

BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def read_targets(makefile: str) -> set[str]:
    """The targets of a Makefile that `make help` lists."""
    return set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.MULTILINE))


def read_commands() -> dict[str, set[str]]:
    """The commands of porting-kit, those of a group under two words, each with its options."""
    commands = {}
    for name, command in typer.main.get_command(app).commands.items():
        commands |= {f"{name} {inner}": c for inner, c in getattr(command, "commands", {}).items()} or {name: command}
    return {
        name: {text for parameter in command.params for text in parameter.opts if text.startswith("-")}
        for name, command in commands.items()
    }


def read_typed(readme: str) -> list[str]:
    """What stands in code quotes, and the lines of code blocks."""
    blocks = [line for block in BLOCK.findall(readme) for line in block.splitlines()[1:-1]]
    return [*blocks, *re.findall(r"`([^`\n]+)`", BLOCK.sub("", readme))]


def find_readme_problems(readme: str, targets: set[str], commands: dict[str, set[str]]) -> list[str]:
    """One line for each thing to type that is not there, and for each command that is never named."""
    problems = []
    named = set()
    for typed in read_typed(readme):
        words = typed.split("#")[0].split()
        if words[:1] == ["make"]:
            asked = [word for word in words[1:] if re.fullmatch(r"[a-z][a-z0-9-]*", word)]
            problems += [f"make {word}: no such target" for word in asked if word not in targets]
        if words[:1] == ["porting-kit"] and len(words) > 1 and words[1][0].islower():
            pair = " ".join(words[1:3])
            name = pair if pair in commands else words[1]
            named.add(name)
            if name not in commands:
                problems.append(f"porting-kit {name}: no such command")
                continue
            options = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(words[2:]))
            problems += [f"porting-kit {name}: no option {text}" for text in options if text not in commands[name]]
    return problems + [f"porting-kit {name}: not in the README" for name in sorted(set(commands) - named)]


def read_port_example(readme: str) -> dict:
    """The YAML block of the README."""
    found = re.search(r"^```yaml\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    assert found, "the README shows no port file"
    return yaml.safe_load(found.group(1))


def test_what_the_readme_says_to_type_exists(root):
    readme = (root / "README.md").read_text(encoding="utf-8")
    targets = read_targets((root / "Makefile").read_text(encoding="utf-8"))
    problems = find_readme_problems(readme, targets, read_commands())
    assert not problems, "\n".join(problems)


def test_the_port_file_of_the_readme_is_valid_and_shows_every_field(root):
    readme = (root / "README.md").read_text(encoding="utf-8")
    example = read_port_example(readme)
    make_port(example, folder=Path())
    # Fields that most ports do without are shown as comments.
    rare = set(re.findall(r"^# (\w+):", readme, re.MULTILINE))
    assert set(example) | rare == set(Port.model_fields) - {"folder"}


def test_a_wrong_port_example_is_refused():
    with pytest.raises(PortFileError, match="tp_sise"):
        make_port(read_port_example("```yaml\nname: a\nbase: b\nheads: c\ntarget: {tp_sise: 2}\n```\n"), folder=Path())


README = (
    "Run `make test` or\n\n```\nmake demo   # a demo\n```\n`porting-kit align PORT.yaml [--json] [-p name=value ...]`\n"
)
COMMANDS = {"align": {"--json", "-p", "--parameter"}}


@pytest.mark.parametrize(
    ("readme", "targets", "commands", "problem"),
    [
        (README, {"test"}, COMMANDS, "make demo: no such target"),
        (README, {"demo"}, COMMANDS, "make test: no such target"),
        (README, {"demo", "test"}, {}, "porting-kit align: no such command"),
        (README, {"demo", "test"}, {"align": {"-p"}}, "porting-kit align: no option --json"),
        (README, {"demo", "test"}, {**COMMANDS, "report": set()}, "porting-kit report: not in the README"),
    ],
)
def test_something_that_cannot_be_typed_is_found(readme, targets, commands, problem):
    assert find_readme_problems(README, {"demo", "test"}, COMMANDS) == []
    assert find_readme_problems(readme, targets, commands) == [problem]
