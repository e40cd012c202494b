"""Sessions in every order: nested, repeated, in threads, in coroutines, around code that raises."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["Probe", "Report", "Session", "Site", "load", "operation", "session"])
def test_a_public_name_means_the_same_whatever_was_imported_before(name: str) -> None:
    program = f"""
import copytrace, importlib, pkgutil
first = copytrace.{name}
for module in pkgutil.walk_packages(copytrace.__path__, "copytrace."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert copytrace.{name} is first, (first, copytrace.{name})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
