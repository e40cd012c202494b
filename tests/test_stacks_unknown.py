"""Libraries that copytrace has never heard of: a store in Python, a codec in C, C called from user code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stacks import copies, functions, install, only, trace

if TYPE_CHECKING:
    from pathlib import Path

SIDE = 1003
SIZE = SIDE * SIDE * 4

_STORE = """
from zarr.storage import MemoryStore

class TinyStore(MemoryStore):
    async def set(self, key, value, byte_range=None):
        await super().set(key, type(value).from_bytes(self._private(value)))

    def _private(self, value):
        return bytes(value.as_numpy_array().data)
"""

_CODEC = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

/* A copy into memory of its own by memcpy, and from there into bytes by CPython. */
__attribute__((noinline)) static PyObject *tiny_pack_body(const char *data, Py_ssize_t size) {
    char *own = PyMem_RawMalloc(size);
    if (!own) return PyErr_NoMemory();
    memcpy(own, data, size);
    PyObject *packed = PyBytes_FromStringAndSize(own, size);
    PyMem_RawFree(own);
    return packed;
}

static PyObject *pack(PyObject *self, PyObject *argument) {
    Py_buffer view;
    if (PyObject_GetBuffer(argument, &view, PyBUF_SIMPLE)) return NULL;
    PyObject *packed = tiny_pack_body(view.buf, view.len);
    PyBuffer_Release(&view);
    return packed;
}

static PyMethodDef methods[] = {{"pack", pack, METH_O, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_pack", "", -1, methods};
PyMODINIT_FUNC PyInit__pack(void) { return PyModule_Create(&module); }
"""

_NUMCODEC = """
from numcodecs.abc import Codec
from tinycodec._pack import pack

class Tiny(Codec):
    codec_id = "tiny"

    def encode(self, buf):
        return pack(buf)

    def decode(self, buf, out=None):
        return pack(buf)
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("packages")
    install(place, "tinystore", {"__init__.py": _STORE})
    return install(place, "tinycodec", {"__init__.py": _NUMCODEC, "_pack.c": _CODEC})


def test_a_store_in_python_is_named_by_its_package_and_function(tmp_path: Path, packages: Path) -> None:
    report = trace(
        tmp_path,
        """
        z = zarr.create_array(TinyStore(), shape=a.shape, chunks=a.shape, dtype="f4", compressors=None)
        z[...] = a
        """,
        before=f"""
import zarr
from tinystore import TinyStore
a = np.random.default_rng(0).random(({SIDE}, {SIDE}), dtype="f4")
""",
        path=(packages,),
    )
    path = only(report, "write")
    assert path.store == "TinyStore"
    assert ("copy", SIZE, "tinystore", "_private") in copies(path)
    assert "tinystore.TinyStore._private" in functions(path)
    assert {layer.project for layer in report.layers} >= {"tinystore"}


def test_a_codec_in_c_is_named_by_its_package_and_function(tmp_path: Path, packages: Path) -> None:
    report = trace(
        tmp_path,
        "packed = Tiny().encode(a)",
        before=f"from tinycodec import Tiny; a = np.random.default_rng(0).random({SIDE * SIDE}, dtype='f4')",
        path=(packages,),
    )
    path = only(report, "encode")
    assert path.codecs == ("tiny",)
    assert ("encode", SIZE, "tinycodec", "encode") in copies(path)
    assert "tinycodec.Tiny.encode" in functions(path)


def test_c_called_from_user_code_is_named_by_its_package_and_function(tmp_path: Path, packages: Path) -> None:
    report = trace(
        tmp_path,
        """
        with copytrace.operation("pack", payload_bytes=a.nbytes):
            packed = pack(a)
        """,
        before=f"from tinycodec._pack import pack; a = np.random.default_rng(0).random({SIDE * SIDE}, dtype='f4')",
        path=(packages,),
    )
    (path,) = report.paths
    assert copies(path) == [
        ("copy", SIZE, "tinycodec", "tiny_pack_body"),
        ("copy", SIZE, "tinycodec", "tiny_pack_body"),
    ]
    assert path.copies == pytest.approx(2.0, rel=0.001)
