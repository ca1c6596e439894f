"""Read a model definition into the parts that matter for passing an argument through it.

What is kept: classes with their bases and attributes, methods with their signatures, calls with their arguments, and
loops over attributes; each with the text offsets where something could be inserted. What the parts mean is decided in
`flow`. Nothing is executed. Names are resolved through the file's own imports, so an alias is not mistaken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from ..errors import PatchError


@dataclass(frozen=True)
class Arguments:
    """Where the arguments of one signature or call stand in the text.

    Args:
        first: offset of the first argument, None when there is none.
        last: offset just behind the last argument after which a keyword may be added.
        has_comma: whether a comma follows it.
        end: offset just behind that comma, or `last` when there is none.
        one_per_line: whether the arguments are spread over several lines.
        column: column of the first argument.
    """

    first: int | None
    last: int
    has_comma: bool
    end: int
    one_per_line: bool
    column: int


@dataclass(frozen=True)
class Call:
    """One call: its callee without white space ("self.layers.forward"), its arguments, and its line."""

    callee: str
    positional: tuple[str, ...]
    keywords: dict[str, str]
    starred: tuple[str, ...]
    line: int
    arguments: Arguments


@dataclass(frozen=True)
class Method:
    """One method.

    Args:
        parameters: its named parameters.
        swallows: the name of its `**` parameter, None when it has none.
        calls: every call in its body.
        loops: loop variable -> names that the loop runs over ("self.layers", or "self" itself).
        text: its source text.
    """

    name: str
    line: int
    parameters: tuple[str, ...]
    swallows: str | None
    arguments: Arguments
    calls: tuple[Call, ...]
    loops: dict[str, frozenset[str]]
    text: str


@dataclass(frozen=True)
class ModelClass:
    """One class statement.

    Args:
        bases: names of its bases, as the modules that define them know them.
        methods: its methods by name.
        built: attribute -> names of the classes that its value is built from, one set a construction.
        keywords: attribute -> keyword arguments (as text) of the outermost call that builds it.
    """

    name: str
    line: int
    bases: tuple[str, ...]
    methods: dict[str, Method]
    built: dict[str, list[frozenset[str]]]
    keywords: dict[str, list[dict[str, str]]]


@dataclass(frozen=True)
class ModelFile:
    """A parsed model definition; `imported` maps each imported name to (module, name there)."""

    source: str
    classes: dict[str, ModelClass]
    imported: dict[str, tuple[str, str]]
    newline: str = "\n"


@lru_cache(maxsize=8)
def read_model_file(source: str, file: str) -> ModelFile:
    """Parse a model definition; the result is shared between calls and must not be changed.

    Raises:
        PatchError: the text is no Python, or defines a class or method twice.
    """
    try:
        module = cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise PatchError(
            "a model definition cannot be parsed",
            expected="Python source",
            found=error.message,
            where=f"{file}:{error.raw_line}",
            next_step="check the file; a source tree must be unmodified Python",
        ) from error
    wrapper = _PositionWrapper(module, unsafe_skip_copy=True)
    reader = _Reader(source, file, module, wrapper.resolve(PositionProvider))
    return reader.read()


class _PositionWrapper(MetadataWrapper):
    """Resolves positions without the walk over all nodes that providers of other kinds need: half the time."""

    def visit_batched(self, visitors, before_visit=None, after_leave=None):
        visitors = list(visitors)
        return super().visit_batched(visitors, before_visit, after_leave) if visitors else self.module


@dataclass
class _Reader:
    source: str
    file: str
    module: cst.Module
    positions: dict[cst.CSTNode, CodeRange]
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)
    line_starts: list[int] = field(default_factory=list)

    def read(self) -> ModelFile:
        self.line_starts = [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", self.source))]
        for node in _statements(self.module.body):
            if isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
                origin = "." * len(node.relative) + ("" if node.module is None else self.code(node.module))
                for alias in node.names:
                    name = self.code(alias.name)
                    self.imported[name if alias.asname is None else self.code(alias.asname.name)] = (origin, name)
        classes: dict[str, ModelClass] = {}
        for node in _statements(self.module.body):
            if isinstance(node, cst.ClassDef):
                self.refuse_double(node.name.value in classes, f"class {node.name.value}", node)
                classes[node.name.value] = self.read_class(node)
        return ModelFile(self.source, classes, self.imported, self.module.default_newline)

    def read_class(self, node: cst.ClassDef) -> ModelClass:
        methods: dict[str, Method] = {}
        built: dict[str, list[frozenset[str]]] = {}
        keywords: dict[str, list[dict[str, str]]] = {}
        for member in _statements(node.body.body):
            if not isinstance(member, cst.FunctionDef):
                continue
            # A property and its setter share a name; only plain methods take part in the forward pass.
            nodes = list(_walk(member.body))
            if not member.decorators:
                self.refuse_double(member.name.value in methods, f"{node.name.value}.{member.name.value}", member)
                methods[member.name.value] = self.read_method(member, nodes)
            self.read_attributes(nodes, built, keywords)
        bases = tuple(self.original(self.code(base.value)) for base in node.bases)
        return ModelClass(node.name.value, self.line(node.name), bases, methods, built, keywords)

    def read_method(self, node: cst.FunctionDef, nodes: list[cst.CSTNode]) -> Method:
        parameters = node.params
        named = [*parameters.posonly_params, *parameters.params, *parameters.kwonly_params]
        anchors = [*parameters.posonly_params, *parameters.params]
        if isinstance(parameters.star_arg, cst.Param):
            anchors.append(parameters.star_arg)
        anchors += parameters.kwonly_params
        calls, loops = [], {}
        for inner in nodes:
            if isinstance(inner, cst.Call):
                calls.append(self.read_call(inner))
            elif isinstance(inner, cst.For | cst.CompFor):
                over = frozenset(re.findall(r"\bself(?:\.\w+)?\b", self.code(inner.iter)))
                for name in re.findall(r"\w+", self.code(inner.target)):
                    loops[name] = loops.get(name, frozenset()) | over
        return Method(
            name=node.name.value,
            line=self.line(node.name),
            parameters=tuple(parameter.name.value for parameter in named),
            swallows=None if parameters.star_kwarg is None else parameters.star_kwarg.name.value,
            arguments=self.locate_arguments(anchors, self.end(node.name)),
            calls=tuple(calls),
            loops=loops,
            text=self.code(node),
        )

    def read_call(self, node: cst.Call) -> Call:
        positional, keywords, starred = [], {}, []
        for argument in node.args:
            value = "".join(self.code(argument.value).split())
            if argument.star:
                starred.append(argument.star + value)
            elif argument.keyword is None:
                positional.append(value)
            else:
                keywords[argument.keyword.value] = value
        return Call(
            callee="".join(self.code(node.func).split()),
            positional=tuple(positional),
            keywords=keywords,
            starred=tuple(starred),
            line=self.line(node),
            arguments=self.locate_arguments(list(node.args), self.end(node.func)),
        )

    def read_attributes(
        self,
        nodes: list[cst.CSTNode],
        built: dict[str, list[frozenset[str]]],
        keywords: dict[str, list[dict[str, str]]],
    ) -> None:
        """Record `self.x = Something(...)`, also by way of one local variable (`Cls = MLP; self.x = Cls(...)`)."""
        local: dict[str, set[str]] = {}
        for node in nodes:
            if not isinstance(node, cst.Assign) or len(node.targets) != 1:
                continue
            target = self.code(node.targets[0].target)
            if target.isidentifier():
                names = {self.code(inner) for inner in _walk(node.value) if isinstance(inner, cst.Name)}
                local.setdefault(target, set()).update(names)
            elif re.fullmatch(r"self\.\w+", target):
                mentioned: set[str] = set()
                for call in (inner for inner in _walk(node.value) if isinstance(inner, cst.Call)):
                    words = [call.func, *(argument.value for argument in call.args if argument.keyword is None)]
                    for name in (self.code(word) for word in words):
                        mentioned |= {self.original(each) for each in (name, *local.get(name, ()))}
                if isinstance(node.value, cst.Call):
                    settings = self.read_call(node.value).keywords
                    keywords.setdefault(target[5:], []).append(settings)
                built.setdefault(target[5:], []).append(frozenset(mentioned))

    def locate_arguments(self, nodes: list, name_end: int) -> Arguments:
        if not nodes:
            inside = self.source.index("(", name_end) + 1
            return Arguments(None, inside, False, inside, False, 0)
        final = nodes[-1]
        if isinstance(final, cst.Param):
            final = final.default or final.annotation or final.name
        last = self.span(final)[1] + sum(len(right.whitespace_before.value) + 1 for right in getattr(final, "rpar", ()))
        has_comma = isinstance(nodes[-1].comma, cst.Comma)
        end = self.source.index(",", last) + 1 if has_comma else last
        start = self.positions[nodes[0]].start
        spread = self.positions[nodes[-1]].start.line > start.line
        return Arguments(self.span(nodes[0])[0], last, has_comma, end, spread, start.column)

    def refuse_double(self, double: bool, what: str, node: cst.CSTNode) -> None:
        if double:
            raise PatchError(
                f"{what} is defined twice",
                expected="one definition",
                found="two or more",
                where=f"{self.file}:{self.line(node)}",
                next_step="remove the one that is not used",
            )

    def original(self, name: str) -> str:
        """The name in the module that defines it: the last part of a dotted name, aliases undone."""
        return self.imported[name][1] if name in self.imported else name.rsplit(".", 1)[-1]

    def code(self, node: cst.CSTNode) -> str:
        """The node's own text, without surrounding parentheses and white space."""
        if isinstance(node, cst.Name):
            return node.value
        start, end = self.span(node)
        return self.source[start:end]

    def line(self, node: cst.CSTNode) -> int:
        return self.positions[node].start.line

    def end(self, node: cst.CSTNode) -> int:
        return self.span(node)[1]

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        where = self.positions[node]
        start, end = (self.line_starts[at.line - 1] + at.column for at in (where.start, where.end))
        return start, end


def _statements(body: object) -> Iterator[cst.CSTNode]:
    """The statements of a block, those inside `if` and `try` blocks of the same level included."""
    for node in body:
        if isinstance(node, cst.SimpleStatementLine):
            yield from node.body
        elif isinstance(node, cst.If | cst.Try | cst.Else | cst.ExceptHandler | cst.Finally):
            yield from _statements(node.body.body)
            for more in ("orelse", "handlers", "finalbody"):
                rest = getattr(node, more, None)
                if rest is not None:
                    yield from _statements(rest if isinstance(rest, list | tuple) else [rest])
        else:
            yield node


def _walk(root: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all below it in the order of the text, white space and punctuation left out."""
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        children: list[cst.CSTNode] = []
        for name in _parts(type(node)):
            value = getattr(node, name)
            if isinstance(value, cst.CSTNode):
                children.append(value)
            elif isinstance(value, list | tuple):
                children += [each for each in value if isinstance(each, cst.CSTNode)]
        pending += reversed(children)


@cache
def _parts(kind: type) -> tuple[str, ...]:
    """The fields of a node type that can hold expressions and statements."""
    layout = re.compile(r"whitespace|lpar|rpar|lbracket|rbracket|comma|equal|semicolon|leading_lines|header|footer")
    return tuple(each.name for each in fields(kind) if not layout.search(each.name))
