"""Kills a process that syncs at one of its system calls that change files, and looks at what is left; run as a program.

``python -m tests.sync.store.kills FOLDER COUNT`` makes a store in FOLDER, and kills COUNT syncs, each at another system
call, spread over all of them (ptrace(2) counts). It prints one line for each, and ends with an error at the first mix
of trees.
"""

from __future__ import annotations

import ctypes
import os
import platform
import random
import signal
import sys
from collections.abc import Callable

from tests.sync.store.trees import Content, Link, expected, file, on_disk, sync
from workspace_sync.store.store import Store
from workspace_sync.store.workspace_folder import WorkspaceFolder

_TRACEME, _SYSCALL, _SETOPTIONS, _GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_OPTIONS = 0x1 | 0x8 | 0x100000  # TRACESYSGOOD, TRACECLONE, EXITKILL
_WALL = 0x40000000
# openat; then those that always change something: pwrite64, write, rename*, unlink*, mkdir*, symlinkat, linkat,
# utimensat, fchmod, ftruncate, ioctl (reflinks).
_CALLS = {
    "x86_64": (257, {18, 1, 82, 264, 316, 87, 263, 83, 258, 266, 265, 280, 91, 77, 16}),
    "aarch64": (56, {68, 64, 38, 276, 35, 34, 36, 37, 88, 52, 46, 29}),
}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class CannotTraceError(Exception):
    """This machine lets no process trace its child."""


def run_until(work: Callable[[], None], limit: int) -> int:
    """Run something in a child, killed just before its ``limit``-th call that changes files; how many there were."""
    opens, others = _CALLS[platform.machine()]
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _libc.ptrace(_TRACEME, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        work()
        os._exit(0)
    os.waitpid(pid, 0)
    if _libc.ptrace(_SETOPTIONS, pid, None, _OPTIONS):
        os.kill(pid, signal.SIGKILL)
        raise CannotTraceError(os.strerror(ctypes.get_errno()))
    _libc.ptrace(_SYSCALL, pid, None, None)
    count = 0
    info = (ctypes.c_uint64 * 16)()
    while True:
        thread, status = os.waitpid(-1, _WALL)
        if not os.WIFSTOPPED(status):
            if thread == pid:
                if os.WIFEXITED(status) and os.WEXITSTATUS(status):
                    raise AssertionError(f"the sync has failed by itself: {status}")
                return count
            continue
        number = os.WSTOPSIG(status)
        forwarded = 0
        if number == signal.SIGTRAP | 0x80:
            _libc.ptrace(_GET_SYSCALL_INFO, thread, ctypes.sizeof(info), ctypes.addressof(info))
            call = info[3]
            creates = call == opens and info[6] & os.O_CREAT
            if info[0] & 0xFF == 1 and (call in others or creates):
                count += 1
                if count == limit:
                    os.kill(pid, signal.SIGKILL)
        elif number not in (signal.SIGSTOP, signal.SIGTRAP):
            forwarded = number
        _libc.ptrace(_SYSCALL, thread, None, forwarded)


def versions() -> list[Content]:
    """Two trees that differ in everything that a tree can have."""
    draw = random.Random(1)
    large = draw.randbytes(20 * 4096)
    same = {b"same/%d" % n: b"%d" % n * 50 for n in range(12)}
    one = {
        **same,
        b"a.py": b"VALUE = 1\n",
        b"gone/deep/x": b"x",
        b"kind": b"a file",
        b"was/renamed": b"r" * 900,
        b"large": large,
        b"link": Link(b"a.py"),
        b"hollow/": 0o700,
        b"run": file(b"#!", 0o644),
    }
    other = {
        **same,
        b"a.py": b"VALUE = 2\n",
        b"new/deep/y": b"y",
        b"kind/now": b"a folder",
        b"is/renamed": b"r" * 900,
        b"large": large[:4096] + b"changed!" + large[4104:] + b"longer",
        b"link": Link(b"is/renamed"),
        b"hollow/": 0o755,
        b"run": file(b"#!", 0o755),
    }
    return [Content(one, 4096), Content(other, 4096)]


def check(folder: WorkspaceFolder, *allowed: Content) -> int:
    """Which of some trees ranks see now; nothing else may be there."""
    found = on_disk(f"{folder.path}/current/tree")
    for number, content in enumerate(allowed):
        if found == expected(content):
            return number
    raise AssertionError(f"a mix: {sorted(found)}")


def main(root: str, kills: int) -> None:
    contents = versions()

    def work(content: Content) -> None:
        with Store(root) as store:
            folder = store.workspace("w")
            sync(folder, content)
            folder.follow()

    with Store(root) as store:
        folder = store.workspace("w")
        for at in range(1, 60, 5):  # a first sync has no old tree
            run_until(lambda: work(contents[0]), at)
            assert not os.path.lexists(f"{folder.path}/current") or check(folder, contents[0]) == 0
        sync(folder, contents[0])
        folder.follow()
        total = run_until(lambda: work(contents[1]), 0)
        print(f"{total} calls")
        assert check(folder, *contents) == 1
        now = 1
        draw = random.Random(kills)
        for kill in range(kills):
            at = 1 + kill * total // kills
            target = contents[1 - now]
            run_until(lambda target=target: work(target), at)
            seen = check(folder, contents[now], target)
            print(f"killed at call {at}: {'new' if seen else 'old'}")
            if kill % 2:  # the one that should repair it is killed, too
                again = draw.randrange(1, total)
                run_until(lambda kill=kill: work(contents[kill // 4 % 2]), again)
                check(folder, *contents)
                print(f"and the next at call {again}")
            # The next sync repairs all, to either tree; and nothing is left staged.
            final = contents[kill // 2 % 2]
            sync(folder, final)
            now = kill // 2 % 2
            assert check(folder, final) == 0
            assert folder.verify() == [], folder.verify()
            assert not folder.state().repair, folder.state().repair
            if kill % 3 == 0:
                folder.follow()
                for slot in folder.slots.names():
                    assert on_disk(folder.slots.path(slot)) == expected(final), slot
            assert not os.listdir(f"{folder.path}/kept"), "files of ours were taken for those of ranks"
            new = [name for name in os.listdir(folder.path) if name.endswith(".new")]
            assert len(folder.slots.names()) <= 2 and not new, (folder.slots.names(), new)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except CannotTraceError as e:
        print(f"cannot trace: {e}")
