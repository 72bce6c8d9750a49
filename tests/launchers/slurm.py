"""A real Slurm of this machine: two nodes with two devices each, in a network namespace, with a munge of its own.

Its daemons listen on all addresses, so the main thread of the tests, and all that it starts, is in that namespace while
it is up. Two slurmd of one machine are told apart by name (``-N``) and port. The devices of GPUs can be any character
devices.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import alive, describe, wait_until
from tests.launchers.engines import CannotRunError
from tests.launchers.namespace import own_network
from tests.waiting import patience

SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip")
NODES = ("n1", "n2")
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=16817
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=1
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
InactiveLimit=0
KillWait=2
MinJobAge=60
Waittime=0
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1,n2 NodeHostname={host} NodeAddr=127.0.0.1 Port=[16818-16819] CPUs=4 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


class Slurm:
    """The daemons."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.folder = folder
        self.conf = folder / "slurm.conf"
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        self.conf.write_text(CONF.format(host=socket.gethostname().partition(".")[0], folder=folder))
        (folder / "gres.conf").write_text(f"NodeName=n1,n2 Name=gpu File={folder}/gpu[0-1]\n")
        for number in range(2):
            os.mknod(folder / f"gpu{number}", 0o20600, os.makedev(1, 3))
        # munge and unmunge know no environment variable for their socket.
        for name in ("munge", "unmunge"):
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f'#!/bin/sh\nexec {shutil.which(name)} --socket={folder}/munge.sock "$@"\n')
            path.chmod(0o755)
        self._daemons: list[str] = []
        self._run(
            "munged",
            *("--force", "--num-threads=2", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.sock"),
            *(f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/seed"),
        )
        self._run("slurmctld", "-f", str(self.conf), "-c")
        for node in NODES:
            self.start(node)
        self.wait_until_idle()

    def _run(self, program: str, *arguments: str) -> None:
        path = shutil.which(program, path=SBIN)
        assert path is not None
        self._daemons.append(program)
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0, f"{program}: {done.stderr}"

    def say(self, *command: str) -> str:
        """What a command of Slurm prints."""
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def start(self, node: str) -> None:
        """Start the daemon of a node."""
        self._run("slurmd", "-f", str(self.conf), "-N", node)

    def wait_until_idle(self) -> None:
        """Wait until both nodes are free."""
        wait_until(lambda: len(self.say("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split()) == 2, "nodes are idle")

    def lose(self, node: str) -> None:
        """A node is gone at once, with all that runs on it, and Slurm learns of it."""
        for pid in self._of_node(node):
            os.kill(pid, signal.SIGKILL)
        self._end(self.folder / f"slurmd-{node}.pid")
        self.say("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power supply")

    def repair(self, node: str) -> None:
        """It is there again."""
        self.start(node)  # Slurm takes it back as it registers (ReturnToService)
        self.wait_until_idle()

    def _of_node(self, node: str) -> list[int]:
        wanted = f"SLURMD_NODENAME={node}".encode()
        return [pid for pid, variables in self._processes() if wanted in variables]

    def processes(self) -> list[int]:
        """All living processes that belong to it: daemons, commands and jobs."""
        wanted = f"SLURM_CONF={self.conf}".encode()
        return [pid for pid, variables in self._processes() if wanted in variables and pid != os.getpid()]

    def _processes(self) -> Iterator[tuple[int, list[bytes]]]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and alive(int(entry.name)):
                try:
                    yield int(entry.name), (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue

    def _end(self, pid_file: Path) -> None:
        try:
            pid = int(pid_file.read_text())
        except (FileNotFoundError, ValueError):
            return
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        wait_until(lambda: not alive(pid), f"{pid_file} has ended")

    def close(self) -> None:
        """End all of it; what jobs have left is an error."""
        subprocess.run(["scancel", "-u", "root"], env={**os.environ, "SLURM_CONF": str(self.conf)}, timeout=30)
        wait_until(lambda: not self.say("squeue", "-h"), "no job is left")
        for name in (*(f"slurmd-{node}" for node in NODES), "slurmctld", "munged"):
            self._end(self.folder / f"{name}.pid")
        end = time.monotonic() + patience(10)
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.02)
        shown = [describe(pid) for pid in left]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not shown, f"Slurm's tests left processes: {shown}"


@contextmanager
def running(folder: Path) -> Generator[Slurm]:
    """A Slurm in a network namespace that this thread is in meanwhile; commands that it starts find it.

    Args:
        folder: an empty one for all that belongs to it.

    Raises:
        CannotRunError: it is not installed, or this user cannot run it here.
    """
    if missing := [name for name in PROGRAMS if shutil.which(name, path=SBIN) is None]:
        raise CannotRunError(f"{', '.join(missing)} not installed (tests/prepare.sh)")
    before = {name: os.environ.get(name) for name in ("SLURM_CONF", "PATH")}
    with own_network():
        try:
            # slurmctld needs an address beside the loopback one.
            for command in (
                "link add v0 type veth peer name v1",
                "addr add 10.99.0.1/24 dev v0",
                "link set v0 up",
                "link set v1 up",
            ):
                subprocess.run(["ip", *command.split()], check=True)
            daemons = Slurm(folder)
            os.environ["SLURM_CONF"] = str(daemons.conf)
            os.environ["PATH"] = f"{daemons.folder}/bin:{os.environ['PATH']}"
            try:
                yield daemons
            finally:
                daemons.close()
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A Slurm for the tests of a module, whose commands find it."""
    try:
        with running(tmp_path_factory.mktemp("slurm")) as daemons:
            yield daemons
    except CannotRunError as why:
        pytest.skip(str(why))
