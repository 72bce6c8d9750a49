"""Environment variables: each is read in one place, documented, and refused in plain words where it is not valid."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_kernel import environment
from monarch_kernel.config import EnvironmentVariable, InvalidSettingError, environment_variables
from tests.waiting import patience

ROOT = Path(__file__).resolve().parent.parent
TABLE = (ROOT / "docs" / "configuration.md").read_text()
KNOWN = {variable.name for variable in environment_variables()}
OURS = {
    environment.RUN,
    environment.ROOT,
    environment.AGENT,
    environment.IMPORTS,
    environment.DISPLAY,
    environment.JOB,
    environment.JOIN_RANK,
    environment.POD_ADDRESS,
    environment.POD_NAME,
    environment.WORKER_KEY,
    environment.SLURM_BATCH,
}
NAME = re.compile(r"MONARCH_KERNEL_[A-Z_]*[A-Z]")


def row(variable: EnvironmentVariable[Any]) -> str:
    texts = (f"`{variable.name}`", variable.allowed, variable.shown_default, variable.meaning, variable.read_by)
    return f"| {' | '.join(texts)} |"


def test_the_documentation_has_them_all() -> None:
    shown = [line for line in TABLE.splitlines() if line.startswith("| `MONARCH")]
    assert shown == [row(variable) for variable in environment_variables()]


def test_no_other_variable_is_named_anywhere() -> None:
    wrong: list[str] = []
    for folder in ("monarch_kernel", "docs", "notebooks", "bench"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".ipynb"):
                found = set(NAME.findall(path.read_text())) - KNOWN - OURS
                wrong += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(found)]
    assert not wrong


def test_only_one_module_has_their_names_in_its_code() -> None:
    """Others read them through it; a name in prose, as in a docstring, stands within other words."""
    quoted = re.compile(rf"[\"'](?:{NAME.pattern})[\"']")
    package = ROOT / "monarch_kernel"
    found = {str(p.relative_to(package)) for p in package.rglob("*.py") if quoted.search(p.read_text())}
    assert found == {"environment.py"}


@pytest.mark.parametrize(
    "variable, text, value",
    [
        (environment.HEARTBEAT_TIMEOUT, "0.5", 0.5),
        (environment.START_LIMIT, "0", 0.0),
        (environment.BACKLOG, "20000", 20000),
        (environment.KEY_FILE, "~/team.key", "~/team.key"),
        (environment.ORPHANED_STOPS, "end", "end"),
        (environment.RDMA_TCP_FALLBACK, "0", False),
        (environment.RDMA_GID_INDEX, "3", 3),
    ],
    ids=lambda v: v.name if isinstance(v, EnvironmentVariable) else str(v),
)
def test_what_is_set_counts_and_what_is_empty_does_not(
    variable: EnvironmentVariable[Any], text: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable.name, raising=False)
    default = variable.get()
    monkeypatch.setenv(variable.name, text)
    assert variable.get() == value != default
    monkeypatch.setenv(variable.name, "")
    assert variable.get() == default


@pytest.mark.parametrize("variable", environment_variables(), ids=lambda v: v.name)
def test_every_default_is_valid(variable: EnvironmentVariable[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(variable.name, raising=False)
    variable.get()


@pytest.mark.parametrize(
    "variable, text",
    [
        (environment.HEARTBEAT_TIMEOUT, "soon"),
        (environment.HEARTBEAT_TIMEOUT, "0.01"),
        (environment.SILENCE_TIMEOUT, "nan"),
        (environment.START_LIMIT, "-1"),
        (environment.CAST_FANOUT, "0"),
        (environment.BACKLOG, "1.5"),
        (environment.ORPHANED_STOPS, "kill"),
        (environment.RDMA_BACKEND, "carrier-pigeon"),
        (environment.RDMA_TCP_FALLBACK, "yes"),
        (environment.RDMA_GID_INDEX, "first"),
    ],
)
def test_what_is_not_valid_is_named(
    variable: EnvironmentVariable[Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(InvalidSettingError) as caught:
        variable.get()
    assert str(caught.value) == f"{variable.name}={text!r} is not valid: it must be {variable.allowed}"


def run(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=patience(120), cwd=ROOT, env={**os.environ, **env}
    )


def test_a_controller_refuses_what_its_host_agent_could_not_use() -> None:
    done = run("from monarch_kernel.actor import this_host; this_host()", MONARCH_KERNEL_PING_PERIOD="often")
    assert done.returncode == 1
    wanted = "InvalidSettingError: MONARCH_KERNEL_PING_PERIOD='often' is not valid: it must be a number of seconds"
    assert wanted in done.stderr, done.stderr


def test_a_rank_with_an_invalid_variable_says_why_it_ended() -> None:
    program = """
from monarch_kernel.actor import SupervisionError, this_host, unhandled_fault_hook
import monarch_kernel.actor
monarch_kernel.actor.unhandled_fault_hook = lambda failure: None
mesh = this_host().spawn_procs(env={"MONARCH_KERNEL_POST_MORTEM": "a while"})
try:
    mesh.initialized.get(60)
except SupervisionError as error:
    print(error)
"""
    done = run(program)
    assert "is not valid" in done.stdout + done.stderr, (done.stdout, done.stderr)


def test_a_variable_that_is_set_after_the_import_counts() -> None:
    program = """
import os
import monarch_kernel.actor
from monarch_kernel.runtime.actor.process import get_system
os.environ["MONARCH_KERNEL_CAST_FANOUT"] = "3"
os.environ["MONARCH_KERNEL_SEGMENT_THRESHOLD"] = "12345"
system = get_system()
print(system.caster._fanout, system.node._segment_threshold)
"""
    done = run(program)
    assert done.stdout.split() == ["3", "12345"], done.stderr
