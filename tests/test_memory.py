"""What operations hold over time."""

from __future__ import annotations

import numpy as np
import pytest

from copytrace.memory import _spread


@pytest.mark.parametrize(
    ("moments", "end", "spread"),
    [
        ([1.0, 2.0, 4.0], 5.0, [1.0, 2.0, 4.0]),
        ([1.0, 1.0, 1.0, 1.0, 5.0], 9.0, [1.0, 2.0, 3.0, 4.0, 5.0]),
        ([1.0, 3.0, 3.0], 7.0, [1.0, 3.0, 5.0]),
        ([3.0, 3.0], 2.0, [3.0, 3.0]),
        ([7.0], 8.0, [7.0]),
    ],
)
def test_moments_of_one_mark_are_spread_up_to_the_next(moments: list[float], end: float, spread: list[float]) -> None:
    assert _spread(np.array(moments), end).tolist() == spread
