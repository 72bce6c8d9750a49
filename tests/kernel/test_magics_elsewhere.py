"""`%load_ext monarch_kernel` in a plain ipykernel, in one that differs as Colab's does, and in IPython without any."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kernel.harness import Bell, Kernel
from tests.kernel.screen import text
from tests.waiting import patience

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def colab_kernel(jupyter_folders: Path) -> str:
    """The name of a kernel like Colab's, with its kernelspec installed."""
    folder = jupyter_folders / "prefix" / "share" / "jupyter" / "kernels" / "colab"
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, str(ROOT / "tests" / "kernel" / "colab.py"), "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Colab", "language": "python"}))
    return "colab"


@pytest.fixture(scope="module", params=["python3", "colab"])
def plain(request: pytest.FixtureRequest, colab_kernel: str) -> Iterator[Kernel]:
    """A kernel of others with the extension loaded and a mesh of two ranks."""
    from tests.kernel import harness

    kernel = harness.start_kernel(request.param)
    try:
        kernel.ok("%load_ext monarch_kernel")
        kernel.ok("%mesh up --procs 2")
        yield kernel
    finally:
        harness.stop_kernel(kernel)


def test_cells_and_errors(plain: Kernel) -> None:
    outcome = plain.ok("%%mesh\nprint('hello')\nrank")
    assert text(outcome) == "[0-1] hello\n[0]   0\n[1]   1"
    assert plain.ok("list(_.values())").text == "[0, 1]"
    assert plain.run("%%mesh\n1 / 0").ename == "MeshCellError"


def test_an_interrupt_reaches_the_ranks(plain: Kernel, bell: Bell) -> None:
    plain.ok(bell.code())
    plain.ok("%mesh push ring")
    cell = plain.send("%%mesh\nimport os, time\nring()\ntime.sleep(120)")
    bell.wait(2)
    plain.interrupt()
    outcome = cell.wait()
    assert outcome.ename == "MeshCellInterrupt", outcome.traceback
    assert text(plain.ok("%%mesh\n'alive'")) == "[0-1] 'alive'"


def test_a_second_interrupt_kills_and_says_so(plain: Kernel, bell: Bell) -> None:
    plain.ok(bell.code())
    plain.ok("%mesh up own --procs 2")
    plain.ok("%mesh push ring")
    cell = plain.send(
        "%%mesh\nimport os, time\nsaid = False\nwhile True:\n    try:\n"
        "        if not said:\n            said = True\n            ring()\n        time.sleep(120)\n"
        "    except KeyboardInterrupt:\n        if rank == 0:\n            raise\n        ring('ignored')"
    )
    bell.wait(2)
    plain.interrupt()
    bell.wait(1)
    plain.interrupt()
    outcome = cell.wait()
    assert "Killed rank 1" in outcome.stderr
    plain.ok("%mesh down own")


def test_unloading_takes_the_magics_away_and_loading_brings_them_back(plain: Kernel) -> None:
    plain.ok("%unload_ext monarch_kernel")
    assert "not found" in plain.run("%mesh ls").stderr
    assert plain.run("import monarch").ename == "ModuleNotFoundError"
    plain.ok("%load_ext monarch_kernel")
    plain.ok("from monarch.actor import Actor")
    assert "m " in plain.ok("%mesh ls").text
    assert text(plain.ok("%%mesh\n1")) == "[0-1] 1"


def test_views_are_html_in_colab(start_kernel: Callable[..., Kernel], colab_kernel: str) -> None:
    kernel = start_kernel(colab_kernel)
    kernel.ok("%load_ext monarch_kernel\n%mesh up --procs 2\nfrom monarch_kernel import get_mesh\nm = get_mesh('m')")
    for shown in ("%mesh status", "m", "m.show()"):
        out = kernel.ok(shown)
        assert out.result is not None and set(out.result) == {"text/plain", "text/html"}
        assert "mesh m" in out.result["text/html"] and "2 idle" in out.result["text/html"]
        assert (out.stdout, out.stderr, out.displays) == ("", "", [])


def test_help_and_completions(plain: Kernel) -> None:
    client = plain.client
    plain.ok("def halve(x):\n    'Half of it.'")
    # Ranks of a busy machine take longer to answer than a person who types should wait.
    plain.ok(f"from monarch_kernel.kernel.magics import ipython_hooks as r\nr.FIRST = r.LATER = {patience(60)}")
    plain.ok("%%mesh\nlearning_rate = 0.1")
    for code, found in (("halve", "Half of it."), ("%%mesh\nlearning_rate", "0.1")):
        client.inspect(code, len(code))
        reply = client.get_shell_msg(timeout=patience(60))["content"]
        assert found in reply["data"]["text/plain"], reply
    for code, found in (("hal", "halve"), ("%mesh sta", "status"), ("%%mesh\nlearning_r", "learning_rate")):
        client.complete(code, len(code))
        assert found in client.get_shell_msg(timeout=patience(60))["content"]["matches"]


def in_ipython(*cells: str) -> str:
    """Run cells in IPython in a process of its own; what it printed."""
    program = textwrap.dedent(
        """
        import sys
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance(colors="nocolor")
        shell.run_line_magic("load_ext", "monarch_kernel")
        for cell in sys.argv[1:]:
            shell.run_cell(cell, store_history=True)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *cells], capture_output=True, text=True, cwd=ROOT, timeout=patience(120)
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_ipython_without_a_kernel_shows_text() -> None:
    told = in_ipython(
        "%mesh up --procs 2",
        "%%mesh\nprint('same')\nprint('mine', rank)\nrank * 2",
        "_[1]",
        "%%mesh\nif rank:\n    raise ValueError('boom')",
        "from monarch_kernel.actor import Actor, endpoint\nfrom monarch_kernel import get_mesh\n"
        "class A(Actor):\n    @endpoint\n    def f(self):\n        return 1 / 0",
        "get_mesh('m').spawn('a', A).f.call().get()",
        "%mesh ls",
        "%mesh status",
        "%mesh down",
    )
    assert "mesh m: 2 ranks (gpus=2) on this host, ready in" in told
    assert "[0-1] same\n" in told
    for rank in range(2):
        assert re.search(rf"\[{rank}\] +mine {rank}\n", told)
        assert re.search(rf"\[{rank}\] +{rank * 2}\n", told)
    assert "Out[2]" not in told
    assert "Failed on rank 1 (gpus=1) of the 2 of mesh m that ran it" in told
    assert "ValueError: boom" in told
    assert "ipython-input" not in told
    assert re.search(r"Cell In ?\[4\], line 3", told) and re.search(r"Cell In ?\[5\], line 6, in f", told)
    assert "mesh m: 2 ranks stopped" in told


def test_loading_costs_little_and_starts_nothing(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel("python3")
    kernel.ok("%load_ext monarch_kernel")
    kernel.ok("import sys, threading, psutil")
    assert kernel.ok("[m for m in ('torch', 'numpy', 'pandas', 'rich') if m in sys.modules]").text == "[]"
    assert kernel.ok("len(psutil.Process().children())").text == "0"
    assert kernel.ok("[t.name for t in threading.enumerate() if 'monarch' in t.name]").text == "[]"
