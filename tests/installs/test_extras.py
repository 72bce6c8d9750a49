"""Each extra resolves on each Python; all in one environment work, and so do the lowest versions that are promised."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.installs.conftest import ROOT, THIS, Environment, clean, uv

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: What users install; the others are for work on this project. Versions that suit ``all`` suit each extra in it.
EXTRAS = ["all", "sky", "rdma"]
IN_ALL = ["torch", "kubernetes", "ray", "lightning", "gpu", "history", "environments", "lab"]
#: Those that are installed in their lowest versions in one environment; others are large, or need a compiler.
FLOORS = ["environments", "gpu", "history", "kubernetes", "lab"]
#: Run in an environment, with its own jupyter_client: a cell on two ranks.
SESSION = """
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(startup_timeout=120, kernel_name="monarch")
said = []
def heard(message):
    content = message["content"]
    said.append(content.get("text", "") or content.get("data", {}).get("text/plain", ""))
    if message["msg_type"] == "error":
        said.append("\\n".join(content["traceback"]))
try:
    for code in ("%mesh up --procs 2", "%%mesh\\nrank * 10", "%mesh down"):
        client.execute_interactive(code, timeout=120, output_hook=heard)
finally:
    client.stop_channels()
    manager.shutdown_kernel()
print("".join(said))
"""


def required(extra: str) -> list[str]:
    """The requirements of an extra, with those of extras that it names; of "", those of the kernel."""
    if not extra:
        return list(PROJECT["dependencies"])
    found: list[str] = []
    for each in PROJECT["optional-dependencies"][extra]:
        own = re.fullmatch(r"monarch_kernel\[(.+)\]", each)
        found += [more for name in own[1].split(",") for more in required(name)] if own else [each]
    return found


def resolved(requirements: list[str], folder: Path, python: str, *options: str) -> dict[str, str]:
    """The versions that uv chooses, by name."""
    wanted, chosen = folder / "wanted.in", folder / "chosen.txt"
    wanted.write_text("\n".join(requirements))
    chosen.unlink(missing_ok=True)  # uv would prefer the versions in it
    uv(
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--python-version",
        python,
        *options,
        "-o",
        chosen,
        wanted,
    )
    return dict(line.split("==") for line in chosen.read_text().splitlines() if "==" in line)


def works(python: Path, home: Path) -> None:
    """A cell runs on two ranks, in a kernel of this environment that Jupyter starts there."""
    env = clean(HOME=str(home), JUPYTER_PREFER_ENV_PATH="1")
    command = [str(python), "-c", SESSION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env, cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mesh m: 2 ranks (gpus=2) on this host" in done.stdout
    assert "[0] 0" in done.stdout and "[1] 10" in done.stdout, done.stdout
    assert "mesh m: 2 ranks stopped" in done.stdout


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_resolves(wheel: Path, tmp_path: Path, extra: str, python: str) -> None:
    chosen = resolved([f"monarch_kernel[{extra}] @ file://{wheel}"], tmp_path, python)
    assert {re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in required(extra)} <= chosen.keys()


@pytest.mark.parametrize("extra", IN_ALL)
def test_all_has_what_each_of_its_extras_requires(extra: str) -> None:
    assert set(required(extra)) <= set(required("all"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_everything_in_one_environment(wheel: Path, environment: Environment, tmp_path: Path, python: str) -> None:
    made = environment(python)
    uv("pip", "install", "--quiet", "--python", made, f"monarch_kernel[all] @ file://{wheel}")
    uv("pip", "check", "--python", made)
    command = [str(made.parent / "monarch-kernel"), "doctor", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=clean(HOME=str(tmp_path)), cwd=tmp_path
    )
    parts = {part["name"]: part for part in json.loads(done.stdout)["parts"]}
    usable = ("kernel", "kernelspec", "jupyter", "panel", "server-extension", "widget-manager", "torch")
    for name in (*usable, "kubernetes", "lightning", "ray"):
        assert parts[name]["state"] == "ok", parts[name]
    assert done.returncode == 0
    works(made, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pip_resolves_what_uv_does(wheel: Path, environment: Environment, tmp_path: Path) -> None:
    """With the newest pip, which reads metadata alone. Those before 24 download what they choose: 3 GB for torch."""
    python, report = environment(THIS, "--seed"), tmp_path / "report.json"
    command = [str(python), "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    wanted = f"monarch_kernel[all] @ file://{wheel}"
    done = subprocess.run(
        [*command, "--report", str(report), wanted], capture_output=True, text=True, timeout=590, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    names = {each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]}
    assert {"monarch_kernel", "torch", "ray", "kubernetes", "jupyterlab", "msgspec"} <= names


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_lowest_versions(wheel: Path, environment: Environment, tmp_path: Path) -> None:
    lowest = ("--resolution", "lowest-direct")
    # A floor that another package raises would be one that nobody has tested.
    for extra in ("", *FLOORS):
        chosen = resolved([*required(""), *required(extra)], tmp_path, "3.11", *lowest)
        for each in required(extra):
            name, _, floor = each.partition(">=")
            version = chosen[name.lower().replace("_", "-")].split(".")
            parts = floor.partition(",")[0].split(".")
            assert version[: len(parts)] == parts, f"{each}: the lowest is {'.'.join(version)}"
    chosen = resolved([each for extra in ("", *FLOORS) for each in required(extra)], tmp_path, "3.11", *lowest)
    made = environment("3.11")
    uv("pip", "install", "--quiet", "--python", made, *(f"{name}=={version}" for name, version in chosen.items()))
    uv("pip", "install", "--quiet", "--python", made, "--no-deps", wheel)
    uv("pip", "check", "--python", made)
    works(made, tmp_path)
    command = [str(made.parent / "monarch-kernel"), "doctor", "kernel", "server", "kubernetes"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=clean(HOME=str(tmp_path)), cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
