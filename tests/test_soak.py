"""A little of ``soak.py``, which works for an hour by command."""

from __future__ import annotations

import pytest

from soak import JOBS, PROCESSES, soak

ROUNDS = 3


@pytest.mark.skipif("not __import__('pathlib').Path('/proc/self/statm').exists()", reason="needs /proc")
def test_mixed_work_is_the_same_in_sessions_and_leaves_nothing() -> None:
    result = soak(40, seed=3, most_rounds=ROUNDS)
    assert result.differences == []
    assert result.changed == []
    assert result.wrong == []
    assert result.rounds == ROUNDS
    assert result.outcomes > 10 * ROUNDS
    assert result.raised > ROUNDS
    assert result.bystander_passes > 0
    assert set(result.jobs) <= {job.__name__ for job in (*JOBS, *PROCESSES)}
    assert len(result.jobs) > 4
