"""zarr's own tests of stores have the same outcomes in a session; ``peers.py`` runs whole suites."""

from __future__ import annotations

import pytest

import peers


@pytest.mark.slow
@pytest.mark.parametrize("suite", list(peers.SUITES))
def test_no_test_of_another_project_changes_its_outcome(suite: str) -> None:
    pytest.importorskip("pytest_asyncio")
    found = sum(peers.SUITES[suite](1800), peers.Compared())
    assert found.unfinished == ()
    assert found.different == {}
    assert found.swallowed == ()
    assert found.counts["passed in call"] > 100
    assert found.operations > 100
