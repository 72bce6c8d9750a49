"""``monarch-kernel join install``: ranks of an environment are prepared by a variable alone; launchers are none."""

from __future__ import annotations

import os
import subprocess
import zipapp
from pathlib import Path

import pytest

from bench.environments import bare_above
from monarch_kernel.engines.join.startup import is_rank
from tests.join.conftest import ROOT
from tests.waiting import patience

THREADS = "import threading; print('monarch-join' in [each.name for each in threading.enumerate()])"
CHILDREN = f"""
import multiprocessing, subprocess, sys
def thread(_):
    import threading
    return "monarch-join" in [each.name for each in threading.enumerate()]
if __name__ == "__main__":
    found = [thread(0)]
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found += pool.map(thread, [0])
            pool.close()
            pool.join()
    found.append(eval(subprocess.check_output([sys.executable, "-c", {THREADS!r}], text=True)))
    print(found)
"""


SETS = f"""
import os, subprocess, sys
os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="here", MASTER_PORT="1")
subprocess.run([sys.executable, "-c", {THREADS!r}])
os.environ.update(RANK="0")
subprocess.run([sys.executable, "-c", {THREADS!r}])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment into which the line is written; with the packages of this one."""
    found = bare_above(tmp_path_factory.mktemp("environment"))
    done = join(found, "install")
    assert done.returncode == 0 and "monarch_kernel_join.pth" in done.stdout, done.stderr
    return found


def join(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(python, "-m", "monarch_kernel", "join", *words, name="")


def run(python: Path, *words: str, name: str = "by-variable", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MONARCH_KERNEL_JOIN": name, **variables}
    if not name:
        del environment["MONARCH_KERNEL_JOIN"]
    return subprocess.run([python, *words], capture_output=True, text=True, timeout=patience(60), env=environment)


def test_programs_are_ranks_and_their_children_are_none(python: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text(CHILDREN)
    zipapp.create_archive(package, tmp_path / "app.pyz")
    (tmp_path / "program.py").write_text(CHILDREN)
    done = run(python, str(tmp_path / "program.py"))
    assert done.stdout == "[True, False, False, False]\n" and not done.stderr, done
    assert run(python, "-c", THREADS).stdout == "True\n"
    assert run(python, "-c", THREADS, name="").stdout == "False\n"
    (package / "__main__.py").write_text(THREADS)
    assert run(python, "-m", "package", PYTHONPATH=f"{tmp_path}:{ROOT}").stdout == "True\n"
    zipapp.create_archive(package, tmp_path / "app.pyz")
    assert run(python, str(tmp_path / "app.pyz")).stdout == "True\n"


def test_what_a_launcher_puts_before_the_program_is_the_programs(python: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.argv[1:])")
    for option in ("--local_rank=1", "--local-rank=1"):  # of deepspeed, and of torch.distributed.launch
        done = run(
            python, "-m", "monarch_kernel.join", option, "--name", "train", str(tmp_path / "program.py"), "--lr=1"
        )
        assert done.stdout == f"['{option}', '--lr=1']\n", done


def test_a_program_that_sets_torchruns_variables_itself_has_no_ranks_as_children(python: Path) -> None:
    mpirun = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "7"}
    # Its child with its own number is a tool, and one with another number is a rank that it has started.
    assert run(python, "-c", SETS, **mpirun).stdout == "False\nTrue\n"


def test_a_program_goes_on_where_it_cannot_be_joined(python: Path) -> None:
    done = run(python, "-c", THREADS, name="no name")
    assert done.stdout == "False\n" and done.stderr.count("\n") == 1 and "'no name'" in done.stderr


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py --epochs 3", True),
        ("python -u -X dev train.py", True),
        ("python -Xdev -c pass", True),
        ("python -um package.train -m pip", True),
        ("python -m pdb train.py", True),
        ("python /env/lib/python3.12/site-packages/mine/train.py", True),
        ("python /env/bin/torchrun train.py", False),
        ("python /env/bin/accelerate launch train.py", False),
        ("python /env/bin/deepspeed train.py", False),
        ("python -u -m deepspeed.launcher.launch train.py", False),
        ("python -m torch.distributed.run train.py", False),
        ("python -m monarch_kernel.join train.py", False),  # it prepares itself
        ("python -m pip install x", False),
        ("python -m ipykernel_launcher -f x", False),
        ("python /env/lib/python3.12/site-packages/ray/_private/workers/default_worker.py", False),
        ("python -c from__multiprocessing.spawn__import__spawn_main", False),
        ("python -", False),
        ("python", False),
    ],
)
def test_launchers_and_tools_are_no_ranks(command: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert is_rank([word.replace("__", " ") for word in command.split()]) == expected


def test_uninstall_removes_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    python = bare_above(tmp_path / "environment")
    assert "Nothing was installed" in join(python, "uninstall").stdout
    path = Path(join(python, "install").stdout.split()[1].rstrip(":"))
    assert join(python, "install").returncode == 0  # again, as after an upgrade
    assert join(python, "uninstall").returncode == 0 and not path.exists()
    path.write_text("import os\n")
    for verb in ("install", "uninstall"):
        done = join(python, verb)
        assert done.returncode == 1 and "move it away" in done.stderr and path.read_text() == "import os\n"
