"""Make a patched model write each token's position into its keys, for a checkpoint fitted by `write_positions`.

The attention layer becomes a subclass that adds the position's digits to what its projection puts out; the model hands
it the positions, computed in the graph as for learned positions. The transform is a pure function of the text, and
applying it twice equals applying it once.

Limits: the attention is built by a call of `Attention`, imported by name; the method that runs the layers has the
parameters input_ids, position_ids and attention_params, and the tree's (the patch adds those). Anything else is
refused, quoting what was found. Later pipeline ranks are fed no position_ids (runtime/generation.py
0.11.0.dev2024062500 l.716), so the conversion refuses those.
"""

from __future__ import annotations

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from porting_kit.errors import PatchError
from porting_kit.kernel_fit.attention_arguments import CLASS_NAME, ArgumentEdit, FollowedSource, imported_names
from porting_kit.kernel_fit.settings import DIGIT_BASE, POSITION_DIMS
from porting_kit.patching.flow import ALL_SPEC_ARGUMENTS, Carrier, trace_flow
from porting_kit.patching.learned_positions import FUNCTION, FUNCTION_NAME, NEEDED, name_offsets
from porting_kit.patching.structure import read_model_file

SUBCLASS = "PositionedAttention"
GIVE = "give_positions"

CLASS = f'''\
class {SUBCLASS}({{attention}}):
    """Attention whose keys hold the position of their token, in digits.

    The first {POSITION_DIMS} dims of each key head get the position's high and low digit,
    twice. Queries hold the head's ALiBi slope there, in two parts (in their
    bias), so that the kernel's own product is the ALiBi bias, up to what is
    the same for every key.
    """
    positions = None

    def forward(self, *args, **kwargs):
        project, own = self.qkv.forward, vars(self.qkv).get('forward')

        def project_and_write(*inputs, **options):
            return self.write_positions(project(*inputs, **options))

        object.__setattr__(self.qkv, 'forward', project_and_write)
        try:
            return super().forward(*args, **kwargs)
        finally:
            object.__delattr__(self.qkv, 'forward')
            if own is not None:
                object.__setattr__(self.qkv, 'forward', own)

    def write_positions(self, qkv):
        import numpy as np
        from tensorrt_llm.functional import cast, constant, unsqueeze
        heads, kv_heads = self.num_attention_heads, self.num_attention_kv_heads
        rest = heads + kv_heads
        places = np.zeros((2, rest + kv_heads, self.attention_head_size),
                          dtype=np.float32)
        places[0, heads:rest, 0:{POSITION_DIMS}:2] = 1
        places[1, heads:rest, 1:{POSITION_DIMS}:2] = 1
        high = self.positions / {DIGIT_BASE}
        low = self.positions - high * {DIGIT_BASE}
        for digit, place in zip((high, low), places.reshape(2, 1, -1)):
            digit = unsqueeze(cast(digit, qkv.dtype), digit.ndim())
            qkv = qkv + digit * cast(constant(place), qkv.dtype)
        return qkv


def {GIVE}(model, positions):
    """Tell the attention of every layer the positions of this call's tokens."""
    for _, module in model.named_modules():
        if isinstance(module, {SUBCLASS}):
            module.positions = positions


'''


def write_position_source(source: str, *, file: str = "model.py") -> FollowedSource:
    """Let a model's attention write positions into its keys.

    Args:
        source: a model definition, patched for the tree and following its config.
        file: its name, for messages.

    Raises:
        PatchError: the model does not have what is needed.
    """
    model = read_model_file(source, file)
    if SUBCLASS in model.classes:
        return FollowedSource(source, ())
    flow = trace_flow(model)
    runners = [carrier for carrier in flow.carriers if any(step.level == "layer" for step in carrier.steps)]
    if len(runners) != 1:
        raise PatchError(
            "positions cannot be handed to the attention layers of this model",
            expected="one method that runs the decoder layers",
            found=", ".join(f"{each.owner.name}.{each.method.name}" for each in runners) or "none",
            where=file,
            next_step="use fold_alibi, which needs no positions in the graph",
        )
    editor = _Editor(runners[0], file)
    changed = MetadataWrapper(cst.parse_module(source)).visit(editor)
    return FollowedSource(changed.code, tuple(editor.edits))


def _name_tree(runner: Carrier, file: str) -> str:
    """The argument that brings the tree's offsets to the method, whatever the release calls it."""
    parameters = runner.method.parameters
    missing = [name for name in NEEDED if name not in parameters]
    tree = sorted(
        (name for name in parameters if name in ALL_SPEC_ARGUMENTS), key=lambda name: not name.endswith("offsets")
    )
    if missing or not tree:
        raise PatchError(
            "positions cannot be computed where this model runs its layers",
            expected=f"parameters {', '.join(NEEDED)} and the tree's",
            found=", ".join(parameters),
            where=f"{file}:{runner.method.line}, {runner.owner.name}.{runner.method.name}",
            next_step="use fold_alibi, which needs no positions in the graph",
        )
    return tree[0]


class _Editor(cst.CSTTransformer):
    """Puts the subclass in Attention's place, and the positions into the method that runs the layers."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, runner: Carrier, file: str) -> None:
        super().__init__()
        self.runner, self.tree = runner, _name_tree(runner, file)
        self.attention = CLASS_NAME
        self.edits: list[ArgumentEdit] = []
        self._classes: list[str] = []
        self._methods: list[str] = []

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:  # noqa: N802
        for name in imported_names(node):
            self.attention = name

    def visit_ClassDef(self, node: cst.ClassDef) -> None:  # noqa: N802
        self._classes.append(node.name.value)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:  # noqa: N802
        self._classes.pop()
        return updated_node

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        self._methods.append(node.name.value)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:  # noqa: N802
        self._methods.pop()
        owner, method = self.runner.owner.name, self.runner.method.name
        if self._classes != [owner] or self._methods or original_node.name.value != method:
            return updated_node
        call = f"{GIVE}(self, {FUNCTION_NAME}(position_ids, input_ids, attention_params, {self.tree}))"
        body = list(updated_node.body.body)
        has_docstring = original_node.get_docstring() is not None
        body.insert(int(has_docstring), cst.parse_statement(call))
        self.edits.append(ArgumentEdit(owner, method, self.runner.method.line, GIVE, (FUNCTION_NAME,)))
        return updated_node.with_changes(body=updated_node.body.with_changes(body=body))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        if not isinstance(original_node.func, cst.Name) or original_node.func.value != self.attention:
            return updated_node
        line = self.get_metadata(PositionProvider, original_node).start.line
        method = self._methods[-1] if self._methods else "-"
        self.edits.append(ArgumentEdit(".".join(self._classes), method, line, self.attention, (SUBCLASS,)))
        return updated_node.with_changes(func=cst.Name(SUBCLASS))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:  # noqa: N802
        tree, offsets = name_offsets((self.tree,))
        text = CLASS.format(attention=self.attention)
        functions = [each.name.value for each in original_node.body if isinstance(each, cst.FunctionDef)]
        if FUNCTION_NAME not in functions:
            text = FUNCTION.format(tree=tree, offsets=offsets) + text
        new = cst.parse_module(text, config=original_node.config_for_parsing)
        first = next(index for index, each in enumerate(updated_node.body) if isinstance(each, cst.ClassDef))
        body = list(updated_node.body)
        # The blank lines before the first class go before what is put there.
        leading = body[first].leading_lines
        added = [new.body[0].with_changes(leading_lines=leading), *new.body[1:]]
        body[first] = body[first].with_changes(leading_lines=[cst.EmptyLine(indent=False)] * 2)
        return updated_node.with_changes(body=[*body[:first], *added, *body[first:]])
