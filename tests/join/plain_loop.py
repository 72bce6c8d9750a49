"""A program that knows nothing of us: ``plain_loop.py FILE [FIFO]`` counts until the file is there.

With FIFO it first waits in the kernel, where Python cannot be interrupted, until somebody writes to that.
"""

import os
import sys
import time


def work(count: int) -> int:
    double = 2 * count
    time.sleep(0.02)
    return double


def main() -> None:
    names = set(globals())
    if len(sys.argv) > 2:
        print("waits", flush=True)
        with open(sys.argv[2]) as file:
            file.read(1)
    count = 0
    while not os.path.exists(sys.argv[1]):
        work(count)
        count += 1
    print("ends after", count, sorted(set(globals()) - names), flush=True)


if __name__ == "__main__":
    main()
