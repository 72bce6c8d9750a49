"""Ranks of two machines that no notebook can reach, and a notebook on a third: they meet by the team's key.

Machines are namespaces, each with its own network, processes and folder of joinable ranks. torchrun has started a job
on two of them.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel.engines.join.announcements import join_folder
from monarch_kernel.protocol.keys import make_key_file
from monarch_kernel.protocol.keys.allow_list import add_key, revoke_keys
from monarch_kernel.protocol.keys.identity import read_key_file
from tests.conftest import wait_until
from tests.join.conftest import ROOT, TRAIN
from tests.launchers import sshd
from tests.launchers.engines import CannotRunError
from tests.network.conftest import network
from tests.network.hosts import Host, Network, Process
from tests.waiting import wait_for_text

pytestmark = [pytest.mark.torch, pytest.mark.network]

LINE = TRAIN.read_text().split("\n").index("    optimizer.zero_grad()") + 1
PORT = 26700
VIEWER = Path(__file__).parent / "meeting_viewer.py"
#: To start, to join and to step (seconds).
LONG = 60.0


class Viewer:
    """A terminal with the magics on a machine: each line that it is told is run, and what it shows comes back."""

    def __init__(self, host: Host, key_file: Path) -> None:
        self._process = host.start([sys.executable, str(VIEWER)], environment(key_file), stderr=None)

    def run(self, line: str) -> str:
        """Run a line; what it shows, or the error that it raises."""
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        shown: list[str] = []
        while (said := self._process.stdout.readline()) not in ("--- done\n", ""):
            shown.append(said)
        return "".join(shown)

    def until(self, line: str, *words: str) -> str:
        """Run a line until it shows these words; what it shows then."""
        return wait_for_text(
            lambda: self.run(line), lambda text: all(word in text for word in words), f"{line} shows {words}", LONG
        )

    def end(self) -> None:
        """Let it end as a terminal does whose input ends."""
        self._process.stdin.close()
        self._process.wait(LONG)


def environment(key_file: Path) -> dict[str, str]:
    return {"MONARCH_KERNEL_KEY_FILE": str(key_file), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def machines() -> Iterator[Network]:
    """Three machines with folders of joinable ranks of their own."""
    with join_folder() as folder, network("office", "host0", "host1") as made:
        for host in made.hosts:
            host.run("mount", "-t", "tmpfs", "-o", "mode=0700", "tmpfs", folder.path)
        yield made


@contextmanager
def tunnel(machines: Network, there: str, folder: Path) -> Generator[str]:
    """An address on the office's machine from which ssh leads to one that only host1 reaches, as a login node does."""
    (folder := folder / "sshd").mkdir()
    with ExitStack() as running:
        try:
            daemon = running.enter_context(sshd.running(folder))
        except CannotRunError as error:
            pytest.skip(str(error))

        def at(name: str) -> list[str]:
            return ["nsenter", f"--net=/proc/{machines[name].pid}/ns/net"]

        login = shlex.join([*at("host1"), str(sshd.SSHD), "-i", "-f", f"{folder}/sshd_config"])
        options = ["-o", f"ProxyCommand={login}", "-o", "ExitOnForwardFailure=yes", "-N", "-L", f"{PORT}:{there}"]
        ssh = subprocess.Popen([*at("office"), *daemon.command, *options, "node0"])
        try:
            yield f"localhost:{PORT}"
        finally:
            ssh.terminate()
            ssh.wait(LONG)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The team's key."""
    path = tmp_path_factory.mktemp("keys") / "team"
    make_key_file(path, "team")
    return path


@pytest.fixture
def viewer(machines: Network, key_file: Path) -> Iterator[Viewer]:
    """A viewer on a machine without ranks. In the end nothing is left on any machine."""
    viewer = Viewer(machines["office"], key_file)
    yield viewer
    viewer.end()
    for host in machines.hosts:
        wait_until(lambda host=host: not host.pids(), f"nothing is left on {host.name}", LONG)


class Job:
    """A job of torchrun with a rank on each of two machines."""

    def __init__(self, machines: Network, name: str, folder: Path, key_file: Path, meet: str) -> None:
        self.gate = folder / f"{name}.ends"
        self.logs: list[Path] = []
        self.processes: list[Process] = []
        variables = {**environment(key_file), "MONARCH_KERNEL_JOIN": name, "MONARCH_KERNEL_JOIN_MEET": meet}
        for number in range(2):
            host = machines[f"host{number}"]
            self.logs.append(folder / f"{name}{number}.log")
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
            command += ["--nproc-per-node=1", f"--master-addr={machines['host0'].address}", "--master-port=29511"]
            command += ["-m", "monarch_kernel.join", str(TRAIN), str(self.gate)]
            with self.logs[-1].open("wb") as log:
                self.processes.append(
                    host.start(command, {**variables, "GLOO_SOCKET_IFNAME": "eth0"}, stdout=log, stderr=log)
                )

    def end(self) -> None:
        """Let it come to its end, which must be a good one."""
        self.gate.touch()
        assert [each.wait(LONG) for each in self.processes] == [0, 0], [each.read_text() for each in self.logs]


def callers(host: Host) -> set[int]:
    """The processes of a machine that call a meeting point."""
    found: set[int] = set()
    for pid in host.pids():
        with suppress(OSError):
            if b"gateway_caller" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def test_a_job_of_two_machines_is_joined_where_they_meet(
    machines: Network, key_file: Path, viewer: Viewer, tmp_path: Path
) -> None:
    meet = f"{machines['host0'].address}:{PORT}"  # which is one of the job's own: nothing else has to be started
    job = Job(machines, "met", tmp_path, key_file, meet)
    assert "there is no job 'met'" in viewer.run("%mesh join met")  # on this machine
    viewer.until(f"%mesh jobs --meet {meet}", "ranks=2", "host0, host1")
    assert "2 ranks" in viewer.until(f"%mesh join met --meet {meet}", "joined in")
    viewer.until("%mesh stacks", "[0-1] the program", "train.py")
    viewer.run(f"%mesh break {TRAIN}:{LINE}")
    viewer.until("%mesh debug list", "0-1", "breakpoint")
    assert f"train.py:{LINE + 1}" in viewer.run("%mesh debug next")

    # The process on a machine that calls the meeting point dies: a rank starts another, which the viewer finds.
    (before,) = callers(machines["host1"])
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: callers(machines["host1"]) - {before}, "there is another", LONG)
    viewer.until("%mesh stacks", "2 ranks", "train.py")
    viewer.run("%mesh clear")
    viewer.run("%mesh debug continue")
    assert "left, and it goes on" in viewer.run("%mesh leave")
    # A network that keeps the office from that machine: ssh goes round by the other one.
    machines.part(machines["office"], machines["host0"])
    with tunnel(machines, meet, tmp_path) as here:
        viewer.until(f"%mesh join met --meet {here}", "2 ranks")
        viewer.until("%mesh stacks", "[0-1] the program", "train.py")
        assert "left, and it goes on" in viewer.run("%mesh leave")
    machines.heal(machines["office"], machines["host0"])
    report = [sys.executable, "-m", "monarch_kernel", "report", "met", "--meet", meet, "--json", "--out", str(tmp_path)]
    found = json.loads(machines["office"].run(*report, env=environment(key_file)))
    assert [(each["rank"], each["host"]) for each in found["job"]["ranks"]] == [(0, "host0"), (1, "host1")]
    job.end()


def test_who_has_another_key_is_refused_and_told_why(
    machines: Network, key_file: Path, viewer: Viewer, tmp_path: Path
) -> None:
    make_key_file(other := tmp_path / "other", "other")
    meet = f"{machines['host1'].address}:{PORT + 1}"
    point = machines["host1"].start(
        [sys.executable, "-m", "monarch_kernel", "join", "meet", meet], environment(other), stderr=None
    )
    try:
        assert f"Ranks and notebooks meet at tcp://{meet}" in point.stdout.readline()
        refused = viewer.run(f"%mesh jobs --meet {meet}")
        assert f"the meeting point tcp://{meet} cannot be reached" in refused and "not one that" in refused
        with (
            (tmp_path / "log").open("wb") as log,
            one_rank(machines["host0"], key_file, "refused", meet, "waiting.py", stderr=log) as rank,
        ):
            wait_until(
                lambda: f"the meeting point tcp://{meet} is not reached: refused" in (tmp_path / "log").read_text(),
                "the rank is refused, too",
                LONG,
            )
        assert rank.wait(LONG) == 0  # it does not mind
    finally:
        point.signal(signal.SIGTERM)
        assert point.wait(LONG) == 0


# -- keys of their own ----------------------------------------------------------------------------------


class Keyring:
    """A key for each of the parties, and whom each trusts."""

    def __init__(self, folder: Path) -> None:
        (folder / "keys").mkdir()
        self._folder = folder / "keys"

    def __getitem__(self, name: str) -> Path:
        path = self._folder / name
        if not path.exists():
            make_key_file(path, name)
        return path

    def trust(self, who: str, *others: str) -> None:
        for other in others:
            add_key(f"{self[who]}.allow", read_key_file(str(self[other])).public)

    def revoke(self, who: str, other: str) -> None:
        revoke_keys(f"{self[who]}.allow", other)


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    """The meeting point trusts all; the viewer and the machines trust it, and so far nobody else."""
    ring = Keyring(tmp_path)
    ring.trust("point", "viewer", "cluster", "mallory")
    for each in ("viewer", "cluster", "mallory"):
        ring.trust(each, "point")
    return ring


@contextmanager
def meeting_point(host: Host, key_file: Path, port: int) -> Generator[str]:
    """A meeting point on a machine."""
    meet = f"{host.address}:{port}"
    point = host.start(
        [sys.executable, "-m", "monarch_kernel", "join", "meet", meet], environment(key_file), stderr=None
    )
    try:
        assert f"Ranks and notebooks meet at tcp://{meet}" in point.stdout.readline()
        yield meet
    finally:
        point.signal(signal.SIGTERM)
        assert point.wait(LONG) == 0


@contextmanager
def one_rank(
    host: Host, key_file: Path, name: str, meet: str, script: str, *args: str, stderr: Any = None
) -> Generator[Process]:
    """A job of one rank."""
    variables = {**environment(key_file), "MONARCH_KERNEL_JOIN": name, "MONARCH_KERNEL_JOIN_MEET": meet}
    (folder := key_file.parent.parent / name).mkdir()
    command = [sys.executable, "-m", "monarch_kernel.join", str(Path(__file__).parent / script)]
    rank = host.start([*command, str(folder / "ends"), *args], variables, stderr=stderr)
    try:
        yield rank
    finally:
        (folder / "ends").touch()
        rank.wait(LONG)


@contextmanager
def a_viewer(machines: Network, key_file: Path) -> Generator[Viewer]:
    viewer = Viewer(machines["office"], key_file)
    try:
        yield viewer
    finally:
        viewer.end()


def test_a_machine_that_only_the_meeting_point_trusts_runs_nothing_in_a_viewer(
    machines: Network, keyring: Keyring, tmp_path: Path
) -> None:
    evil = tmp_path / "evil"
    keyring.trust("mallory", "viewer")
    with (
        meeting_point(machines["host1"], keyring["point"], PORT + 2) as meet,
        one_rank(machines["host0"], keyring["mallory"], "train", meet, "hostile_rank.py", str(evil)),
        a_viewer(machines, keyring["viewer"]) as viewer,
    ):
        refused = viewer.until(f"%mesh jobs --meet {meet}", "the key of host0 is not one that this process trusts")
        assert "keys add" in refused and "scp" not in refused  # its name is what it says itself
        assert "there is no job 'train'" in viewer.run(f"%mesh join train --meet {meet}")
        viewer.run("%mesh stacks")
        assert not evil.exists()
        keyring.trust("viewer", "mallory")  # now it is joined, and to look at it still runs nothing of it
        viewer.until(f"%mesh join train --meet {meet}", "joined in")
        for line in ("%mesh stacks", "%mesh stacks --all", "%mesh hang", "%mesh status", "%mesh diff x"):
            viewer.run(line)
        assert not evil.exists()


def test_a_viewer_that_only_the_meeting_point_trusts_gets_nothing_of_a_machine(
    machines: Network, keyring: Keyring, tmp_path: Path
) -> None:
    keyring.trust("mallory", "cluster")
    with (
        meeting_point(machines["host1"], keyring["point"], PORT + 3) as meet,
        one_rank(machines["host0"], keyring["cluster"], "train", meet, "waiting.py"),
        a_viewer(machines, keyring["mallory"]) as mallory,
    ):
        mallory.until(f"%mesh jobs --meet {meet}", "host0 does not trust the key of this process")
        assert "there is no job 'train'" in mallory.run(f"%mesh join train --meet {meet}")


def test_keys_of_their_own_until_one_is_revoked(machines: Network, keyring: Keyring, tmp_path: Path) -> None:
    keyring.trust("viewer", "cluster")
    keyring.trust("cluster", "viewer")
    with (
        meeting_point(machines["host1"], keyring["point"], PORT + 4) as meet,
        one_rank(machines["host0"], keyring["cluster"], "train", meet, "waiting.py") as rank,
        a_viewer(machines, keyring["viewer"]) as viewer,
    ):
        viewer.until(f"%mesh join train --meet {meet}", "joined in")
        viewer.until("%mesh stacks", "waiting.py")
        viewer.run(f"%mesh break {Path(__file__).parent / 'waiting.py'}:8")
        viewer.until("%mesh debug list", "breakpoint")
        keyring.revoke("cluster", "viewer")  # the meeting point trusts both still
        viewer.until("%mesh status", "dead")
        viewer.run("%mesh leave")
        assert "there is no job 'train'" in viewer.run(f"%mesh join train --meet {meet}")
        (tmp_path / "train" / "ends").touch()
        assert rank.wait(LONG) == 0  # it goes on
