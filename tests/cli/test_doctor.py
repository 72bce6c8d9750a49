"""`monarch-kernel doctor`: what it finds here, in environments that lack something, and with Jupyter set otherwise."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.environments import bare_above
from monarch_kernel import __version__
from monarch_kernel.cli.doctor import PROVIDERS
from monarch_kernel.launchers.base import own_launchers
from tests.test_project import ROOT

PREFIX = Path(sys.prefix)
Doctor = Callable[..., dict[str, Any]]


def run(*words: str, python: Path | str = sys.executable, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it as a user of this environment does, whose folders of Jupyter are empty."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "CUDA_"))}
    command = [str(python), "-P", "-m", "monarch_kernel", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**clean, **env})


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """Runs it with `--json`. Returns its parts by name, and its exit status as "status"."""
    home = {"HOME": str(tmp_path / "home"), "JUPYTER_PREFER_ENV_PATH": "0"}

    def examine(*words: str, python: Path | str = sys.executable, **env: str) -> dict[str, Any]:
        done = run(*words, "--json", python=python, **home, **env)
        assert done.stdout, done.stderr
        told = json.loads(done.stdout)
        assert told["version"] == __version__ and told["ok"] == (done.returncode == 0)
        return {part["name"]: part for part in told["parts"]} | {"status": done.returncode}

    return examine


def spec(folder: Path, *argv: str) -> Path:
    (folder / "kernels" / "monarch").mkdir(parents=True)
    (folder / "kernels" / "monarch" / "kernel.json").write_text(
        json.dumps({"argv": [*argv, "-m", "monarch_kernel", "-f", "{connection_file}"], "display_name": "Monarch"})
    )
    return folder


def jupyter(command: str, module: str, **env: str) -> None:
    """Run a command of jupyter, such as one that it has printed, by the module that has its subcommands."""
    words = shlex.split(command)
    words = words[next(at for at, word in enumerate(words) if word in ("enable", "disable")) :]
    folder = {"JUPYTER_PREFER_ENV_PATH": "0", **env}
    line = [sys.executable, "-m", module, *words]
    subprocess.run(line, check=True, capture_output=True, timeout=60, env={**os.environ, **folder})


def test_all_parts_of_this_environment(doctor: Doctor) -> None:
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed: monarch_kernel[lab]")
    found = doctor()
    assert found["status"] == 0
    for name in ("kernel", "kernelspec", "jupyter", "panel", "server-extension", "widget-manager"):
        assert found[name]["state"] == "ok", found[name]
        assert found[name]["required"]
    assert found["jupyter"]["text"].startswith("jupyter-server ")
    assert found["kernelspec"]["text"].endswith(f"{PREFIX}/share/jupyter/kernels/monarch")
    assert [name for name in found if name in PROVIDERS] == sorted(own_launchers() - {"process"})
    for name in ("torch", *PROVIDERS):  # what is not there has a remedy; only programs of the system have no command
        part = found[name]
        assert (part["state"] == "missing") == (f"install 'monarch_kernel[{name}]'" in part["command"]), part


def test_it_prints_a_line_for_each_part() -> None:
    done = run("panel", "ray")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"monarch_kernel {__version__}, Python {sys.version.split()[0]} at {sys.prefix}")
    assert [line.split()[0] for line in lines[2:] if not line.startswith(" ")] == ["panel", "ray"]
    assert len(done.stderr.splitlines()) == 0


def test_it_imports_no_large_package() -> None:
    code = (
        "import sys; from monarch_kernel.__main__ import main; main(['doctor']);"
        "print(sorted({'torch', 'ray', 'kubernetes', 'sky', 'lightning_sdk', 'jupyterlab', 'pynvml'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]"


def test_named_parts_are_required(doctor: Doctor) -> None:
    absent = next(name for name in ("sky", "lightning", "slurm") if doctor(name)[name]["state"] != "ok")
    assert doctor("kernel", absent)["status"] == 1
    assert set(doctor("server")) == {"kernelspec", "jupyter", "panel", "server-extension", "widget-manager", "status"}


def test_an_unknown_part_is_named() -> None:
    done = run("pannel")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "monarch-kernel doctor: there is no part 'pannel'; did you mean panel?\n"


def test_a_kernelspec_whose_interpreter_is_gone(doctor: Doctor, tmp_path: Path) -> None:
    data = spec(tmp_path / "data", str(tmp_path / "gone" / "python"))
    kernel = doctor("kernelspec", JUPYTER_DATA_DIR=str(data))["kernelspec"]
    assert kernel["state"] == "broken"
    assert kernel["text"] == f"monarch is registered with an interpreter that does not exist: {tmp_path}/gone/python"
    # The command mends it, in the same folder.
    command = shlex.split(kernel["command"])
    assert command[:2] == ["monarch-kernel", "install"]
    env = {**os.environ, "JUPYTER_DATA_DIR": str(data)}
    subprocess.run([sys.executable, "-m", "monarch_kernel", *command[1:]], check=True, env=env, timeout=60)
    assert doctor("kernelspec", JUPYTER_DATA_DIR=str(data))["kernelspec"]["state"] == "ok"


def test_a_kernelspec_of_another_environment(doctor: Doctor, tmp_path: Path) -> None:
    bare = bare_above(tmp_path / "bare")  # it sees the packages of this one, and has no kernelspec
    kernel = doctor("kernelspec", python=bare, JUPYTER_DATA_DIR=str(spec(tmp_path / "data", sys.executable)))
    assert kernel["kernelspec"]["state"] == "missing"
    assert kernel["kernelspec"]["text"] == f"registered only for other environments: monarch ({sys.executable})"
    subprocess.run([bare, "-m", "monarch_kernel", "install", "--sys-prefix"], check=True, timeout=60)
    assert doctor("kernelspec", python=bare)["kernelspec"]["state"] == "ok"


@pytest.mark.parametrize(
    ("part", "extension", "text"),
    [
        ("panel", "monarch-kernel-lab:panel", "it is disabled"),
        ("widget-manager", "anywidget", "live views in cells stay tables, because anywidget is disabled"),
    ],
)
def test_an_extension_of_the_page_that_is_disabled(
    doctor: Doctor, tmp_path: Path, part: str, extension: str, text: str
) -> None:
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed: monarch_kernel[lab]")
    page = tmp_path / "config" / "labconfig" / "page_config.json"
    page.parent.mkdir(parents=True)
    page.write_text(json.dumps({"disabledExtensions": {extension: True}}))
    config = {"JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    found = doctor("kernel", part, **config)
    assert (found[part]["state"], found[part]["text"]) == ("broken", text)
    jupyter(found[part]["command"], "jupyterlab.labextensions", **config)
    assert doctor(part, **config)["status"] == 0


def test_a_server_extension_that_is_disabled(doctor: Doctor, tmp_path: Path) -> None:
    pytest.importorskip("jupyter_server")
    # As `jupyter server extension disable` does for a user who has enabled it.
    file = tmp_path / "config" / "jupyter_server_config.d" / "monarch_kernel.server.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"ServerApp": {"jpserver_extensions": {"monarch_kernel.server": False}}}))
    env = {"JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    part = doctor("server-extension", **env)["server-extension"]
    assert part["text"] == f"it is disabled in {file}, so kept meshes are not listed"
    jupyter(part["command"], "jupyter_server.extension.serverextension", **env)
    assert doctor("server-extension", **env)["status"] == 0

    # What a user has written has precedence, and no command changes it.
    own = tmp_path / "config" / "jupyter_server_config.json"
    own.write_text(json.dumps({"ServerApp": {"jpserver_extensions": {"monarch_kernel.server": False}}}))
    part = doctor("server-extension", **env)["server-extension"]
    assert (part["text"], part["command"]) == (f"it is disabled in {own}, so kept meshes are not listed", "")


def test_a_panel_of_another_version_that_comes_first(doctor: Doctor, tmp_path: Path) -> None:
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed: monarch_kernel[lab]")
    own = PREFIX / "share" / "jupyter" / "labextensions" / "monarch-kernel-lab"
    other = tmp_path / "data" / "labextensions" / "monarch-kernel-lab"
    shutil.copytree(own, other)
    package = json.loads((other / "package.json").read_text())
    (other / "package.json").write_text(json.dumps(package | {"version": "0.0.1"}))
    panel = doctor("panel", JUPYTER_DATA_DIR=str(tmp_path / "data"))["panel"]
    assert panel["state"] == "broken"
    assert f"that of version 0.0.1 in {other}" in panel["text"]


def test_an_environment_that_has_nothing_else(doctor: Doctor, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True, timeout=60)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    shutil.copytree(ROOT / "monarch_kernel", site / "monarch_kernel")
    info = site / f"monarch_kernel-{__version__}.dist-info"
    info.mkdir()
    own = next(Path(sys.prefix).glob("lib/python3*/site-packages/monarch_kernel-*.dist-info/METADATA"))
    shutil.copy(own, info)

    found = doctor(python=python)
    assert found["status"] == 1
    assert found["kernel"]["state"] == "missing"
    assert found["kernel"]["text"].startswith("it cannot run in this environment, which lacks anywidget, blake3, ")
    # Without pip in it, uv installs into it.
    assert found["kernel"]["command"] == f"uv pip install --python {python} monarch_kernel=={__version__}"
    assert found["jupyter"]["state"] == found["panel"]["state"] == "elsewhere"
    assert found["jupyter"]["command"] == "python -m pip install --no-deps monarch_kernel msgspec watchfiles"
    assert found["torch"]["state"] == "missing"

    command = [str(python), "-P", "-m", "monarch_kernel", "-f", "connection.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"The Monarch kernel cannot run in {tmp_path}/env, which lacks the package ")
