"""zarr's own tests of stores, which it ships for those who write one, on the stores that are probed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import obstore
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from zarr.core.buffer import cpu
from zarr.storage import LocalStore, MemoryStore, ObjectStore
from zarr.testing.stateful import ZarrHierarchyStateMachine, ZarrStoreStateMachine
from zarr.testing.store import StoreTests


class Stores(StoreTests[Any, cpu.Buffer]):
    buffer_cls = cpu.Buffer

    async def set(self, store: Any, key: str, value: Any) -> None:
        await store.set(key, value)

    async def get(self, store: Any, key: str) -> Any:
        return await store.get(key, prototype=cpu.buffer_prototype)

    def test_store_repr(self, store: Any) -> None:
        assert type(store).__name__ in repr(store) or "://" in str(store)

    def test_store_supports_writes(self, store: Any) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: Any) -> None:
        assert store.supports_listing


class TestMemory(Stores):
    store_cls = MemoryStore

    @pytest.fixture
    def store_kwargs(self) -> dict[str, Any]:
        return {"store_dict": {}}


class TestLocal(Stores):
    store_cls = LocalStore

    @pytest.fixture
    def store_kwargs(self, tmp_path: Path) -> dict[str, Any]:
        return {"root": str(tmp_path)}


class TestObjectLocal(Stores):
    store_cls = ObjectStore

    @pytest.fixture
    def store_kwargs(self, tmp_path: Path) -> dict[str, Any]:
        return {"store": obstore.store.LocalStore(prefix=tmp_path)}


class TestObjectMemory(Stores):
    store_cls = ObjectStore

    @pytest.fixture
    def store_kwargs(self) -> dict[str, Any]:
        return {"store": obstore.store.MemoryStore()}


STEPS = settings(max_examples=3, stateful_step_count=10, deadline=None, derandomize=True)


@pytest.mark.parametrize("machine", [ZarrStoreStateMachine, ZarrHierarchyStateMachine])
def test_machine(machine: Any) -> None:
    store = MemoryStore()
    run_state_machine_as_test(lambda: machine(store), settings=STEPS)  # type: ignore[no-untyped-call]
