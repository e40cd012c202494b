"""Whether a version lies in a range."""

from __future__ import annotations

import re


def covers(specifier: str, version: str) -> bool:
    """Whether ``version`` lies in a specifier such as ``">=3.1,<3.4"``; only the numbers of a release count. An unknown
    version lies in all.
    """
    numbers = _release(version)
    for part in filter(None, specifier.replace(" ", "").split(",")):
        operator, bound = re.fullmatch(r"([<>=!]=?)([\d.]+)", part).groups()  # type: ignore[union-attr]
        order = (numbers > _release(bound)) - (numbers < _release(bound))
        holds = {">=": order >= 0, ">": order > 0, "<=": order <= 0, "<": order < 0, "==": order == 0, "!=": order != 0}
        if numbers and not holds[operator]:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    matched = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in matched.group().split(".")] if matched else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
