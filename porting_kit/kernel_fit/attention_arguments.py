"""Make a model's source take its attention settings from the config, so that a fitted checkpoint drives it.

Model classes hard-code what never differs within their family: Bloom's passes no head size and always ALiBi, MPT's one
bias flag for all layers. A fitted checkpoint says otherwise in its config. The transform sets keywords of each decoder
layer's `Attention(...)` call to fields of the config; every other character stays as it is. It is a pure function of
the text, and applying it twice equals applying it once.

Limits: the call must be in a method with a parameter `config`, to the class `Attention` imported from a module named
`layers` or `attention`, with keywords only (or a dict written out beside it); anything else is refused, quoting what
was found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from porting_kit.errors import PatchError, suggest_nearest
from porting_kit.kernel_fit.settings import DENSE_BIAS_KEY, QKV_BIAS_KEY

CONFIG_FIELDS = {
    "attention_head_size": "head_size",
    "position_embedding_type": "position_embedding_type",
    "max_position_embeddings": "max_position_embeddings",
    "rotary_embedding_percentage": "rotary_pct",
    "rotary_embedding_base": "rotary_base",
    "q_scaling": "q_scaling",
    "bias": QKV_BIAS_KEY,
    "dense_bias": DENSE_BIAS_KEY,
}
"""Keyword of tensorrt_llm.layers.Attention -> field of the fitted config (layers/attention.py, 0.9.0.dev2024022700 to
0.13.0.dev2024090300: the keywords are the same in all)."""
CLASS_NAME = "Attention"
MODULES = ("layers", "attention")


def imported_names(node: cst.ImportFrom) -> list[str]:
    """What one import statement calls the library's attention class; empty where it does not import it."""
    module = cst.Module([]).code_for_node(node.module).split(".")[-1] if node.module else ""
    if module not in MODULES or isinstance(node.names, cst.ImportStar):
        return []
    return [alias.evaluated_alias or CLASS_NAME for alias in node.names if alias.evaluated_name == CLASS_NAME]


@dataclass(frozen=True)
class ArgumentEdit:
    """One keyword that was set: where, and to what; shaped like the patch's own edits.

    Args:
        class_name, method: where it happens.
        line: the line of the call.
        site: the callee.
        added: the keyword as written now.
    """

    class_name: str
    method: str
    line: int
    site: str
    added: tuple[str, ...]

    def __str__(self) -> str:
        return f"line {self.line}, {self.class_name}.{self.method}, {self.site}: {', '.join(self.added)}"


@dataclass(frozen=True)
class FollowedSource:
    """A source whose attention follows the config.

    Args:
        source: the text.
        edits: what was set where; empty when the text already followed.
    """

    source: str
    edits: tuple[ArgumentEdit, ...]

    @property
    def changed(self) -> bool:
        """Whether anything had to be set."""
        return bool(self.edits)


def follow_fit(source: str, keywords: Iterable[str], *, file: str = "model.py") -> FollowedSource:
    """Set attention keywords to fields of the config.

    Args:
        source: a model definition, patched or not.
        keywords: from `FitPlan.keywords`.
        file: its name, for messages.

    Raises:
        PatchError: no decoder layer that calls Attention, or a call of an unknown shape.
    """
    keywords = tuple(keywords)
    unknown = [keyword for keyword in keywords if keyword not in CONFIG_FIELDS]
    if unknown:
        near = suggest_nearest(unknown[0], CONFIG_FIELDS)
        raise PatchError(
            "no config field is known for an attention argument",
            expected=f"arguments among {', '.join(CONFIG_FIELDS)}",
            found=", ".join(unknown),
            where=file,
            next_step=f"did you mean {near}?" if near else "name one of them",
        )
    if not keywords:
        return FollowedSource(source, ())
    try:
        wrapper = MetadataWrapper(cst.parse_module(source))
    except cst.ParserSyntaxError as error:
        raise PatchError(
            "a model definition cannot be parsed",
            expected="Python source",
            found=error.message,
            where=file,
            next_step="check that the tree is complete and unmodified",
        ) from None
    editor = _Editor(keywords, file)
    changed = wrapper.visit(editor)
    if not editor.calls:
        raise PatchError(
            "no attention layer was found whose settings could follow the fit",
            expected=f"a call of {CLASS_NAME}, imported from one of the modules {', '.join(MODULES)}, in an __init__",
            found=f"imported as {', '.join(sorted(editor.names)) or 'nothing'}, never called",
            where=file,
            next_step="this model cannot be fitted by a patch; choose a release whose kernels take it as it is",
        )
    return FollowedSource(changed.code, tuple(editor.edits))


class _Editor(cst.CSTTransformer):
    """Finds the calls and sets the keywords."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, keywords: tuple[str, ...], file: str) -> None:
        super().__init__()
        self.keywords, self.file = keywords, file
        self.names: set[str] = set()
        self.calls = 0
        self.edits: list[ArgumentEdit] = []
        self._parameters: list[set[str]] = []
        self._dicts: list[dict[str, set[str]]] = []
        self._classes: list[str] = []
        self._methods: list[str] = []

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:  # noqa: N802
        self.names.update(imported_names(node))

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802
        self._classes.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:  # noqa: N802
        self._classes.pop()
        return updated_node

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        parameters = (*node.params.posonly_params, *node.params.params, *node.params.kwonly_params)
        self._parameters.append({parameter.name.value for parameter in parameters})
        self._dicts.append({})
        self._methods.append(node.name.value)

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802
        target = node.targets[0].target
        if self._dicts and isinstance(target, cst.Name) and isinstance(node.value, cst.Dict):
            keys = [getattr(element, "key", None) for element in node.value.elements]
            if all(isinstance(key, cst.SimpleString) for key in keys):
                self._dicts[-1][target.value] = {key.evaluated_value for key in keys}

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:  # noqa: N802
        self._parameters.pop()
        self._dicts.pop()
        self._methods.pop()
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        if not isinstance(original_node.func, cst.Name) or original_node.func.value not in self.names:
            return updated_node
        line = self.get_metadata(PositionProvider, original_node).start.line
        self.calls += 1
        self._require_known_shape(original_node, line)
        return updated_node.with_changes(args=self._set_keywords(updated_node.args, line))

    def _require_known_shape(self, call: cst.Call, line: int) -> None:
        where = f"{self.file}:{line}"
        if not self._parameters or "config" not in self._parameters[-1]:
            raise PatchError(
                "an attention layer is built where no config is at hand",
                expected="a method with a parameter config",
                found=f"parameters {', '.join(sorted(self._parameters[-1])) if self._parameters else 'none'}",
                where=where,
                next_step="patch this call by hand",
            )
        odd = [argument for argument in call.args if argument.keyword is None and not self._is_harmless(argument)]
        if odd:
            raise PatchError(
                "an attention layer is built with arguments that are not keywords",
                expected="keywords only",
                found=cst.Module([]).code_for_node(odd[0]).strip(" ,\n"),
                where=where,
                next_step="name the arguments of this call and patch again",
            )

    def _is_harmless(self, argument: cst.Arg) -> bool:
        """Whether `**name` spreads a dict that is written out in the same method and sets none of the keywords."""
        if argument.star != "**" or not isinstance(argument.value, cst.Name):
            return False
        keys = self._dicts[-1].get(argument.value.value)
        return keys is not None and not keys & set(self.keywords)

    def _set_keywords(self, arguments: tuple[cst.Arg, ...], line: int) -> list[cst.Arg]:
        changed = list(arguments)
        for keyword in self.keywords:
            value = cst.parse_expression(f"config.{CONFIG_FIELDS[keyword]}")
            index = next((i for i, each in enumerate(changed) if each.keyword and each.keyword.value == keyword), None)
            if index is None:
                # Before the last argument, with the first one's comma: the call's own layout goes on.
                new = changed[0].with_changes(
                    keyword=cst.Name(keyword), value=value, whitespace_after_arg=cst.SimpleWhitespace("")
                )
                if len(changed) == 1:
                    new = new.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
                changed.insert(len(changed) - 1, new)
            elif not changed[index].value.deep_equals(value):
                changed[index] = changed[index].with_changes(value=value)
            else:
                continue
            added = (f"{keyword}=config.{CONFIG_FIELDS[keyword]}",)
            self.edits.append(ArgumentEdit(".".join(self._classes), self._methods[-1], line, CLASS_NAME, added))
        return changed
