"""`%mesh trace`, `%mesh metrics` and `%mesh history` in a real kernel."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernel.harness import Kernel, stop_kernel
from tests.watch.traces import read_trace


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel with a mesh of two ranks."""
    kernel.ok("%mesh up --procs 2")
    return kernel


def refusal(kernel: Kernel, code: str) -> str:
    """What a refused cell is told."""
    outcome = kernel.run(code)
    assert (outcome.status, outcome.ename) == ("error", "UsageError"), outcome
    return outcome.evalue


def test_a_trace_has_the_cells_of_the_notebook_and_of_the_ranks(mesh: Kernel, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert f"writes {file}" in mesh.ok(f"%mesh trace on {file}").stdout
    assert f"to {file} is on" in mesh.ok("%mesh trace").stdout
    assert "is on: end it first" in refusal(mesh, f"%mesh trace on {file}")
    mesh.ok("%%mesh\nx = rank\nx")
    assert mesh.run("%%mesh -r 1\n1 / 0").status == "error"
    mesh.ok("%mesh trace flush")
    said = mesh.ok("%mesh trace off").stdout
    assert f"{file}: " in said and "slices of 3 processes" in said
    read = read_trace(file)
    calls = [each for each in read.slices if each["cat"] == "call" and each["name"].startswith("Cell In[")]
    assert [each["args"]["ranks"] for each in calls] == [2, 1]
    of_ranks = [each for each in read.slices if each["cat"] == "cell" and each["pid"] != 1]
    assert sorted(each["name"] for each in of_ranks) == sorted([calls[0]["name"]] * 2 + [calls[1]["name"]])
    assert [each["name"] for each in of_ranks if each.get("args", {}).get("raised")] == [calls[1]["name"]]
    own = [each["name"] for each in read.slices if each["cat"] == "cell" and each["pid"] == 1]
    assert calls[0]["name"].removeprefix("Cell ") in own
    led_to = [end for start, end in read.arrows() if start["name"] == "send"]
    assert sorted(each["pid"] for each in led_to) == [2, 3, 3]


def test_a_kernel_that_ends_writes_its_trace(start_kernel: Callable[..., Kernel], tmp_path: Path) -> None:
    kernel = start_kernel()
    kernel.ok("%mesh up --procs 1")
    kernel.ok(f"%mesh trace on {tmp_path}/run.json.gz")
    kernel.ok("%%mesh\n1")
    stop_kernel(kernel)
    assert any(each["cat"] == "cell" for each in read_trace(tmp_path / "run.json.gz").slices)


def test_mistakes_with_traces(mesh: Kernel, tmp_path: Path) -> None:
    assert "No trace is on" in mesh.ok("%mesh trace").stdout
    assert "no trace is on; %mesh trace on FILE" in refusal(mesh, "%mesh trace off")
    assert "name the file" in refusal(mesh, "%mesh trace on")
    assert "belong to on" in refusal(mesh, "%mesh trace off run.json")
    assert "No such file" in refusal(mesh, f"%mesh trace on {tmp_path}/missing/run.json")


def test_metrics_are_shown_and_served(mesh: Kernel, tmp_path: Path) -> None:
    shown = mesh.ok("%mesh metrics").text
    assert "monarch_ranks" in shown and "mesh=m" in shown and "state=idle" in shown
    said = mesh.ok(f"%env XDG_CONFIG_HOME={tmp_path}\n%mesh metrics --serve").stdout
    url = said[said.index("http://") :].split(",")[0]
    request = urllib.request.Request(url)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=30)
    token = (tmp_path / "monarch_kernel" / "metrics.token").read_text()
    request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert b'monarch_ranks{host="' in answer.read()
    mesh.ok("%mesh metrics --off")
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(request, timeout=30)
    assert "give either --off" in refusal(mesh, "%mesh metrics --off --on")


def test_the_history_is_asked_in_sql(mesh: Kernel) -> None:
    assert "The history is off (%mesh history on begins it)" in mesh.ok("%mesh history").stdout
    mesh.ok("%mesh history on")
    assert "The history is on" in mesh.ok("%mesh history").stdout
    mesh.ok(
        "import time\nfrom monarch_kernel.watch import history\n"
        "while not len(history().query('SELECT * FROM rank_samples WHERE memory > 0')): time.sleep(0.05)"
    )
    shown = mesh.ok('%mesh history "SELECT name, ranks FROM meshes"').text
    assert shown.split() == ["name", "ranks", "m", "2"]
    assert mesh.ok("%mesh history SELECT name FROM meshes WHERE event = 'seen'").text.split() == ["name", "m"]
    assert "the tables are meshes" in refusal(mesh, "%mesh history SELECT * FROM nothing")
    mesh.ok("%mesh history off")
    mesh.ok("%mesh history clear")
    assert mesh.ok("%mesh history SELECT COUNT(*) AS rows FROM meshes").text.split() == ["rows", "0"]
