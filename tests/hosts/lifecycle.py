"""Imports packages, attaches probes and detaches them in the order given, and prints what came of it as JSON.

Usage: lifecycle.py ORDER PACKAGE...
"""

import contextlib
import importlib
import json
import sys
import tempfile
import warnings
from pathlib import Path

from copytrace.probes import attach_all, targets_of
from copytrace.probes._attach import _builtin
from copytrace.recorder import recorder

warnings.simplefilter("ignore")
order, packages = json.loads(sys.argv[1]), sys.argv[2:]
attached = {package: {} for package in packages}
before = {package: {} for package in packages}
attachment = None


def attributes(package):
    """Name -> object, of the modules of a package and of the classes that are defined in them."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package and module is not None:
            for key, value in list(vars(module).items()):
                found[f"{name}:{key}"] = value
                if isinstance(value, type) and str(value.__module__).partition(".")[0] == package:
                    found |= {f"{name}:{key}.{member}": of for member, of in list(vars(value).items())}
    return found


def is_ours(value):
    value = getattr(value, "__func__", value)
    return getattr(getattr(value, "__code__", None), "co_filename", "") == "copytrace"


def step(name):
    global attachment
    if name == "import":
        for package in packages:
            importlib.import_module(package)
        for probe in (probe for probe in _builtin() if probe.package in packages):
            for target in {each for targets in targets_of(probe.name).values() for each in targets}:
                with contextlib.suppress(ImportError):
                    importlib.import_module(target.partition(":")[0])
    elif name.startswith("attach"):
        recorder.begin(Path(tempfile.mkdtemp(dir=spool)), lambda _: 1)
        attachment = attach_all()
    else:
        statuses = attachment.statuses()
        for package in packages:
            told = [s for s in statuses if s.library.replace("-", "_") == package]
            count = sum(site["status"] == "attached" for s in told for site in s.sites)
            attached[package]["attach again" if name.endswith("again") else "attach"] = count
        attachment.detach()
        recorder.end()


with tempfile.TemporaryDirectory() as spool:
    for number, name in enumerate(order):
        step(name)
        if number == 0 and name == "import":
            before = {package: attributes(package) for package in packages}

left, changed = {}, {}
for package in packages:
    now = attributes(package)
    left[package] = sorted(name for name, value in now.items() if is_ours(value))
    changed[package] = sorted(
        name
        for name, value in before[package].items()
        if now.get(name, before) is not value and not name.endswith(("_abc_impl", ".__doc__"))
    )
print(
    json.dumps(
        {
            "attached": attached,
            "left": left,
            "changed": changed,
            "finders": [type(each).__name__ for each in sys.meta_path if type(each).__module__.startswith("copytrace")],
        }
    )
)
