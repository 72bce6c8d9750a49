"""`monarch-kernel exec`, as a process."""

from __future__ import annotations

import json
import re
import signal
import subprocess

from tests.cli.conftest import Cli
from tests.conftest import alive, wait_until
from tests.waiting import patience


def started(run: Cli, job: str, line: str) -> subprocess.Popen[str]:
    """A command on both hosts, which goes on."""
    argv = run.line("exec", "--job", job, "--workdir", str(run.folder), "--", "sh", "-c", line)
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=run.env, cwd=run.folder)


def next_lines(process: subprocess.Popen[str], pattern: str) -> list[str]:
    """What both hosts say next, by their numbers."""
    assert process.stdout is not None
    lines = sorted(process.stdout.readline() for _ in range(2))
    found = [re.fullmatch(rf"\[(\d)\] {pattern}\n", line) for line in lines]
    assert all(found), lines
    assert [match[1] for match in found if match] == ["0", "1"]
    return [match[2] for match in found if match]


def test_output_comes_as_it_is_written(run: Cli, job: str) -> None:
    line = "echo $SIDE; while [ ! -e gate ]; do sleep 0.02; done; printf 'no end'; exit $MONARCH_RANK_hosts"
    process = started(run, job, line)
    assert next_lines(process, "(left)") == ["left", "left"]
    (run.folder / "gate").touch()
    said, errors = process.communicate(timeout=patience(40))
    assert sorted(said.splitlines()) == ["[0] no end", "[1] no end"]
    assert (process.returncode, errors) == (1, "monarch-kernel: [1] exit code 1\n")

    much = run("exec", "--job", job, "--host", "1", "--", "seq", "100000")
    assert much.stdout == "".join(f"{number}\n" for number in range(1, 100001))


def test_an_interrupt_ends_the_command(run: Cli, job: str) -> None:
    # The first host cleans up; the second one ignores it.
    trap = "[ $MONARCH_RANK_hosts = 0 ] && trap 'echo cleaned; exit 0' INT || trap '' INT"
    process = started(run, job, f"{trap}; echo pid=$$; while :; do sleep 0.02; done")
    pids = [int(pid) for pid in next_lines(process, r"pid=(\d+)")]
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None and process.stdout.readline() == "[0] cleaned\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=patience(40))
    assert (process.returncode, errors) == (130, "monarch-kernel: interrupted\n")
    wait_until(lambda: not any(map(alive, pids)), "the command has ended on both hosts")


def test_a_command_ends_with_its_client(run: Cli, job: str) -> None:
    process = started(run, job, "echo pid=$$; sleep 1000")
    pids = [int(pid) for pid in next_lines(process, r"pid=(\d+)")]
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(alive, pids)), "the command has ended on both hosts")


def test_commands_in_places(run: Cli, job: str) -> None:
    place = ["sh", "-c", "echo $MONARCH_RANK_hosts/$MONARCH_SIZE_hosts $MONARCH_RANK_gpus/$MONARCH_SIZE_gpus"]
    done = run("exec", "--job", job, "--per-host", "gpus=2", "--json", "--", *place)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert sorted((line["rank"], line["host"], line["output"]) for line in told[:4]) == [
        (0, 0, "0/2 0/2\n"),
        (1, 0, "0/2 1/2\n"),
        (2, 1, "1/2 0/2\n"),
        (3, 1, "1/2 1/2\n"),
    ]
    assert [(line["rank"], line["code"]) for line in told[4:]] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    at = run("exec", "--job", job, "--per-host", "gpus=2", "--point", "hosts=1,gpus=1", "--", *place)
    assert (at.returncode, at.stdout) == (0, "1/2 1/2\n"), at.stderr
    each = run("exec", "--job", job, "--per-host", "gpus=2", "--point", "gpus=1", "--fold", "--", "echo", "x")
    assert each.stdout == "== 1,3 ==\nx\n"
    none = run("exec", "--job", job, "--point", "gpus=1", "--", "true")
    assert none.returncode == 2 and "no gpus=1" in none.stderr

    script = 'for word in "$@"; do echo "<$word>"; done; exit 5'
    done = run("exec", "--job", job, "--one", "--script", "-", "--", "a b", "$c", text=script)
    assert (done.returncode, done.stdout) == (5, "<a b>\n<$c>\n")
    module = run("exec", "--job", job, "--one", "-m", "calendar", "--", "--type", "text", "2026", "11")
    assert module.returncode == 0 and "November 2026" in module.stdout, module.stderr
    unknown = run("exec", "--job", job, "--one", "--", "no-such-program")
    assert (unknown.returncode, unknown.stdout) == (127, "no-such-program: No such file or directory\n")
    missing = run("exec", "--job", job, "--script", "missing.sh")
    assert missing.returncode == 2 and "the script missing.sh cannot be read: No such file" in missing.stderr
