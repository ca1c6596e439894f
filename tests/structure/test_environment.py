"""The three lists of dependencies agree: pyproject.toml, environment.yml and the pinned versions."""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 has no tomllib")

PYTHONS = ("3.10", "3.11", "3.12")


def read_project(root: Path) -> dict:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read_installed_extras(root: Path) -> tuple[str, ...]:
    """The extras that `make` installs."""
    found = re.search(r"^EXTRAS\s*:=\s*(\S+)$", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert found, "the Makefile has no line EXTRAS := ..."
    return tuple(found.group(1).split(","))


def required_lines(project: dict, extras: tuple[str, ...]) -> list[str]:
    """The requirements of the package and of the extras, each once, in order."""
    lines = list(project["dependencies"])
    for extra in extras:
        lines += [line for line in project["optional-dependencies"][extra] if line not in lines]
    return lines


def find_environment_problems(environment: dict, project: dict, extras: tuple[str, ...]) -> list[str]:
    """How environment.yml differs from pyproject.toml."""
    packages = [item for item in environment["dependencies"] if isinstance(item, str)]
    by_pip = next(item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    listed = [line for line in by_pip if not line.startswith("-")]
    expected = required_lines(project, extras)
    problems = [f"{line}: not in environment.yml" for line in expected if line not in listed]
    problems += [f"{line}: not in pyproject.toml" for line in listed if line not in expected]
    problems += [f"{line}: listed twice" for line in sorted(set(listed)) if listed.count(line) > 1]
    if f"python{project['requires-python']}" not in packages:
        problems.append(f"python{project['requires-python']}: not in environment.yml")
    options = ("-c .ci/constraints.txt", "-e .")
    problems += [f"{line}: missing in the pip section" for line in options if line not in by_pip]
    return problems


def read_pins(text: str) -> list[Requirement]:
    """The lines of a constraints file. Raises ValueError on anything but `name==version [; marker]`."""
    pins = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            pin = Requirement(line)
            if pin.url or pin.extras or not re.fullmatch(r"==[^*+,]+", str(pin.specifier)):
                raise ValueError(f"not an exact version without address and build suffix: {line}")
            pins.append(pin)
    return pins


def find_pin_problems(pins: list[Requirement], lines: list[str], python: str) -> list[str]:
    """Requirements whose pinned version, for one Python, is missing, doubled or outside the bounds."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    active: dict[str, list[str]] = {}
    for pin in pins:
        if pin.marker is None or pin.marker.evaluate(environment):
            active.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier)[2:])
    problems = [f"{name}: pinned {len(found)} times for {python}" for name, found in active.items() if len(found) > 1]
    for line in lines:
        requirement = Requirement(line)
        found = active.get(canonicalize_name(requirement.name), [])
        if not found:
            problems.append(f"{requirement.name}: not pinned for {python}")
        problems += [
            f"{requirement.name}: {version} is outside {requirement.specifier}"
            for version in found
            if not requirement.specifier.contains(version, prereleases=True)
        ]
    return problems


def find_patch_problems(
    installed: dict[str, tuple[str, str | None]], pins: list[Requirement], python: str
) -> list[str]:
    """Pinned packages that the first patch release of a Python line cannot install, from what they themselves say."""
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    active = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(environment)]
    exact = {(canonicalize_name(pin.name), str(pin.specifier)[2:]) for pin in active}
    return [
        f"{name}: {version} needs Python {requires}"
        for name, (version, requires) in installed.items()
        if (name, version) in exact and requires and not SpecifierSet(requires).contains(f"{python}.0")
    ]


def test_environment_equals_pyproject(root):
    environment = yaml.safe_load((root / "environment.yml").read_text(encoding="utf-8"))
    problems = find_environment_problems(environment, read_project(root), read_installed_extras(root))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_are_within_the_bounds(root, python):
    pins = read_pins((root / ".ci" / "constraints.txt").read_text(encoding="utf-8"))
    problems = find_pin_problems(pins, required_lines(read_project(root), read_installed_extras(root)), python)
    assert not problems, "\n".join(problems)


def test_the_pins_serve_the_first_patch_release(root):
    pins = read_pins((root / ".ci" / "constraints.txt").read_text(encoding="utf-8"))
    installed = {
        canonicalize_name(item.metadata["Name"]): (item.version.split("+")[0], item.metadata["Requires-Python"])
        for item in distributions()
    }
    problems = find_patch_problems(installed, pins, ".".join(map(str, sys.version_info[:2])))
    assert not problems, "\n".join(problems)


def test_the_pinned_extras_are_those_that_make_installs(root):
    written = re.search(r'^EXTRAS = "(.+)"$', (root / ".ci" / "pin.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert written
    assert tuple(written.group(1).split(",")) == read_installed_extras(root)


def test_the_stated_python_is_one_that_is_pinned(root):
    assert SpecifierSet(read_project(root)["requires-python"]).contains(PYTHONS[0])


PROJECT = {
    "requires-python": ">=3.10",
    "dependencies": ["torch>=2.4", "numpy>=1.26"],
    "optional-dependencies": {"dev": ["pytest>=8.2", "torch>=2.4"]},
}
PIP = ["-c .ci/constraints.txt", "torch>=2.4", "numpy>=1.26", "pytest>=8.2", "-e ."]


def make_environment(pip: list[str], python: str = "python>=3.10") -> dict:
    return {"dependencies": [python, "pip", {"pip": pip}]}


def test_an_equal_environment_passes():
    assert find_environment_problems(make_environment(PIP), PROJECT, ("dev",)) == []


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (make_environment([line for line in PIP if line != "numpy>=1.26"]), "numpy>=1.26: not in environment.yml"),
        (make_environment([*PIP, "pandas"]), "pandas: not in pyproject.toml"),
        (make_environment([line.replace("2.4", "2.5") for line in PIP]), "torch>=2.5: not in pyproject.toml"),
        (make_environment([*PIP, "numpy>=1.26"]), "numpy>=1.26: listed twice"),
        (make_environment(PIP, "python>=3.9"), "python>=3.10: not in environment.yml"),
        (make_environment(PIP[1:]), "-c .ci/constraints.txt: missing in the pip section"),
    ],
)
def test_a_different_environment_is_found(environment, problem):
    assert problem in find_environment_problems(environment, PROJECT, ("dev",))


PINS = 'torch==2.13.0\nnumpy==2.2.6 ; python_version < "3.11"\nnumpy==2.4.6 ; python_version >= "3.11"\n'


@pytest.mark.parametrize(
    ("pins", "problem"),
    [
        (PINS.replace("torch==2.13.0\n", ""), "torch: not pinned for 3.11"),
        (PINS.replace("2.13.0", "2.3.1"), "torch: 2.3.1 is outside >=2.4"),
        (PINS.replace('python_version < "3.11"', 'python_version < "3.12"'), "numpy: pinned 2 times for 3.11"),
        (PINS.replace('python_version >= "3.11"', 'python_version >= "3.12"'), "numpy: not pinned for 3.11"),
    ],
)
def test_a_wrong_pin_is_found(pins, problem):
    assert find_pin_problems(read_pins(PINS), PROJECT["dependencies"], "3.11") == []
    assert problem in find_pin_problems(read_pins(pins), PROJECT["dependencies"], "3.11")


@pytest.mark.parametrize("line", ["torch==2.13.0+cpu", "torch>=2.4", "torch==2.*", "torch @ file:///torch.whl"])
def test_a_pin_that_is_no_exact_version_is_refused(line):
    with pytest.raises(ValueError, match="not an exact version"):
        read_pins(line)


def test_a_pin_that_needs_a_later_patch_release_is_found():
    installed = {"soupsieve": ("4.1.3", ">=3.11.5"), "torch": ("2.13.0", ">=3.10"), "numpy": ("1.0", ">=3.14")}
    pins = read_pins("soupsieve==4.1.3\ntorch==2.13.0\nnumpy==2.4.6\n")
    assert find_patch_problems(installed, pins, "3.11") == ["soupsieve: 4.1.3 needs Python >=3.11.5"]
    assert find_patch_problems(installed, pins, "3.12") == []
    later = read_pins('soupsieve==2.10 ; python_version < "3.12"\nsoupsieve==4.1.3 ; python_version >= "3.12"\n')
    assert find_patch_problems(installed, later, "3.11") == []


def test_versions_of_several_pythons_become_lines_with_markers(root):
    spec = spec_from_file_location("pin", root / ".ci" / "pin.py")
    pin = module_from_spec(spec)
    spec.loader.exec_module(pin)
    resolved = {
        "3.12": {"same": "1", "new": "3", "each": "3"},
        "3.10": {"same": "1", "old": "1", "each": "1", "new": "1"},
        "3.11": {"same": "1", "new": "3", "each": "2"},
    }
    lines = pin.merge_versions(resolved)
    assert lines == [
        'each==1 ; python_version < "3.11"',
        'each==2 ; python_version >= "3.11" and python_version < "3.12"',
        'each==3 ; python_version >= "3.12"',
        'new==1 ; python_version < "3.11"',
        'new==3 ; python_version >= "3.11"',
        "old==1",
        "same==1",
    ]
    for python, found in resolved.items():
        wanted = [f"{name}=={version}" for name, version in found.items()]
        assert find_pin_problems(read_pins("\n".join(lines)), wanted, python) == []
