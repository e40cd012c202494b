"""The ``copytrace`` command."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer

from copytrace.errors import CopytraceError
from copytrace.runner import NotRunnableError, Program, hide_own_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from copytrace._session import Session
    from copytrace.report import By, Report

app = typer.Typer(
    name="copytrace",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

TraceFile = Annotated[
    str, typer.Argument(metavar="FILE", help="A trace, a report as JSON, or what a crashed run left (.partial).")
]
Output = Annotated[str | None, typer.Option("-o", "--output", metavar="OUT", help="Write to this file.")]
Force = Annotated[bool, typer.Option("-f", "--force", help="Overwrite the output file.")]


class Format(StrEnum):
    """How a report is written."""

    text = "text"
    markdown = "markdown"
    json = "json"
    html = "html"


FormatOption = Annotated[Format, typer.Option("--format", metavar="text|markdown|json|html", help="How to write it.")]


@dataclass(frozen=True, slots=True)
class Run:
    """A ``copytrace run`` that was parsed and is carried out when the command line is off the stack."""

    program: Program
    name: str
    """Of the trace, as the user gave it."""
    out: Path
    """The same, absolute: the program may change the working directory."""
    overwrite: bool
    quiet: bool
    keep_capture: bool
    options: dict[str, Any]
    text: str
    """Source of the program, as it was before it ran."""

    @property
    def partial(self) -> Path:
        """Where the recorders write while the program runs."""
        return Path(f"{self.out}.partial")


def main(arguments: Sequence[str] | None = None) -> None:
    """Carry out the command line and exit: 0, 1 (error or limit exceeded), 2 (usage), or a run program's own status."""
    runs: list[Run] = []
    command = typer.main.get_command(app)
    try:
        command.main(args=None if arguments is None else list(arguments), prog_name="copytrace", obj=runs)
    except SystemExit as done:
        if done.code or not runs:
            raise
    except Exception as error:
        _say(_one_line(error))
        raise SystemExit(1) from None
    execute(runs[0])


def _version(wanted: bool) -> None:
    if wanted:
        from copytrace import __version__

        print(f"copytrace {__version__}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Shows which layer of an array storage stack made which copy of the data."""
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)


# --- run -------------------------------------------------------------------------------------------------------------


@app.command(
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    help="Run a program and record its copies. What comes after the program's name is the program's.",
)
def run(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(metavar="(SCRIPT | -m MODULE | -c CODE) [ARGS]...", show_default=False)],
    module: Annotated[bool, typer.Option("-m", help="The program is a module.")] = False,
    code: Annotated[bool, typer.Option("-c", help="The program is a piece of code.")] = False,
    output: Annotated[str | None, typer.Option("-o", "--output", metavar="FILE", help="Name of the trace.")] = None,
    force: Force = False,
    no_native: Annotated[bool, typer.Option("--no-native", help="No native frames on stacks.")] = False,
    no_memray: Annotated[bool, typer.Option("--no-memray", help="Do not record allocations.")] = False,
    no_transfers: Annotated[bool, typer.Option("--no-transfers", help="Do not record the moves themselves.")] = False,
    min_bytes: Annotated[int, typer.Option("--min-bytes", metavar="N", min=0, help="Leave smaller buffers out.")] = 0,
    sample: Annotated[
        int, typer.Option("--sample", metavar="N", min=1, help="Record one of N outermost calls, to leave it on.")
    ] = 1,
    follow: Annotated[
        bool, typer.Option("--follow", help="Trace the Python processes that it starts and theirs, too.")
    ] = False,
    keep_capture: Annotated[
        bool, typer.Option("--keep-capture", help="Keep memray's capture in FILE.memray, for copytrace flamegraph.")
    ] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No summary at the end.")] = False,
) -> None:
    if module and code:
        _misuse("-m and -c exclude each other")
    program = Program("module" if module else "code" if code else "script", words[0], tuple(words[1:]))
    if not program.found:
        _misuse(f"{words[0]}: no such file; give a script, -m MODULE or -c CODE")
    options: dict[str, Any] = {"native": not no_native, "memray": not no_memray, "transfers": not no_transfers}
    options |= {"min_bytes": min_bytes, "follow": follow, "sample": sample}
    name = output or f"{program.stem}.copytrace"
    _refuse_to_overwrite(Path(name), force)
    if keep_capture:
        from copytrace.flamegraph import directory

        if directory(name).exists() and not force:
            raise CopytraceError(f"{directory(name)} exists; give another name with -o, or -f to overwrite it")
    plan = Run(program, name, Path(name).absolute(), force, quiet, keep_capture, options, program.text())
    if plan.partial.exists() and not force:
        raise CopytraceError(
            f"{name}.partial is left from a run that did not end; copytrace report reads it, -f drops it"
        )
    context.obj.append(plan)


def execute(plan: Run) -> None:
    """Run the program of ``plan`` in a session, save the trace, and leave as the program left."""
    from copytrace._session import session

    shutil.rmtree(plan.partial, ignore_errors=True)
    recording = session(plan.program.stem, spool=plan.partial, **plan.options)
    try:
        recording.__enter__()
    except Exception as error:
        _say(_one_line(error))
        raise SystemExit(1) from None
    process = os.getpid()
    waits = False

    def save_late() -> None:
        if waits and os.getpid() == process:
            _save(plan, recording)

    if recording.follow:
        atexit.register(save_late)  # before the program's own, so after them
    ending: BaseException | None = None
    try:
        plan.program.run()
    except BaseException as error:
        ending = error
    if os.getpid() == process:
        ending = _show(ending)
        waits = recording.follow and _children_run(plan)
        if not waits and not _save(plan, recording) and ending is None:
            ending = SystemExit(1)
    if ending is not None:
        raise ending


def _children_run(plan: Run) -> bool:
    """Whether processes are alive that the interpreter may wait for when it ends, as those of multiprocessing, of which
    the newest may not have begun.
    """
    from copytrace.follow import DIRECTORY, running

    multiprocessing = sys.modules.get("multiprocessing")
    started = multiprocessing.active_children() if multiprocessing is not None else []
    return bool(started) or running(plan.partial / DIRECTORY)


def _show(ending: BaseException | None) -> BaseException | None:
    """Print what python would print for ``ending`` and return what ends this process with the same status, silently."""
    if ending is None:
        return None
    if isinstance(ending, NotRunnableError):
        _say(str(ending))
        return SystemExit(1)
    if isinstance(ending, SystemExit):
        if ending.code is None or isinstance(ending.code, int):
            return ending
        print(ending.code, file=sys.stderr)
        return SystemExit(1)
    hide_own_frames(ending)
    try:
        sys.excepthook(type(ending), ending, ending.__traceback__)
    except SystemExit as other:
        return _show(other)
    except BaseException as broken:
        hide_own_frames(broken)
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(broken), broken, broken.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(ending), ending, ending.__traceback__)
    sys.excepthook = lambda *_: None
    return ending


def _save(plan: Run, recording: Session) -> bool:
    """Close the session, save its trace and say what is in it; False when that failed."""
    from copytrace import trace
    from copytrace._session import leave_all_but
    from copytrace.reports.wording import size

    try:
        leave_all_but(recording)
        captured = sum(capture.stat().st_size for capture in plan.partial.glob("memray-*.bin"))
        with _progress(f"copytrace reads {size(captured)} of capture and resolves its names", plan.quiet):
            recording.__exit__(None, None, None)
        environment = {**recording.trace.environment, "program": {"kind": plan.program.kind, "text": plan.text}}
        trace.save(replace(recording.trace, environment=environment), plan.out, overwrite=plan.overwrite)
        if plan.keep_capture:
            _keep_capture(plan)
        shutil.rmtree(plan.partial, ignore_errors=True)
        if not plan.quiet:
            from copytrace.reports.text import summary

            color, width = _terminal(sys.stderr)
            with _progress("copytrace follows the payload"):
                found = recording.report
            sys.stderr.write(summary(found, width, color, plan.name))
    except Exception as error:
        left = f"; what was recorded is in {plan.name}.partial" if plan.partial.exists() else ""
        _say(f"{plan.name}: {_one_line(error).replace(f'{plan.out}: ', '')}{left}")
        return False
    return True


def _keep_capture(plan: Run) -> None:
    from copytrace.flamegraph import directory

    kept = directory(plan.out)
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    for capture in plan.partial.glob("memray-*.bin"):
        capture.replace(kept / capture.name)


# --- report, check, diff ---------------------------------------------------------------------------------------------


@app.command(help="Show the report of a trace.")
def report(
    file: TraceFile,
    by_layer: Annotated[bool, typer.Option("--by-layer", help="A table of layers and paths.")] = False,
    by_site: Annotated[bool, typer.Option("--by-site", help="One entry a place in the source that copies.")] = False,
    by_process: Annotated[bool, typer.Option("--by-process", help="What each process and task did.")] = False,
    by_path: Annotated[bool, typer.Option("--by-path", help="The flow of each path (the default).")] = False,
    format: FormatOption = Format.text,  # noqa: A002
    output: Output = None,
    force: Force = False,
    issue: Annotated[
        str, typer.Option("--issue", metavar="LAYER", help="Only what this layer or project does, as Markdown.")
    ] = "",
    open_it: Annotated[bool, typer.Option("--open", help="As HTML, in the browser.")] = False,
) -> None:
    if by_layer + by_site + by_process + by_path > 1:
        _misuse("--by-layer, --by-site, --by-process and --by-path exclude each other")
    by: By = "layer" if by_layer else "site" if by_site else "process" if by_process else "path"
    if open_it and format not in (Format.text, Format.html):
        _misuse("--open shows HTML; give it without --format")
    loaded = load_report(file)
    if issue:
        from copytrace.reports.issue import narrow

        loaded = narrow(loaded, issue)
        format = Format.markdown if format is Format.text else format  # noqa: A001
    if open_it:
        _open(loaded, output, force)
        return

    def text(width: int, color: bool) -> str:
        return loaded.to_text(by=by, width=width, color=color, file=file)

    renderings: dict[Format, Callable[[int, bool], str]] = {
        Format.text: text,
        Format.markdown: lambda *_: loaded.to_markdown(by=by),
        Format.json: lambda *_: loaded.to_json() + "\n",
        Format.html: lambda *_: loaded.to_html() + "\n",
    }
    _deliver(renderings[format], output, force)


@app.command(help="Exit with 1 when a trace has more copies than allowed, and say whose they are.")
def check(
    file: TraceFile,
    max_copies: Annotated[
        float, typer.Option("--max-copies", metavar="N", min=0, help="Copies of the payload, to two decimals.")
    ],
    max_extra_at_peak: Annotated[
        float | None, typer.Option("--max-extra-at-peak", metavar="X", min=0, help="Extra memory over the payload.")
    ] = None,
    path: Annotated[str, typer.Option("--path", metavar="GLOB", help="Only paths with such a label.")] = "*",
    layer: Annotated[str, typer.Option("--layer", metavar="NAME", help="Only what this layer or project does.")] = "",
) -> None:
    from copytrace.reports.limits import Limits, exceeded, measured
    from copytrace.reports.wording import plain, plural, some

    loaded = load_report(file)
    limits = Limits(max_copies, max_extra_at_peak, path, layer)
    over = exceeded(loaded, limits)
    for excess in over:
        print(excess)
        for culprit in excess.culprits[:2]:
            print(f"  {culprit}")
        if len(excess.culprits) > 2:
            print(f"  and {len(excess.culprits) - 2:,} more: copytrace report {file} --by-site")
    if over:
        raise typer.Exit(1)
    notes = [] if loaded.coverage.transfers else ["transfers were inferred"]
    if loaded.coverage.lost_transfers:
        notes.append(f"{plural(loaded.coverage.lost_transfers, 'transfer')} lost")
    print(f"{plural(len(measured(loaded, limits)), 'path')} within the limits{f' ({some(notes)})' if notes else ''}")
    for note in (*loaded.coverage.notes, *loaded.notes):
        print(f"  {plain(note)}")


@app.command(help="Compare two traces: which copies went, came, grew or moved.")
def diff(
    old: Annotated[str, typer.Argument(metavar="OLD", help="The trace, or the results of a matrix, from before.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The trace, or the results of a matrix, from after.")],
    format: FormatOption = Format.text,  # noqa: A002
    output: Output = None,
    force: Force = False,
    fail_on_new: Annotated[bool, typer.Option("--fail-on-new", help="Exit with 1 when copies came or grew.")] = False,
) -> None:
    from copytrace.matrix.compare import load_pair
    from copytrace.reports import diff as comparison

    if format is Format.html:
        _misuse("a comparison is not written as HTML; --format is text, markdown or json")
    found = comparison.compare(*(load_pair(old, new) or (load_report(old), load_report(new))))
    renderings: dict[Format, Callable[[int, bool], str]] = {
        Format.text: lambda width, color: comparison.to_text(found, width, color),
        Format.markdown: lambda *_: comparison.to_markdown(found),
        Format.json: lambda *_: comparison.to_json(found) + "\n",
    }
    _deliver(renderings[format], output, force)
    if fail_on_new and found.worse:
        raise typer.Exit(1)


@app.command(help="Write memray's flame graph of a run that was made with --keep-capture.")
def flamegraph(
    file: TraceFile,
    path: Annotated[
        str | None, typer.Option("--path", metavar="GLOB", help="Only what paths with such a label held at their peak.")
    ] = None,
    output: Output = None,
    force: Force = False,
    open_it: Annotated[bool, typer.Option("--open", help="In the browser.")] = False,
) -> None:
    from copytrace.flamegraph import captures, render
    from copytrace.trace import load

    kept = captures(file)
    out = output or f"{file}.flamegraph.html"
    _refuse_to_overwrite(Path(out), force)
    _deliver(lambda *_: render(load(file).trace, kept, path), out, force)
    print(f"the flame graph is in {out}")
    if open_it:
        _browse(out)


@app.command(help="Give what was measured to another tool.")
def export(
    file: TraceFile,
    cubed: Annotated[bool, typer.Option("--cubed", help="BufferCopies of each store, for cubed.")] = False,
    chrome_trace: Annotated[
        bool, typer.Option("--chrome-trace", help="Spans as JSON for Perfetto, Speedscope or chrome://tracing.")
    ] = False,
    output: Output = None,
    force: Force = False,
) -> None:
    from copytrace import export as handed
    from copytrace.trace import load

    if cubed == chrome_trace:
        _misuse("give one of --cubed and --chrome-trace")
    if cubed:
        found = load_report(file)
        _deliver(lambda *_: handed.cubed(found), output, force)
    else:
        trace = load(file).trace
        _deliver(lambda *_: handed.chrome_trace(trace) + "\n", output, force)


@app.command(help="Show what can be seen here: every probe and site, and why not.")
def doctor(
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 when a site is gone from an installed library.")
    ] = False,
) -> None:
    from copytrace import doctor as examination
    from copytrace.reports.wording import plain, plural

    found = examination.examine()
    _deliver(lambda width, color: examination.to_text(found, width, color), None, False)
    gone = examination.vanished(found) if strict else []
    for line in gone:
        print(plain(line))
    if gone:
        _say(f"{plural(len(gone), 'site')} of installed libraries cannot be seen")
        raise typer.Exit(1)


@app.command(help="Trace a few writes and reads of an array on a temporary directory and show the report.")
def demo(output: Output = None, force: Force = False) -> None:
    from copytrace.demo import trace

    if output is not None:
        _refuse_to_overwrite(Path(output), force)
    traced = trace()
    if output is not None:
        traced.save(output, overwrite=force)
    _deliver(lambda width, color: traced.report.to_text(width=width, color=color, file=output or ""), None, False)


@app.command(help="Run the stacks of the memray-array tables, each in an environment of its own, and save the tables.")
def matrix(
    table: Annotated[
        str, typer.Option("--table", metavar="current|latest|legacy|s3", help="Which stacks.")
    ] = "current",
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="DIR", help="Where results are kept; a second run goes on there.")
    ] = "copytrace-matrix",
    only: Annotated[str, typer.Option("--only", metavar="GLOB", help="Only rows whose name matches.")] = "",
    size: Annotated[int, typer.Option("--size", metavar="BYTES", min=4, help="Of the array.")] = 100_000_000,
    keep: Annotated[bool, typer.Option("--keep", help="Keep trace and report of each run there, too.")] = False,
    docs: Annotated[
        str | None,
        typer.Option(
            "--docs", metavar="DIR", help="Run nothing; write results.md and findings.md of all results there."
        ),
    ] = None,
    force: Force = False,
) -> None:
    if docs is not None:
        from copytrace.matrix import pages

        for name in ("results.md", "findings.md"):
            _refuse_to_overwrite(Path(docs, name), force)
        written = pages.write(Path(output), Path(docs))
        print(f"Wrote {written[0]} and {written[1]}")
        return
    from copytrace.matrix.runner import Matrix

    run = Matrix(table, Path(output), only=only, nbytes=size, keep=keep, tell=_say_plainly)
    try:
        found = run.run()
    except KeyboardInterrupt:
        _say_plainly("Interrupted: the same command goes on from here")
        raise
    saved = run.save()
    print(run.text())
    _say_plainly(f"Saved {saved[0]} and {saved[1]}")
    raise typer.Exit(int(any(figure.error for figure in found)))


def _say_plainly(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load_report(file: str) -> Report:
    """The report of a trace, of a crashed run's ``.partial`` directory or of a JSON report.

    Raises :class:`CopytraceError` when there is none in ``file``.
    """
    from copytrace.report import Report
    from copytrace.reports import wording
    from copytrace.trace import load

    path = Path(file)
    try:
        if not path.exists():
            partial = Path(f"{file}.partial")
            hint = f"; the run did not end, but left {partial}" if partial.exists() else ""
            raise CopytraceError(f"{file}: no such file{hint}")
        if path.is_file():
            with path.open("rb") as stream:
                if stream.read(1) == b"{":
                    return Report.from_json(path.read_text("utf-8"), file)
        with _progress(f"copytrace reads {wording.plain(file)}"):
            return load(path).report
    except (OSError, UnicodeDecodeError) as error:
        raise CopytraceError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


# --- small things ----------------------------------------------------------------------------------------------------


def _terminal(stream: TextIO) -> tuple[bool, int]:
    """Whether ``stream`` takes colour, and its width in columns; NO_COLOR, FORCE_COLOR and COLUMNS are honoured."""
    from rich.console import Console

    console = Console(file=stream)
    return console.is_terminal and not console.no_color, console.width


@contextmanager
def _progress(doing: str, quiet: bool = False) -> Iterator[None]:
    """Say on a terminal what takes its time, until it is done."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(file=sys.stderr)
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(escape(doing)):
        yield


def _deliver(render: Callable[[int, bool], str], output: str | None, overwrite: bool) -> None:
    """Print a rendering, or write it to ``output``, 80 columns wide and without colour."""
    if output is None:
        color, width = _terminal(sys.stdout)
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout.write(render(width, color))
        return
    _refuse_to_overwrite(Path(output), overwrite)
    text = render(80, False)
    try:
        with open(output, "w" if overwrite else "x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise CopytraceError(f"{output}: cannot be written ({error.strerror})") from None


def _refuse_to_overwrite(path: Path, overwrite: bool) -> None:
    if not path.parent.is_dir():
        raise CopytraceError(f"{path.parent}: no such directory; make it, or give another name with -o")
    if path.is_dir():
        raise CopytraceError(f"{path} is a directory; give a file with -o")
    if path.exists() and not overwrite:
        raise CopytraceError(f"{path} exists; give another name with -o, or -f to overwrite it")


def _open(report: Report, output: str | None, overwrite: bool) -> None:
    """Write ``report`` as HTML to ``output`` or a temporary file and show it in the browser."""
    import tempfile

    if output is None:
        handle, output = tempfile.mkstemp(prefix="copytrace-", suffix=".html")
        os.close(handle)
        overwrite = True
    _deliver(lambda *_: report.to_html() + "\n", output, overwrite)
    _browse(output)
    print(f"the report is in {output}")


def _browse(file: str) -> None:
    import webbrowser

    if not webbrowser.open(Path(file).absolute().as_uri()):
        raise CopytraceError(f"no browser could be started; the report is in {file}")


def _misuse(message: str) -> NoReturn:
    _say(message)
    raise typer.Exit(2)


def _one_line(error: Exception) -> str:
    """What to say of ``error``; a fault of copytrace itself is raised when COPYTRACE_STRICT is set."""
    if isinstance(error, CopytraceError):
        return str(error)
    if os.environ.get("COPYTRACE_STRICT"):
        raise error
    told = " ".join(f"{type(error).__name__}: {error}".split())
    return f"a fault of copytrace's own ({told}); COPYTRACE_STRICT=1 shows where"


def _say(message: str) -> None:
    print(f"copytrace: {message}", file=sys.stderr)
