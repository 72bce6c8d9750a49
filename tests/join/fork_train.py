"""A process that forks, prints and traces while viewers are in it; each line of its output tells what it saw."""

import contextlib
import os
import socket
import sys
import threading
import time


def state():
    """What viewers must leave as it was."""
    return (
        sys.stdout is first[0],
        sys.stderr is first[1],
        sys.breakpointhook is first[2],
        threading.Thread.start is first[3],
        sys.gettrace(),
        threading.gettrace(),
        sorted(each.name for each in threading.enumerate()),
    )


def turn(number):
    return number + 1


def fork():
    """A child that calls what has a breakpoint, prints, and tells how many connections of viewers it has."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    turn(0)
    print("child prints", flush=True)
    ours = 0
    for each in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(each)) as found:
            ours += "monarch-join" in str(found.getsockname())
    os._exit(ours)


first = sys.stdout, sys.stderr, sys.breakpointhook, threading.Thread.start
before = state()
count, forked, asked = 0, None, False
while not os.path.exists(sys.argv[1]):
    count = turn(count)
    if asked:
        asked, forked = False, fork()
    time.sleep(0.01)
for _ in range(100):
    if state() == before:
        break
    time.sleep(0.05)
print("as before" if state() == before else f"{before} has become {state()}", flush=True)
