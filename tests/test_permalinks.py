"""Links to sources: the tag and the root of each project, against the repositories, the wheels and the sdists."""

from __future__ import annotations

import importlib
import inspect
import shutil
import subprocess
import tarfile
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

from copytrace import environment
from copytrace.layers import SOURCES, permalink
from copytrace.model import Frame
from copytrace.places import relative

if TYPE_CHECKING:
    from pathlib import Path

GITHUB = "https://github.com/"

TAGGED = {
    ("zarr", "3.3.0"): "zarr-developers/zarr-python/blob/v3.3.0/src/",
    ("zarr", "3.0.6"): "zarr-developers/zarr-python/blob/v3.0.6/src/",
    ("zarr", "2.18.7"): "zarr-developers/zarr-python/blob/v2.18.7/",
    ("numcodecs", "0.17.1"): "zarr-developers/numcodecs/blob/v0.17.1/src/",
    ("numcodecs", "0.16.5"): "zarr-developers/numcodecs/blob/v0.16.5/",
    ("numcodecs", "0.15.1"): "zarr-developers/numcodecs/blob/v0.15.1/",
    ("fsspec", "2026.7.0"): "fsspec/filesystem_spec/blob/2026.7.0/",
    ("fsspec", "2022.10.0"): "fsspec/filesystem_spec/blob/2022.10.0/",
    ("fsspec", "2022.2.0"): "",
    ("s3fs", "2026.4.0"): "fsspec/s3fs/blob/2026.4.0/",
    ("s3fs", "2022.1.0"): "",
    ("aiohttp", "3.14.3"): "aio-libs/aiohttp/blob/v3.14.3/",
    ("xarray", "2026.7.0"): "pydata/xarray/blob/v2026.07.0/",
    ("xarray", "2023.4.2"): "pydata/xarray/blob/v2023.04.2/",
    ("xarray", "2025.10.1"): "pydata/xarray/blob/v2025.10.1/",
    ("xarray", "0.20.2"): "",
    ("dask", "2026.7.1"): "dask/dask/blob/2026.7.1/",
    ("dask", "2023.3.2.1"): "dask/dask/blob/2023.3.2.1/",
    ("dask", "2022.5.2"): "",
    ("botocore", "1.43.67"): "boto/botocore/blob/1.43.67/",
    ("obstore", "0.11.0"): "developmentseed/obstore/blob/py-v0.11.0/obstore/python/",
    ("obstore", "0.4.0"): "",
    ("icechunk", "2.1.2"): "earth-mover/icechunk/blob/v2.1.2/icechunk-python/python/",
    ("icechunk", "1.1.21"): "earth-mover/icechunk/blob/v1.1.21/icechunk-python/python/",
    ("memray", "1.20.0"): "",
}
"""Where a file of that release lies in the project's repository, as its tags and trees say; empty for no link."""

FUNCTIONS = {
    "zarr": "zarr.core.buffer.cpu:NDBuffer.__setitem__",
    "numcodecs": "numcodecs.compat:ensure_contiguous_ndarray",
    "fsspec": "fsspec.implementations.local:LocalFileSystem._open",
    "s3fs": "s3fs.core:S3FileSystem._pipe_file",
    "aiohttp": "aiohttp.streams:StreamReader.read",
    "xarray": "xarray.core.variable:Variable.load",
    "dask": "dask.array.core:Array.store",
    "botocore": "botocore.client:BaseClient._make_api_call",
    "obstore": "obstore.store:from_url",
    "icechunk": "icechunk.store:IcechunkStore.get",
}


def url(file: str, versions: dict[str, str], line: int = 1, native: bool = False) -> str:
    return permalink(Frame("f", file, line, native), versions)


@pytest.mark.parametrize(("package", "version"), TAGGED)
def test_a_release_has_its_tag_and_root(package: str, version: str) -> None:
    file, root = f"{package}/core.py", TAGGED[package, version]
    assert url(file, {package: version}, 17) == (f"{GITHUB}{root}{file}#L17" if root else "")


@pytest.mark.parametrize(
    "version", ["", "unknown", "3.3.1.dev4", "3.3.0+dirty", "3.3.0rc1", "3.3.0.post1", "v3.3.0", "3..0", "3.3.0\n"]
)
def test_what_is_no_release_has_no_link(version: str) -> None:
    assert url("zarr/core/array.py", {"zarr": version}) == ""


def test_native_frames_and_files_without_a_line_have_no_link() -> None:
    versions = {"obstore": "0.11.0"}
    assert url("_obstore.abi3.so", versions, native=True) == ""
    assert url("obstore/store.py", versions, native=True) == ""
    assert url("obstore/store.py", versions, line=0) == ""
    assert url("notobstore/store.py", versions) == ""


@pytest.mark.parametrize("package", SOURCES)
def test_the_function_of_an_installed_wheel_is_on_the_line_of_its_link(package: str) -> None:
    try:
        installed = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    module, _, name = FUNCTIONS[package].partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    found = inspect.unwrap(found)
    file, kind = relative(found.__code__.co_filename)
    assert kind == "installed"
    line = found.__code__.co_firstlineno
    link = url(file, {package: installed.version}, line)
    assert link.endswith(f"/{file}#L{line}")
    listed = {str(one): one for one in installed.files or ()}
    text = listed[file].read_text().splitlines()
    assert any(f"def {found.__name__}" in row for row in text[line - 1 : line + 5])


def described(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str | None]) -> dict[str, Any]:
    """The environment with distributions of these names, and the ``direct_url.json`` of each."""

    class Distribution:
        version = "3.3.0"

        def __init__(self, name: str) -> None:
            if name not in installed:
                raise metadata.PackageNotFoundError(name)
            self.name = name

        def read_text(self, name: str) -> str | None:
            return installed[self.name] if name == "direct_url.json" else "pip\n"

    monkeypatch.setattr(environment, "_installed", environment._installed.__wrapped__)
    monkeypatch.setattr(environment.metadata, "distribution", Distribution)
    for name in installed:
        monkeypatch.setitem(environment.sys.modules, name, environment)
    return environment.describe()


def test_what_was_installed_from_a_directory_has_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    found = described(monkeypatch, {"zarr": '{"url": "file:///x", "dir_info": {"editable": true}}', "dask": None})
    assert found["packages"] == {"dask": "3.3.0", "zarr": "3.3.0"}
    assert found["from_source"] == ["zarr"]
    assert environment.released(found) == {"dask": "3.3.0"}
    assert "file:///x" not in str(found)
    assert url("zarr/core/array.py", environment.released(found)) == ""


def test_a_trace_of_before_has_links() -> None:
    assert environment.released({"packages": {"zarr": "3.3.0"}}) == {"zarr": "3.3.0"}
    assert environment.released({}) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("zarr", "3.3.0"),
        ("zarr", "2.18.7"),
        ("fsspec", "2026.7.0"),
        ("s3fs", "2026.4.0"),
        ("xarray", "2026.7.0"),
        ("dask", "2026.7.1"),
        ("aiohttp", "3.14.3"),
    ],
)
def test_every_file_of_a_release_lies_under_the_root(package: str, version: str, tmp_path: Path) -> None:
    """The sdist has the tree of the repository, and each module of the wheel is in it, under the mapped root."""
    uvx = shutil.which("uvx")
    assert uvx is not None, "needs uv"
    command = [uvx, "--python", "3.12", "pip", "download", "-q", "--no-deps", f"{package}=={version}", "-d"]
    subprocess.run([*command, str(tmp_path / "sdist"), "--no-binary", package], check=True)
    subprocess.run([*command, str(tmp_path / "wheel"), "--only-binary", package], check=True)
    (sdist,), (wheel,) = (list((tmp_path / kind).iterdir()) for kind in ("sdist", "wheel"))
    shutil.unpack_archive(wheel, tmp_path / "files", "zip")
    with tarfile.open(sdist) as archive:
        source = {one.name.partition("/")[2]: one for one in archive.getmembers()}
        modules = [path for path in (tmp_path / "files" / package).rglob("*.py") if path.stem != "_version"]
        assert len(modules) >= 5
        root = f"{GITHUB}{TAGGED[package, version]}"
        repository = root.split("/blob/")[1].partition("/")[2]
        for module in modules:
            file = str(module.relative_to(tmp_path / "files"))
            link = url(file, {package: version})
            assert link == f"{root}{file}#L1"
            stored = archive.extractfile(source[repository + file])
            assert stored is not None
            assert stored.read() == module.read_bytes()
