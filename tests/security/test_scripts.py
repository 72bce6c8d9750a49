"""Values that come from others reach a shell as values: they run nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from monarch_kernel.errors import LaunchError
from monarch_kernel.launchers import lightning
from monarch_kernel.launchers.base import LaunchRequest, Resources, Secret, WorkerCommand, launcher_class, own_launchers
from monarch_kernel.launchers.host_request import checked_options
from monarch_kernel.launchers.relay_commands import by_ssh
from monarch_kernel.launchers.scripts import Script, script
from monarch_kernel.launchers.sky import launcher
from monarch_kernel.launchers.slurm import launcher as slurm_launcher

#: What a hostile value may hold; each of the first would make the file ``taken``.
HOSTILE = (
    "ib0$(touch taken)",
    "`touch taken`",
    "'; touch taken; '",
    '"; touch taken; "',
    "x\ntouch taken\n",
    "; touch taken #",
    "$HOME/*/{a,b}",
    "\\",
)
#: In place of the commands of Slurm: ``srun`` runs what it is given, and the others say nothing.
SRUN = '#!/bin/sh\nwhile [ "$1" != sh ]; do shift; done\nexec "$@"\n'


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """The environment in which a node's programs are found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), *((name, "#!/bin/sh\n") for name in ("scontrol", "squeue", "ip", "munge"))):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def request(python: str = "python") -> LaunchRequest:
    command = WorkerCommand(job="ab12", key=Secret("key"), python=python, env={})
    return LaunchRequest(hosts=1, command=command, resources=Resources(), name="monarch")


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("shared_home", [True, False])
def test_an_interface_of_a_profile_runs_nothing(
    tmp_path: Path, programs: dict[str, str], value: str, shared_home: bool
) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "secret").write_text("key\n")
    text = slurm_launcher.start_script(str(folder), request(), 0, value, shared_home)
    subprocess.run(["sh", "-c", text, "start", "1", "0", "n1"], env=programs, cwd=folder, timeout=30, check=True)
    assert not list(tmp_path.rglob("taken"))
    assert (folder / "0.log").read_text() == f"n1 has no address at {value}\n"
    assert (folder / "0.exit").read_text() == "2\n"


@pytest.mark.parametrize("value", HOSTILE)
def test_folders_and_interpreters_run_nothing(tmp_path: Path, programs: dict[str, str], value: str) -> None:
    texts = [
        slurm_launcher.keeper_script(f"{tmp_path}/{value}", request()),
        slurm_launcher.start_script(f"{tmp_path}/{value}", request(), 0, "", True),
        slurm_launcher._worker(str(tmp_path), request(value), 0, "", True),
        slurm_launcher.batch_script([value, value]),
        lightning._script(0, request(value), 0),
        launcher.preparation(value).replace("-lt 100", "-lt 0"),
        by_ssh("json", ["host"], value)["host"][-1],
    ]
    (tmp_path / "secret").write_text("key\n")
    for text in texts:
        line = ["bash", "-c", text, "script", "1", "1", "localhost"]
        subprocess.run(line, env=programs, cwd=tmp_path, timeout=30, capture_output=True, stdin=subprocess.DEVNULL)
        assert not list(tmp_path.rglob("taken")), text


@pytest.mark.parametrize(
    "engine, option, fits", [("slurm", "interface", "ib0.8000"), ("kubernetes", "namespace", "team-1")]
)
def test_a_name_of_a_profile_is_a_name(engine: str, option: str, fits: str) -> None:
    assert checked_options(engine, {option: fits}, "here") == {option: fits}
    for value in (*HOSTILE, "-x", "../../x", "a/b", "a?b=c"):
        with pytest.raises(LaunchError, match=f"here: {option} takes NAME"):
            checked_options(engine, {option: value}, "here")


@pytest.mark.parametrize("engine", sorted(own_launchers()))
def test_no_plain_text_has_more_than_one_line(engine: str) -> None:
    for option in launcher_class(engine).OPTIONS:
        if option.plain and option.type in (str, list) and not option.choices:
            value = "x\ntouch taken" if option.type is str else ["x", "y\ntouch taken"]
            with pytest.raises(LaunchError, match=f"here: {option.name} takes "):
                checked_options(engine, {option.name: value}, "here")


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_is_one_word(value: str) -> None:
    text = script("printf '%s\\0' \"a b\" @{one} # it's so\nprintf '%s\\0' @{more}", one=value, more=[value, "", 7])
    done = subprocess.run(["sh", "-c", text], capture_output=True, timeout=30, check=True)
    assert done.stdout.decode().split("\0") == ["a b", value, value, "", "7", ""]
    nested = script("@{text} x", text=script("printf '%s' @{one}", one=value))
    assert subprocess.run(["sh", "-c", nested], capture_output=True, check=True).stdout.decode() == f"{value}x"


def test_a_value_within_quotes_is_refused() -> None:
    for text in ('echo "at @{one}"', "echo 'at @{one}'"):
        with pytest.raises(ValueError, match="a value within quotes"):
            script(text, one="x")
    assert isinstance(script("true"), Script)
