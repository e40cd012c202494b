"""Python imports this when it starts: the process that started it is traced and follows its children.

The sitecustomize that would have been imported without this one is imported in its place.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _begin() -> None:
    try:
        from copytrace.follow import begin
    except ImportError as error:
        _tell(f"copytrace cannot be imported there: {error}")
    else:
        begin()


def _tell(reason: str) -> None:
    """Leave word of a process that cannot be traced."""
    import json

    directory = os.environ.get("COPYTRACE_FOLLOW", "")
    program = os.path.basename(sys.orig_argv[0]) if sys.orig_argv else "python"
    try:
        with open(os.path.join(directory, f"untraced-{os.getpid()}.json"), "x", encoding="utf-8") as file:
            json.dump({"name": program, "kind": "started", "reason": reason}, file)
    except OSError:
        pass


def _hand_on() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = PathFinder.find_spec(__name__, sys.path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
    module = module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


try:
    _hand_on()
finally:
    if os.path.isdir(os.environ.get("COPYTRACE_FOLLOW", "")):
        _begin()
