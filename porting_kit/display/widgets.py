"""The interactive layer: a form for the port file's main fields, and a walker through frames.

Each widget starts from the notebook's parameters, writes back to plain attributes, and has a static twin that is shown
whether or not there is someone to click. Whether there is, is told by the notebook's parameter `interactive`; it is
never guessed. Without it ipywidgets is not even imported.
"""

from __future__ import annotations

import html
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from porting_kit.display.diff_view import split_hunks, view_diff
from porting_kit.display.plots import plot_tree
from porting_kit.display.tables import Code, Facts, Stack, Table
from porting_kit.port import Port, merge_overrides
from porting_kit.releases.facts import load_release_ranges
from porting_kit.steps.context import PortRun, open_port_run
from porting_kit.whole_files import write_text

FORM_FIELDS = (
    ("dtype", "number format of the checkpoint"),
    ("kernel", "whose attention arithmetic: exact, a release's with its faults, or the real kernel (xqa, on a GPU)"),
    ("fit", "transforms that make the model fit the kernels; auto chooses them"),
    ("engine", "what is checked: the emulator's tokens, or captured ones of an engine"),
    ("tree", "the draft tree: auto, a name, a file or a list of paths"),
    ("target.max_batch_size", "requests at once"),
    ("target.max_seq_len", "tokens, prompt and output"),
    ("target.tp_size", "tensor-parallel ranks"),
)


class Walker:
    """Steps through frames with a slider, above a static twin that holds all of them.

    Args:
        frames: label and a function that makes the frame (an object with `to_html`).
        twin: what is always shown.
        interactive: whether the slider is shown too.
        noun: what one frame is, for the slider's label.
    """

    def __init__(
        self, frames: Sequence[tuple[str, Callable[[], Any]]], twin: Any, *, interactive: bool, noun: str
    ) -> None:
        self.frames, self.twin = tuple(frames), twin
        self.slider = self.view = self.box = None
        if interactive and self.frames:
            self._build(noun)

    def _build(self, noun: str) -> None:
        import ipywidgets

        last = len(self.frames)
        self.slider = ipywidgets.IntSlider(1, 1, last, description=noun, continuous_update=False)
        back, forward = ipywidgets.Button(description="◀ back"), ipywidgets.Button(description="next ▶")
        back.on_click(lambda _: setattr(self.slider, "value", max(self.slider.value - 1, 1)))
        forward.on_click(lambda _: setattr(self.slider, "value", min(self.slider.value + 1, last)))
        self.view = ipywidgets.HTML()
        self.slider.observe(lambda change: self._show(change["new"]), names="value")
        self._show(1)
        self.box = ipywidgets.VBox([ipywidgets.HBox([back, forward, self.slider]), self.view])

    def _show(self, place: int) -> None:
        label, make_frame = self.frames[place - 1]
        self.view.value = f"<p><b>{html.escape(label)}</b></p>{make_frame().to_html()}"

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if self.box is not None:
            display(self.box)
        display(self.twin)


def walk_hunks(diff: str, *, interactive: bool) -> Walker:
    """Walk a unified diff hunk by hunk; the twin is the whole diff."""
    hunks = split_hunks(diff.splitlines())
    frames = [(f"hunk {place} of {len(hunks)}", lambda hunk=hunk: hunk) for place, hunk in enumerate(hunks, start=1)]
    return Walker(frames, view_diff(diff), interactive=interactive, noun="hunk")


def walk_alignment(align: Any, tree: Any, *, prompt: int | None = None, interactive: bool) -> Walker | Facts:
    """Step through the accepted trees of one prompt of an alignment.

    Args:
        align: `steps.align.AlignResult`.
        tree: the tree of the run.
        prompt: which prompt; the one with the longest answer when None.
        interactive: whether the slider is shown.
    """
    texts = align.alignment.texts if align.alignment is not None else ()
    if prompt is None:
        prompt = max(range(len(texts)), key=lambda place: len(texts[place].tokens), default=0)
    if prompt >= len(texts) or texts[prompt].origins is None:
        return Facts([], note="There are no steps to walk: no token was made here, or an engine made them.")
    text = texts[prompt]
    paths = text.origins.accepted_paths()
    steps = [
        [token for token, made_in in zip(text.tokens, text.origins.step.tolist(), strict=True) if made_in == step]
        for step in range(1, len(paths) + 1)
    ]
    return walk_trees(
        tree, paths, [decode_tokens(align.tokenizer, tokens) for tokens in steps], interactive=interactive
    )


def texts_of(align: Any) -> list[str]:
    """The decoded output of every prompt; empty when there is no tokenizer or no output."""
    if align.tokenizer is None or align.alignment is None:
        return []
    return [decode_tokens(align.tokenizer, text.tokens) for text in align.alignment.texts]


def decode_tokens(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Token ids as text, or as numbers when there is no tokenizer."""
    return tokenizer.decode(list(tokens)) if tokenizer is not None else " ".join(map(str, tokens))


def walk_trees(
    tree: Any, accepted: Sequence[Sequence[int]], texts: Sequence[str], *, interactive: bool, shown: int = 12
) -> Walker:
    """Step through the accepted paths of one request; the twin is the first tree with its path, and a table of steps.

    Args:
        tree: the `MedusaTree`.
        accepted: per generation step the node indices of the accepted path, the root first.
        texts: what each step emitted.
        interactive: whether the slider is shown.
        shown: rows of the table; the rest is counted.
    """
    frames = [
        (
            f"step {place} of {len(accepted)}: {len(path)} tokens, {text!r}",
            lambda path=path: plot_tree(tree, accepted=path),
        )
        for place, (path, text) in enumerate(zip(accepted, texts, strict=True), start=1)
    ]
    rows = [
        (place, len(path), Code(" ".join(map(str, path))), Code(repr(text)))
        for place, (path, text) in enumerate(zip(accepted, texts, strict=True), start=1)
    ]
    longest = max(accepted, key=len, default=())
    table = Table(
        ("step", "tokens", "accepted nodes", "text"), rows, title="Accepted paths of one request", limit=shown
    )
    return Walker(frames, Stack((plot_tree(tree, accepted=longest), table)), interactive=interactive, noun="step")


def settings_table(
    run: PortRun, overrides: Mapping[str, Any], chosen: Mapping[str, tuple[Any, str]] | None = None
) -> Stack:
    """The settings in force: each main field, its value, and who set it.

    Args:
        run: the run.
        overrides: the notebook's parameters that were laid over the port file; None values set nothing.
        chosen: field -> value and who chose it, over both.
    """
    origins = {name: (value, "parameter") for name, value in overrides.items() if value is not None}
    origins |= chosen or {}
    meanings = dict(FORM_FIELDS)
    rows = []
    for name in dict.fromkeys([*meanings, *origins]):
        value, origin = origins.get(name) or (read_field(run.port, name), "port file")
        rows.append((Code(name), Code(str(value)), origin, meanings.get(name, "")))
    title = f"Port {run.port.name}, from {run.port_file.name}, in run folder {run.folder.root.name}"
    return Stack((Table(("field", "value", "set by", "meaning"), rows, title=title),))


def read_field(port: Port, name: str) -> Any:
    """A field of the port by its dotted name."""
    section, _, field = name.rpartition(".")
    return getattr(getattr(port, section) if section else port, field)


class PortForm:
    """The port file's main fields as a form. Starts from the run it is given; `open_run` opens the run as chosen.

    Args:
        run: the run as the notebook's parameters describe it.
        overrides: the parameters that were laid over the port file already.
        interactive: whether the widgets are shown; the table always is.
    """

    def __init__(self, run: PortRun, overrides: Mapping[str, Any], *, interactive: bool) -> None:
        self.run = run
        self.overrides = {name: value for name, value in overrides.items() if value is not None}
        self.changes: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}
        self.box = self._shown_table = self._saved_view = None
        if interactive:
            self._build()

    @property
    def settings(self) -> dict[str, Any]:
        """Every override in force: the parameters, and over them what was chosen here."""
        return {**self.overrides, **self.changes}

    def open_run(self) -> PortRun:
        """The run with what was chosen. Raises PortFileError when a choice is not usable."""
        if not self.changes:
            return self.run
        return open_port_run(self.run.port_file, run_folder=self.run.folder.root, overrides=self.settings)

    def save(self, file: Path | None = None) -> Path:
        """Write the port file with every setting in force, beside the original, for the notebooks that follow."""
        target = file or self.run.port_file.with_name(f"{self.run.port_file.stem}-chosen.yaml")
        document = yaml.safe_load(self.run.port_file.read_text(encoding="utf-8"))
        write_text(target, yaml.safe_dump(merge_overrides(document, self.settings), sort_keys=False))
        return target

    def table(self) -> Stack:
        """The static twin: each field, its value, and who set it."""
        chosen = {name: (value, "this form") for name, value in self.changes.items()}
        return settings_table(self.run, self.overrides, chosen)

    def _value(self, name: str) -> Any:
        return self.changes.get(name, read_field(self.run.port, name))

    def _build(self) -> None:
        import ipywidgets

        wide = {"style": {"description_width": "13em"}, "layout": ipywidgets.Layout(width="34em")}
        for name, meaning in FORM_FIELDS:
            value, options = self._value(name), _options(name)
            if options and not isinstance(value, list):
                known = list(dict.fromkeys([*options, value]))
                widget = ipywidgets.Dropdown(options=known, value=value, description=name, **wide)
            elif isinstance(value, int):
                widget = ipywidgets.BoundedIntText(value=value, min=1, max=1 << 20, description=name, **wide)
            else:
                widget = ipywidgets.Text(value=_as_text(value), description=name, continuous_update=False, **wide)
            widget.tooltip = meaning
            widget.observe(lambda change, name=name: self._choose(name, change["new"]), names="value")
            self.inputs[name] = widget
        save = ipywidgets.Button(description="Save as port file", layout=ipywidgets.Layout(width="13em"))
        save.on_click(lambda _: self._save_clicked())
        self._saved_view = ipywidgets.HTML()
        hint = ipywidgets.HTML(
            "Choose, then run the cells below; the table says what each field means. Save to use the choice in the "
            "other notebooks."
        )
        self.box = ipywidgets.VBox([hint, *self.inputs.values(), save, self._saved_view])

    def _choose(self, name: str, value: Any) -> None:
        chosen = yaml.safe_load(value) if isinstance(value, str) and value.startswith("[") else value
        self.changes.pop(name, None)
        if chosen != self._value(name):
            self.changes[name] = chosen
        if self._shown_table is not None:
            self._shown_table.update(self.table())

    def _save_clicked(self) -> None:
        file = self.save()
        shown = Path(os.path.relpath(file)).as_posix()
        self._saved_view.value = f'Saved. In the other notebooks: <code>port_file = "{html.escape(shown)}"</code>'

    def _ipython_display_(self) -> None:
        from IPython.display import display

        if self.box is not None:
            display(self.box)
        self._shown_table = display(self.table(), display_id=True)


def _options(name: str) -> list[str]:
    """What a field may be, read from the port file's own types; the open-ended ones get their usual values."""
    annotation = None if "." in name else Port.model_fields[name].annotation
    if name == "kernel":
        return ["exact", *(f"release:{facts.since}" for facts in load_release_ranges()), "xqa"]
    return [value for value in _literals(annotation) if isinstance(value, str)]


def _literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [value for part in typing.get_args(annotation) for value in _literals(part)]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).strip()
