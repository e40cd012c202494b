from collections.abc import Iterator
from typing import Any

def take(records: Iterator[Any], count: int, smallest: int, known: dict[int, int], kept: list[Any], /) -> bytes: ...
