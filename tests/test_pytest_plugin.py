"""The pytest plugin, in suites of its own: what fails, what it says, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import zarr  # noqa: F401  (suites that run in this process find it imported)

from copytrace import attribution, session  # noqa: F401
from copytrace.reports import limits  # noqa: F401
from stacks import needs_the_hook

pytest_plugins = ["pytester"]

STORE = """
from zarr.storage import LocalStore

class ShelfStore(LocalStore):
    async def set(self, key, value):
        await super().set(key, value)

class CarelessStore(LocalStore):
    async def set(self, key, value):
        copied = value.as_numpy_array().tobytes()
        await super().set(key, type(value).from_bytes(copied))

class WorseStore(CarelessStore):
    async def set(self, key, value):
        await super().set(key, type(value).from_bytes(value.to_bytes()))
"""
HEAP = """
from zarr.storage import LocalStore
class HeapStore(LocalStore):
    async def set(self, key, value):
        for copy in COPIES:
            copy(value.as_numpy_array())
        await super().set(key, value)
"""
LINE = STORE.split("\n").index("        copied = value.as_numpy_array().tobytes()")

HELP = """
import numpy as np
import pytest
import zarr
from shelf import CarelessStore, ShelfStore, WorseStore

def write(store, side=211):
    z = zarr.create_array(store, shape=(side, 503), chunks=(side, 503), dtype="f4", compressors=None)
    z[:] = np.full((side, 503), 1.5, "f4")
    return z
"""
ONE_WRITE = f"""{HELP}
@pytest.mark.limit_copies(MARK)
def test_write(tmp_path):
    write(STORE(tmp_path))
"""
SUITE = f"""{HELP}
@pytest.mark.parametrize("side", [101, 211])
def test_write(tmp_path, side):
    write(STORE(tmp_path), side)

def test_no_array():
    assert ShelfStore("x").root.name == "x"
"""
NBYTES = 211 * 503 * 4


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """A directory with stores and a pyproject that knows nothing of copytrace; warnings are errors in it."""
    pytester.makepyfile(shelf=STORE)
    pytester.makepyprojecttoml(
        "[tool.pytest.ini_options]\nfilterwarnings = ['error']\naddopts = ['-p', 'no:asyncio']\n"
    )
    pytester.syspathinsert()
    return pytester


def run(suite: pytest.Pytester, *arguments: str, apart: bool = False) -> pytest.RunResult:
    """Run the suite in this process or in one of its own."""
    start = suite.runpytest_subprocess if apart else suite.runpytest_inprocess
    return start("-p", "no:cacheprovider", "--strict-markers", *arguments)


def one_write(store: str, mark: str) -> str:
    return ONE_WRITE.replace("STORE", store).replace("MARK", mark)


def add_to_pyproject(suite: pytest.Pytester, *lines: str) -> None:
    with (suite.path / "pyproject.toml").open("a") as stream:
        stream.writelines(f"\n{line}" for line in lines)


def test_the_plugin_is_an_entry_point() -> None:
    (entry,) = entry_points(group="pytest11", name="copytrace")
    assert entry.value == "copytrace.pytest_plugin", "install the project again: its entry points have changed"


def test_importing_the_plugin_imports_nothing_of_the_stack() -> None:
    program = """
import sys
import pytest
before = set(sys.modules)
import copytrace.pytest_plugin
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("copytrace")))
print(*sorted(name for name in sys.modules if name.startswith("copytrace")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    others, own = done.stdout.splitlines()
    assert not {name.partition(".")[0] for name in others.split()} & {
        "numpy",
        "zarr",
        "memray",
        "wrapt",
        "typer",
        "rich",
    }
    assert own.split() == ["copytrace", "copytrace.pytest_plugin"]


def test_a_suite_adopts_it_with_three_lines(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_shelf=SUITE.replace("STORE", "ShelfStore"), test_careless=SUITE.replace("STORE", "CarelessStore")
    )
    run(suite).assert_outcomes(passed=6)
    add_to_pyproject(
        suite,
        "copytrace_max_copies = '0'",
        "copytrace_path = 'write*'",
        "copytrace_tests = ['test_shelf.py::*', 'test_careless.py::*']",
    )
    result = run(suite)
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(
        ["FAILED test_careless.py::test_write[[]101[]]*", "FAILED test_careless.py::test_write[[]211[]]*"]
    )


def test_a_failure_names_limit_and_figure_and_the_line_that_copies(suite: pytest.Pytester) -> None:
    suite.makepyfile(one_write("CarelessStore", "0, path='write*'"))
    result = run(suite)
    result.assert_outcomes(failed=1)
    at = next(number for number, line in enumerate(result.outlines) if line.startswith("1.00 copies"))
    assert (
        result.outlines[at]
        == "1.00 copies on write . zarr.Array . CarelessStore . bytes, but limit_copies(0, path='write*')"
    )
    assert result.outlines[at + 1] == f"  user shelf.CarelessStore.set: copy 0.4 MB, 1.00 x, avoidable, shelf.py:{LINE}"
    assert result.outlines[at + 2].startswith("===")
    assert NBYTES == 424_532


def test_the_guilty_of_a_conversion_is_the_line_that_asked_for_it(suite: pytest.Pytester) -> None:
    suite.makepyfile(one_write("WorseStore", "1"))
    result = run(suite)
    line = STORE.split("\n").index("        await super().set(key, type(value).from_bytes(value.to_bytes()))")
    result.stdout.fnmatch_lines(
        [
            "2.00 copies on write . zarr.Array . WorseStore . bytes, but limit_copies(1)",
            f"  user *Buffer.to_bytes: copy 0.4 MB, 1.00 x, *, called from shelf.WorseStore.set, shelf.py:{line}",
            f"  user shelf.CarelessStore.set: copy 0.4 MB, 1.00 x, avoidable, shelf.py:{LINE}",
        ],
        consecutive=True,
    )


LIMITS = {
    "1": True,
    "0.99": False,
    "0, path='read*'": False,
    "0, path='write*', layer='zarr'": True,
    "0, layer='user', path='write*'": False,
    "0, layer='memray', path='write*'": True,
    "0, layer='zrar', path='write*'": False,
    f"0, path='write*', min_bytes={NBYTES}": False,
    f"0, path='write*', min_bytes={NBYTES + 1}": True,
    "path='write*', max_extra_at_peak=0.9": False,
    "path='write*', max_extra_at_peak=1.5": True,
}


def test_limits(suite: pytest.Pytester) -> None:
    marked = [
        f"@pytest.mark.limit_copies({mark})\ndef test_{number}_{passes}(tmp_path):\n  write(CarelessStore(tmp_path))\n"
        for number, (mark, passes) in enumerate(LIMITS.items())
    ]
    suite.makepyfile("\n".join([HELP, *marked]))
    result = run(suite, "-v")
    for number, passes in enumerate(LIMITS.values()):
        result.stdout.fnmatch_lines([f"*::test_{number}_{passes} {'PASSED' if passes else 'FAILED'}*"])


NONSENSE = {
    "": "limit_copies: no limit; give max_copies, or set copytrace_max_copies in the ini file",
    "-1": "limit_copies: max_copies=-1: give a number from 0 up",
    "float('nan')": "limit_copies: max_copies=nan: give a number from 0 up",
    "'0'": "limit_copies: max_copies='0': give a number from 0 up",
    "0, path=1": "limit_copies: path=1: give a string",
    "0, speed=1": "limit_copies: got an unexpected keyword argument 'speed'",
    "0": "limit_copies(0): no operation was recorded, so there is nothing to check; see copytrace doctor",
}


def test_a_mark_that_says_nothing_fails_in_one_line(suite: pytest.Pytester) -> None:
    marked = [
        f"@pytest.mark.limit_copies({mark})\ndef test_{number}():\n    pass\n" for number, mark in enumerate(NONSENSE)
    ]
    suite.makepyfile("\n".join(["import pytest", *marked]))
    result = run(suite)
    result.assert_outcomes(failed=len(NONSENSE))
    for message in NONSENSE.values():
        at = result.outlines.index(message)
        assert result.outlines[at - 1].startswith("___")
        assert result.outlines[at + 1].startswith(("___", "==="))


def test_many_guilty_sites_are_cut_after_ten_more_lines(suite: pytest.Pytester) -> None:
    functions = [f"def copy_{number}(array):\n    return array.tobytes()\n" for number in range(14)]
    names = ", ".join(f"copy_{number}" for number in range(14))
    suite.makepyfile(heap="\n".join([*functions, f"COPIES = [{names}]", HEAP]))
    suite.makepyfile(f"from heap import HeapStore\n{one_write('HeapStore', '0')}")
    result = run(suite)
    result.assert_outcomes(failed=1)
    at = next(number for number, line in enumerate(result.outlines) if ", but limit_copies(0)" in line)
    assert all(line.startswith("  user ") for line in result.outlines[at + 1 : at + 13])
    assert result.outlines[at + 13].startswith("and ")
    assert result.outlines[at + 13].endswith(" more")


def test_nearer_marks_win_and_the_body_alone_is_traced(suite: pytest.Pytester) -> None:
    suite.makepyfile(f"""{HELP}
pytestmark = pytest.mark.limit_copies(0, path="write*")

@pytest.fixture
def made(tmp_path):
    yield write(CarelessStore(tmp_path / "before"))
    write(CarelessStore(tmp_path / "after"))

@pytest.mark.limit_copies(1, path="write*")
class TestStores:
    def test_class(self, tmp_path):
        write(CarelessStore(tmp_path))

    @pytest.mark.limit_copies(0, path="write*")
    def test_method(self, tmp_path):
        write(CarelessStore(tmp_path))

    @pytest.mark.limit_copies(0, path="read*", layer="user")
    def test_both(self, tmp_path):
        write(CarelessStore(tmp_path))[:]

@pytest.mark.parametrize("store", [
    ShelfStore,
    pytest.param(CarelessStore, marks=pytest.mark.limit_copies(1, path="write*")),
    pytest.param(CarelessStore, marks=pytest.mark.xfail(strict=True), id="known"),
])
def test_parameters(tmp_path, made, store):
    write(store(tmp_path))

def test_its_own_error_comes_first(tmp_path):
    write(CarelessStore(tmp_path))
    raise RuntimeError("mine")

def test_skipped(tmp_path):
    write(CarelessStore(tmp_path))
    pytest.skip("not here")
""")
    result = run(suite)
    result.assert_outcomes(passed=4, failed=2, xfailed=1, skipped=1)
    result.stdout.fnmatch_lines(["FAILED *::TestStores::test_method*", "FAILED *::test_its_own_error_comes_first*"])


def test_the_fixture_traces_and_limits_a_part(suite: pytest.Pytester) -> None:
    suite.makepyfile(f"""{HELP}
def test_report(tmp_path, copytrace):
    with copytrace() as session:
        write(CarelessStore(tmp_path))
    (path,) = session.report.paths
    assert path.copied_bytes == {NBYTES}

def test_limit(tmp_path, copytrace):
    write(CarelessStore(tmp_path / "a"))
    with copytrace(0, path="write*"):
        write(ShelfStore(tmp_path / "b"))

@pytest.mark.limit_copies(2)
def test_excess(tmp_path, copytrace):
    with copytrace(0, path="write*"):
        write(CarelessStore(tmp_path))

def test_error(copytrace):
    with pytest.raises(KeyError), copytrace(0):
        raise KeyError

def test_misuse(copytrace):
    with copytrace(-1):
        pass
""")
    result = run(suite)
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["FAILED *::test_excess*", "FAILED *::test_misuse*"])


def test_unittest_cases(suite: pytest.Pytester) -> None:
    suite.makepyfile(f"""{HELP}
import tempfile, unittest
class TestIt(unittest.TestCase):
    @pytest.mark.limit_copies(0, path="write*")
    def test_write(self):
        with tempfile.TemporaryDirectory() as folder:
            write(CarelessStore(folder))
""")
    run(suite).assert_outcomes(failed=1)


@pytest.mark.parametrize("plugin", ["asyncio", "anyio"])
def test_async_tests(suite: pytest.Pytester, plugin: str) -> None:
    if plugin == "asyncio":
        suite.makepyprojecttoml(
            "[tool.pytest.ini_options]\nfilterwarnings = ['error']\nasyncio_default_fixture_loop_scope = 'function'\n"
        )
    suite.makepyfile(f"""{HELP}
import asyncio
@pytest.fixture
def anyio_backend():
    return "asyncio"

@pytest.mark.{plugin}
@pytest.mark.limit_copies(0, path="write*")
@pytest.mark.parametrize("store", [ShelfStore, CarelessStore])
async def test_write(tmp_path, store):
    await asyncio.sleep(0)
    z = await zarr.api.asynchronous.create_array(
        store(tmp_path), shape=(211, 503), chunks=(211, 503), dtype="f4", compressors=None
    )
    await z.setitem(slice(None), np.full((211, 503), 1.5, "f4"))
""")
    run(suite).assert_outcomes(passed=1, failed=1)


@needs_the_hook
def test_beside_pytest_memray(suite: pytest.Pytester) -> None:
    suite.makepyfile(f"""{HELP}
@pytest.mark.limit_copies(0, path="write*")
@pytest.mark.parametrize("store", [ShelfStore, CarelessStore])
def test_write(tmp_path, store):
    write(store(tmp_path))

@pytest.mark.limit_memory("100 MB")
@pytest.mark.limit_copies(1, path="write*")
def test_both(tmp_path):
    write(CarelessStore(tmp_path))

@pytest.mark.limit_memory("1 kB")
@pytest.mark.limit_copies(1, path="write*")
def test_over(tmp_path):
    write(CarelessStore(tmp_path))
""")
    for arguments in (["--memray"], [], ["-p", "no:memray", "-o", "markers=limit_memory"]):
        result = run(suite, *arguments)
        over = 0 if "no:memray" in arguments else 1
        result.assert_outcomes(passed=3 - over, failed=1 + over)
        result.stdout.fnmatch_lines(["1.00 copies on write . zarr.Array . CarelessStore . bytes, but *"])


def _parallel(suite: pytest.Pytester, tests: int) -> pytest.RunResult:
    suite.makepyfile(f"""{HELP}
@pytest.mark.limit_copies(0, path="write*")
@pytest.mark.parametrize("number", range({tests}))
def test_write(tmp_path, number):
    write(ShelfStore(tmp_path), 101 + number)

@pytest.mark.limit_copies(1, path="read*")
@pytest.mark.parametrize("number", range({tests}))
def test_read(tmp_path, number):
    z = write(ShelfStore(tmp_path), 101 + number)
    assert (z[:] == 1.5).all()
""")
    return run(suite, "-n", "2", apart=True)


def test_xdist(suite: pytest.Pytester) -> None:
    _parallel(suite, 2).assert_outcomes(passed=4)


@pytest.mark.slow
def test_no_false_failure_in_twenty_runs_with_xdist(suite: pytest.Pytester) -> None:
    for _ in range(20):
        _parallel(suite, 3).assert_outcomes(passed=6)


def test_the_marker_is_described(suite: pytest.Pytester) -> None:
    result = run(suite, "--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.limit_copies(max_copies, [*]*): fail when the test copies more than *"])


def test_tests_without_a_mark_cost_nothing(suite: pytest.Pytester) -> None:
    suite.makepyfile("""
import sys
def test_it():
    loaded = {name for name in sys.modules if name.startswith("copytrace")}
    assert loaded == {"copytrace", "copytrace.pytest_plugin"}
    assert "wrapt" not in sys.modules
""")
    run(suite, "-p", "no:memray", apart=True).assert_outcomes(passed=1)
