"""Reads a capture and damaged copies of it with the extension at ``sys.argv[1]``; run with a sanitizer in the process.

Prints how many were tried, how many of those were read to an end and how many were refused.
"""

import importlib.machinery
import importlib.util
import random
import sys
from pathlib import Path


def main() -> None:
    loader = importlib.machinery.ExtensionFileLoader("copytrace._captures", sys.argv[1])
    spec = importlib.util.spec_from_loader("copytrace._captures", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    whole, target = Path(sys.argv[2]).read_bytes(), Path(sys.argv[2]).with_suffix(".damaged")
    chance = random.Random(4)
    read = refused = 0
    tried = int(sys.argv[3])
    for number in range(tried):
        damaged = bytearray(whole[: len(whole) if number % 3 else chance.randrange(len(whole))])
        for _ in range(number and chance.choice((1, 1, 3, 50))):
            at = chance.randrange(200 if chance.random() < 0.1 else max(1, len(damaged)))
            if at < len(damaged):
                damaged[at] = chance.choice((0, 255, chance.randrange(256), damaged[at] ^ 1 << chance.randrange(8)))
        target.write_bytes(damaged)
        try:
            reader = module.Reader(str(target))
            stacks = 0
            while rows := reader.take(1000, 512):
                columns = memoryview(rows).cast("q")[4::5].tolist()
                stacks = max(stacks, *columns)
            for stack in range(1, stacks + 1):
                reader.stack(stack)
            read += 1
        except (NotImplementedError, ValueError, MemoryError):
            refused += 1
    print(tried, read, refused)


if __name__ == "__main__":
    main()
