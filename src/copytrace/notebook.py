"""``%load_ext copytrace`` in IPython and Jupyter: ``%%copytrace`` traces a cell, ``%copytrace`` the code on a line."""

from __future__ import annotations

import ast
import shlex
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError
from IPython.display import display

from copytrace import session
from copytrace.errors import CopytraceError

if TYPE_CHECKING:
    from types import CodeType

    from IPython.core.interactiveshell import InteractiveShell

    from copytrace.report import Report


class _Options(ArgumentParser):
    def __init__(self) -> None:
        super().__init__(prog="%%copytrace", add_help=False, allow_abbrev=False)
        self.add_argument("-o", dest="output", metavar="FILE")
        self.add_argument("-f", dest="force", action="store_true")
        for name in ("native", "memray", "transfers"):
            self.add_argument(f"--no-{name}", dest=name, action="store_false")
        self.add_argument("--min-bytes", type=int, default=0, metavar="N")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%copytrace: {message}")


def register(shell: InteractiveShell) -> None:
    """Add the magics to ``shell``; adding them again replaces them."""

    def copytrace(line: str, cell: str | None = None) -> Report:
        """Show what the code of a cell or line copies.

        %%copytrace [-o FILE] [-f] [--no-native] [--no-memray] [--no-transfers] [--min-bytes N]

        Names that the code defines stay in the namespace and what it ends with is displayed. The result is the report;
        -o also writes the trace to FILE, -f over one that exists.
        """
        try:
            return _trace(shell, *((line, "") if cell is None else (cell, line)))
        except CopytraceError as error:
            raise UsageError(f"%copytrace: {error}") from None

    shell.register_magic_function(copytrace, "line_cell", "copytrace")  # type: ignore[arg-type]


def unregister(shell: InteractiveShell) -> None:
    """Take the magics away."""
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop("copytrace", None)


def _trace(shell: InteractiveShell, code: str, words: str) -> Report:
    try:
        options = _Options().parse_args(shlex.split(words))
    except ValueError as error:
        raise UsageError(f"%%copytrace: {error}") from None
    if not code.strip():
        raise UsageError("%copytrace: no code to run; write it on the same line, or in a cell below %%copytrace")
    statements, expression = _compile(shell, code)
    recording = session(f"In [{shell.execution_count}]", **_session_options(options))
    with recording:
        exec(statements, shell.user_ns)
        value = eval(expression, shell.user_ns) if expression is not None else None
    if value is not None:
        display(value)  # type: ignore[no-untyped-call]
    if options.output:
        recording.save(options.output, overwrite=options.force)
    return recording.report


def _session_options(options: Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("native", "memray", "transfers", "min_bytes")}


def _compile(shell: InteractiveShell, code: str) -> tuple[CodeType, CodeType | None]:
    """The code as IPython would run it, and apart the expression at its end whose value is to be shown."""
    text: str = shell.transform_cell(code)  # type: ignore[no-untyped-call]
    name = shell.compile.cache(text, shell.execution_count, raw_code=code)
    tree: ast.Module = shell.transform_ast(ast.parse(text, name))  # type: ignore[no-untyped-call]
    flags = shell.compile.flags
    end = tree.body[-1] if tree.body else None
    if not isinstance(end, ast.Expr) or text.rstrip().endswith(";"):
        return compile(tree, name, "exec", flags, True), None
    del tree.body[-1]
    return compile(tree, name, "exec", flags, True), compile(ast.Expression(end.value), name, "eval", flags, True)
