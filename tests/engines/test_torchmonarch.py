"""What is Monarch's alone: its own actors, jobs of other processes, deaths, and what it cannot do."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import python_of
from tests.engines.test_tools import shown, until
from tests.kernel.harness import Kernel, wait_until
from tests.waiting import patience

pytestmark = pytest.mark.parametrize("notebook", ["torchmonarch"], indirect=True)

HERE = Path(__file__).parent
ACTORS = """import threading
from monarch.actor import Actor, endpoint, this_host
class Worker(Actor):
    @endpoint
    def work(self, value):
        doubled = value * 2
        breakpoint()
        return doubled
workers = this_host().spawn_procs({"gpus": 2}, name="w")
calls = workers.spawn("workers", Worker).work.call(21)
found = []
waiting = threading.Thread(target=lambda: found.extend(value for _, value in calls.get()))
waiting.start()
"""
FAILING = """from monarch.actor import Actor, concurrent_endpoint, endpoint, this_host
class Stepping(Actor):
    @endpoint
    def step(self, value):
        self.half(value)
    def half(self, value):
        half = value / 2
        raise ValueError(f"at {value}")
    @endpoint
    def careful(self):
        try:
            self.half(3)
        except ValueError:
            return "careful"
class Waiting(Actor):
    @concurrent_endpoint
    async def wait(self, value):
        import asyncio
        await asyncio.sleep(0)
        kept = ["waited", value]
        raise LookupError(f"at {value}")
failing = this_host().spawn_procs({"gpus": 2}, name="failing")
stepping, waiting = failing.spawn("stepping", Stepping), failing.spawn("waiting", Waiting)
get_ipython().run_line_magic("mesh", "ls")
"""


def test_breakpoint_in_an_endpoint_of_monarch_stops_here(notebook: Kernel) -> None:
    notebook.ok("%mesh ls")  # from now on, its tools enter meshes of variables
    notebook.ok(ACTORS.replace("calls =", "get_ipython().run_line_magic('mesh', 'ls')\ncalls ="))
    text = until(notebook, "%mesh debug list", r"workers .*0-1")
    assert "in Worker.work" in text
    assert "doubled = 42" in shown(notebook.ok("%mesh debug print doubled"))
    notebook.ok("%mesh debug continue")
    assert "[42, 42]" in shown(notebook.ok("waiting.join(60)\nfound"))
    notebook.ok("%mesh down workers\n%mesh use m")


def test_frames_of_an_endpoint_of_monarch_are_open_afterwards(notebook: Kernel) -> None:
    notebook.ok("%mesh ls")
    notebook.ok(FAILING)
    for call, found in (("stepping.step", "half = 10.5"), ("waiting.wait", "kept = ['waited', 21]")):
        out = notebook.run(f"{call}.call(21).get()")
        assert out.ename == "ActorError", out
        text = shown(notebook.ok("%mesh pm --on failing"))
        assert "0-1" in text and "at 21" in text, text
        assert found in shown(notebook.ok(f"%mesh debug print {found.partition(' ')[0]}"))
        notebook.ok("%mesh debug continue")
    # An error that the endpoint handles ends nothing.
    notebook.ok("[value for _, value in stepping.careful.call().get()]")
    assert "careful" not in shown(notebook.ok("%mesh pm --on failing"))
    notebook.ok("%mesh debug continue\n%mesh down failing\n%mesh use m")


@pytest.mark.parametrize(
    "command",
    [
        *("heal", "debugpy -r 0", "up other --procs 1 --keep", "up other --procs 1 --env /usr"),
        "attach tcp://127.0.0.1:26600",
    ],
)
def test_what_it_cannot_do_is_said_in_one_sentence(notebook: Kernel, command: str) -> None:
    out = notebook.run(f"%mesh {command}")
    assert out.ename == "UsageError" and out.evalue.count("\n") == 0, out
    if command.startswith("attach"):
        assert "is an address" in out.evalue and "pickle.dump" in out.evalue
    elif command != "up other --procs 1 --env /usr":
        assert "torchmonarch" in out.evalue


def test_a_rank_that_dies(notebook: Kernel) -> None:
    notebook.ok("%mesh up mortal --procs 2")
    out = notebook.run("%%mesh mortal\nimport os\nif rank == 1:\n    os._exit(3)\nrank")
    assert out.ename == "MeshCellError" and "rank 1" in out.evalue and "%mesh restart mortal" in out.traceback
    assert "1 dead" in shown(notebook.ok("%mesh stacks mortal"))
    notebook.ok("%mesh down mortal\n%mesh use m")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, Path]]:
    """A running job of Monarch, the file with its mesh, and the file that ends it."""
    file, gate = tmp_path / "job.mesh", tmp_path / "gate"
    command = [python_of("torchmonarch"), str(HERE / "job.py"), str(file), str(gate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            wait_until(file.exists, "the job has begun", 60)
            yield process, file, gate
        finally:
            gate.touch()
            try:
                process.wait(patience(30))
            finally:
                process.kill()


def test_a_running_job_of_another_process(
    notebook: Kernel, job: tuple[subprocess.Popen[str], Path, Path], tmp_path: Path
) -> None:
    process, file, gate = job
    line = (HERE / "job.py").read_text().split("\n").index("        time.sleep(0.01)") + 1
    assert "attached" in shown(notebook.ok(f"%mesh attach {file}"))
    assert "in Trainer.train" in until(notebook, "%mesh stacks job", "in Trainer.step")
    assert "seen by 1" in shown(notebook.ok("%%mesh job\nprint('seen by', rank)"))
    notebook.ok("%mesh down job\n%mesh use m")
    # A viewer that is killed while it has stopped all ranks: they go on, and the job comes to its end.
    command = [python_of("torchmonarch"), str(HERE / "viewer.py"), str(file), str(HERE / "job.py"), str(line)]
    viewer = subprocess.run(command, capture_output=True, text=True, timeout=patience(90), cwd=HERE.parent.parent)
    assert "stopped" in viewer.stdout, viewer
    gate.touch()
    out, _ = process.communicate(timeout=patience(60))
    assert "steps: [" in out and "seen by" not in out, out
