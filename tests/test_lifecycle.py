"""Every probe in every order of import, attach, detach and attach again, each order in a fresh process."""

from __future__ import annotations

import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from copytrace.probes._attach import _builtin

HERE = Path(__file__).parent
STEPS = ("import", "attach", "detach", "attach again", "detach again")
ORDERS = tuple(
    order
    for order in itertools.permutations(STEPS)
    if [step for step in order if step != "import"] == ["attach", "detach", "attach again", "detach again"]
)
"""The import at every moment of two sessions: before, in the first, between, in the second, after."""
PACKAGES = sorted({probe.package for probe in _builtin() if probe.library != "python"})
INSTALLED = [package for package in PACKAGES if importlib.util.find_spec(package)]


def test_the_orders_are_complete() -> None:
    """Attach and detach alternate, so an order is told by where the import is among them."""
    sessions = [step for step in STEPS if step != "import"]
    assert len(ORDERS) == len(sessions) + 1
    assert sorted(order.index("import") for order in ORDERS) == list(range(len(STEPS)))
    for order in ORDERS:
        assert sorted(order) == sorted(STEPS)
        for begin, end in (("attach", "detach"), ("detach", "attach again"), ("attach again", "detach again")):
            assert order.index(begin) < order.index(end)


def test_every_probe_is_tried() -> None:
    modules = {
        path.stem for path in (Path(HERE).parent / "src/copytrace/probes").iterdir() if not path.stem.startswith("_")
    }
    told = {module for probe in _builtin() for module in modules if probe.name in (module, *_members(module))}
    assert told == modules - {"primitives"}, "primitives are part of the probe of Python"


def _members(module: str) -> tuple[str, ...]:
    found = importlib.import_module(f"copytrace.probes.{module}")
    return tuple(value.name for value in vars(found).values() if type(value).__name__ == "Probe")


def lives(order: tuple[str, ...], packages: list[str]) -> None:
    """Go through ``order`` in a fresh process and judge what came of it."""
    command = [sys.executable, str(HERE / "hosts" / "lifecycle.py"), json.dumps(order), *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["finders"] == []
    for package in packages:
        attached = found["attached"][package]
        assert found["left"][package] == found["changed"][package] == [], package
        assert (attached["attach"] > 0) == (order.index("import") < order.index("detach")), package
        assert (attached["attach again"] > 0) == (order.index("import") < order.index("detach again")), package


@pytest.mark.parametrize("order", ORDERS, ids=" - ".join)
def test_every_order_of_what_most_use(order: tuple[str, ...]) -> None:
    lives(order, [package for package in ("numcodecs", "zarr") if package in INSTALLED])


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids=" - ".join)
def test_every_order_of_all_together(order: tuple[str, ...]) -> None:
    lives(order, INSTALLED)


@pytest.mark.slow
@pytest.mark.parametrize("package", INSTALLED)
@pytest.mark.parametrize("order", ORDERS, ids=" - ".join)
def test_every_order_of_each_alone(order: tuple[str, ...], package: str) -> None:
    lives(order, [package])
