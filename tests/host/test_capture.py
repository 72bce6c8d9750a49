"""Capture in a real process whose fds 1 and 2 are pipes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from monarch_kernel.protocol.output_records import OutputDecoder, OutputEvent
from tests.waiting import patience

# PYTHONUNBUFFERED would make C's stdio unbuffered too.
ENV = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}

PRELUDE = """
import os, sys, threading, asyncio, subprocess, ctypes
from monarch_kernel.runtime.rank import output_capture
output_capture.install()
"""


def run(code: str, expect: int = 0) -> tuple[list[OutputEvent], list[OutputEvent]]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        timeout=patience(60),
        check=False,
        env=ENV,
    )
    assert done.returncode == expect, done.stderr.decode("utf-8", "replace")
    result: list[list[OutputEvent]] = []
    for stream, data in (("stdout", done.stdout), ("stderr", done.stderr)):
        decoder = OutputDecoder(stream)  # type: ignore[arg-type]
        result.append(decoder.feed(data) + decoder.close())
    return result[0], result[1]


def texts(events: list[OutputEvent]) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    for e in events:
        if e.kind == "text":
            if rows and rows[-1][:2] == (e.cell, e.stream):
                rows[-1] = (e.cell, e.stream, rows[-1][2] + e.data)
            else:
                rows.append((e.cell, e.stream, e.data))
    return rows


def test_prints_c_code_subprocesses_and_stderr_keep_their_order() -> None:
    out, err = run(
        """
        libc = ctypes.CDLL(None)
        output_capture.begin_cell("c1")
        print("python 1")
        libc.puts(b"C 2")
        subprocess.run(["echo", "child 3"])
        print("warning 4", file=sys.stderr)
        os.write(1, b"raw 5\\n")
        print("no newline 6", end="")
        libc.printf(b"partial C 7")
        os.write(2, b"C stderr\\n")
        output_capture.end_cell("c1")
        """
    )
    assert texts(out) == [
        ("c1", "stdout", "python 1\nC 2\nchild 3\n"),
        ("c1", "stderr", "warning 4\n"),
        ("c1", "stdout", "raw 5\nno newline 6partial C 7"),
    ]
    assert [e.kind for e in out if e.kind != "text"] == ["begin", "end"]
    assert [(e.cell, e.kind, e.data) for e in err] == [
        ("c1", "begin", None),
        ("c1", "text", "C stderr\n"),
        ("c1", "end", None),
    ]


def test_threads_and_tasks_keep_the_cell_that_started_them() -> None:
    out, _ = run(
        """
        go = threading.Event()
        def late(name):
            go.wait()
            print(name, "late")
        def nested():
            threading.Thread(target=late, args=("grandchild",)).start()
        async def main():
            output_capture.begin_cell("a")
            t = asyncio.create_task(later())
            thread = threading.Thread(target=late, args=("child",)); thread.start()
            n = threading.Thread(target=nested); n.start(); n.join()
            output_capture.end_cell("a")
            output_capture.begin_cell("b")
            go.set()
            thread.join()
            await t
            print("in b")
            output_capture.end_cell("b")
        async def later():
            await asyncio.sleep(0)
            print("task late")
        asyncio.run(main())
        """
    )
    by_cell: dict[str, str] = {}
    for cell, _, text in texts(out):
        by_cell[cell] = by_cell.get(cell, "") + text
    assert sorted(by_cell["a"].splitlines()) == ["child late", "grandchild late", "task late"]
    assert by_cell["b"] == "in b\n"


def test_lines_of_threads_are_never_mixed() -> None:
    out, _ = run(
        """
        def work(c):
            for i in range(200):
                print(c * 20, end="")
                print(c * 20)
        ts = [threading.Thread(target=work, args=(c,)) for c in "abcd"]
        [t.start() for t in ts]; [t.join() for t in ts]
        """
    )
    lines = "".join(text for _, _, text in texts(out)).splitlines()
    assert len(lines) == 800
    assert {len(set(line)) for line in lines} == {1}


def test_an_unfinished_line_comes_by_itself_and_survives_sigkill() -> None:
    code = PRELUDE + "print('half a line', end=''); threading.Event().wait()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=ENV)
    assert process.stdout is not None
    decoder = OutputDecoder()
    try:
        events = decoder.feed(os.read(process.stdout.fileno(), 4096))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert texts(events) == [("", "stdout", "half a line")]


def test_what_was_printed_before_a_hard_exit_is_there() -> None:
    out, _ = run("print('x' * 10000); os._exit(7)", expect=7)
    assert texts(out)[0][2] == "x" * 10_000 + "\n"


def test_a_fork_neither_repeats_nor_loses_output() -> None:
    out, _ = run(
        """
        import warnings
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
        output_capture.begin_cell("c")
        print("parent ", end="")
        pid = os.fork()
        if pid == 0:
            print("child")
            output_capture.flush()
            os._exit(0)
        os.waitpid(pid, 0)
        print("done")
        output_capture.end_cell("c")
        """
    )
    assert sorted("".join(text for _, _, text in texts(out)).splitlines()) == ["child", "parent done"]


def test_fork_while_other_threads_print_does_not_hang() -> None:
    run(
        """
        stop = threading.Event()
        def noise():
            while not stop.is_set():
                print("noise", end="")
        ts = [threading.Thread(target=noise) for _ in range(3)]
        [t.start() for t in ts]
        for _ in range(8):
            pid = os.fork()
            if pid == 0:
                print("child")
                os._exit(0)
            os.waitpid(pid, 0)
        stop.set()
        """
    )


def test_a_line_of_megabytes_arrives_whole() -> None:
    out, _ = run(
        """
        output_capture.begin_cell("c")
        print("ä€" * 700_001)
        output_capture.end_cell("c")
        """
    )
    assert texts(out) == [("c", "stdout", "ä€" * 700_001 + "\n")]


def test_displays_and_bytes() -> None:
    out, _ = run(
        """
        output_capture.begin_cell("c")
        print("before", end="")
        output_capture.emit_display({"text/html": "x" * 9000}, display_id="d1")
        output_capture.emit_display({"text/plain": "42"}, result=True)
        output_capture.clear_output(wait=True)
        sys.stdout.buffer.write(b"bytes\\xff\\n")
        output_capture.end_cell("c")
        """
    )
    assert [e.kind for e in out] == ["begin", "text", "display", "result", "clear", "text", "end"]
    shown = {"data": {"text/html": "x" * 9000}, "metadata": {}, "display_id": "d1", "update": False}
    assert out[2].data == shown
    assert out[5].data == "bytes�\n"


def test_redirected_descriptors_get_c_output_only() -> None:
    out, _ = run(
        """
        import tempfile
        with tempfile.TemporaryFile() as f:
            saved = os.dup(1)
            os.dup2(f.fileno(), 1)
            print("python")
            os.write(1, b"C")
            os.dup2(saved, 1)
            f.seek(0)
            assert f.read() == b"C"
        """
    )
    assert texts(out) == [("", "stdout", "python\n")]


def test_streams_look_like_files() -> None:
    run(
        """
        assert sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2
        assert sys.stdout.encoding == "utf-8" and not sys.stdout.isatty() and sys.stdout.writable()
        sys.stdout.reconfigure(line_buffering=True)
        sys.stdout.close()
        print("still open \\ud800")
        sys.stdout.writelines(["a", "b\\n"])
        try:
            sys.stdout.write(b"bytes")
        except TypeError as e:
            assert "must be str, not bytes" in str(e)
        else:
            raise AssertionError
        output_capture.install()
        """
    )


def test_a_pipe_made_non_blocking_loses_nothing() -> None:
    out, _ = run(
        """
        import fcntl
        os.set_blocking(1, False)
        for i in range(20000):
            print("line", i)
        """
    )
    lines = "".join(text for _, _, text in texts(out)).splitlines()
    assert lines == [f"line {i}" for i in range(20_000)]


@pytest.mark.parametrize("handler_prints", [False, True])
def test_an_interrupt_in_the_middle_of_a_write_loses_nothing(handler_prints: bool) -> None:
    code = PRELUDE + textwrap.dedent(
        f"""
        import signal
        def handler(*_):
            os.write(2, b"interrupted")
            if {handler_prints}:
                print("handler")
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            print("y" * 300_000)
        except KeyboardInterrupt:
            pass
        print("end")
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        # Nobody reads stdout until its pipe is full and the interrupt has come.
        assert os.read(process.stderr.fileno(), 100) == b"interrupted"
        data = process.stdout.read()
    assert process.wait(patience(30)) == 0
    decoder = OutputDecoder()
    text = "".join(e.data for e in decoder.feed(data) + decoder.close() if e.kind == "text")
    assert text.count("y") == 300_000
    assert text.endswith("end\n")
