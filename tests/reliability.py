"""Causes every fault many times and writes the table of docs/reliability.md.

    python tests/reliability.py [--times 20] [--only WORDS]

``--only`` tries the faults whose names contain WORDS and prints their rows instead. Exits with 1 when something was
lost, differed or stayed behind.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from faults import ENDINGS, FAULTS, TESTED, Ending, Fault, Tested
from faulty import Verdict, try_ending, try_fault

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"
ALL: tuple[Fault | Ending | Tested, ...] = (*FAULTS, *ENDINGS.values(), *TESTED)
HEADING = "| fault | how it is caused | times | steps | lost |\n|---|---|---|---|---|"


def attempt(each: Fault | Ending | Tested, seed: int) -> Verdict:
    """Cause a fault once."""
    if isinstance(each, Tested):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow", each.node]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
        passed = done.returncode == 0 and "skipped" not in done.stdout
        return Verdict(0, 0, () if passed else (done.stdout[-2000:],), ())
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        return try_fault(each, where, seed) if isinstance(each, Fault) else try_ending(each, where, seed)


def row(each: Fault | Ending | Tested, times: int) -> tuple[str, list[str]]:
    """The row of a fault that is caused ``times`` times, and all that was wrong."""
    verdicts = [attempt(each, seed) for seed in range(1, times + 1)]
    steps, lost = sum(verdict.steps for verdict in verdicts), sum(verdict.lost for verdict in verdicts)
    wrong = [f"{each.name}: {what}" for verdict in verdicts for what in verdict.wrong]
    if lost:
        wrong.append(f"{each.name}: {lost} of {steps} steps lost")
    if isinstance(each, Tested):
        return f"| {each.name} | {each.cause} | {times} | by its test | {each.lost} |", wrong
    return f"| {each.name} | {each.cause} | {times} | {steps:,} | {lost or 'nothing'} |", wrong


def rows_of(page: str) -> dict[str, tuple[str, int, int, int]]:
    """The rows of the page: name -> how, times, steps, lost."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    found = {}
    for line in table.strip().splitlines()[2:]:
        name, cause, times, steps, lost = (cell.strip() for cell in line.strip("| ").split(" | "))
        numbers = [int(re.sub(r"\D", "", cell) or 0) for cell in (times, steps, lost)]
        found[name] = (cause, numbers[0], numbers[1], numbers[2])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["COPYTRACE_STRICT"] = "1"
    rows, wrong = [], []
    for each in ALL:
        if options.only in each.name:
            line, faulty = row(each, options.times)
            print(line, *faulty, sep="\n", flush=True)
            rows.append(line)
            wrong += faulty
    if not options.only:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text("\n".join([before + BEGIN, HEADING, *rows, END]) + after)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
