"""The command line: installing the kernelspec where Jupyter finds it, and what is said when that fails."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager

import monarch_kernel
from monarch_kernel.__main__ import main
from monarch_kernel._version import __version__
from tests.kernel.harness import Kernel
from tests.waiting import patience


def command(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "monarch_kernel", *argv],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


def spec_in(prefix: Path, name: str = "monarch") -> dict[str, object]:
    folder = prefix / "share" / "jupyter" / "kernels" / name
    assert {p.name for p in folder.iterdir()} == {
        "kernel.json",
        "logo-32x32.png",
        "logo-64x64.png",
        "logo-svg.svg",
    }
    return dict(json.loads((folder / "kernel.json").read_text()))


def test_install_writes_this_python_and_uninstall_removes_it(tmp_path: Path) -> None:
    done = command("install", "--prefix", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Installed the kernelspec 'monarch' in {tmp_path}/share/jupyter/kernels/monarch\n"
    assert spec_in(tmp_path) == {
        "argv": [sys.executable, "-Xfrozen_modules=off", "-m", "monarch_kernel", "-f", "{connection_file}"],
        "display_name": "Monarch (Python 3)",
        "language": "python",
        "metadata": {"debugger": True, "supported_encryption": ["curve"]},
        "kernel_protocol_version": "5.5",
    }
    assert main(["uninstall", "--prefix", str(tmp_path)]) == 0
    assert not (tmp_path / "share/jupyter/kernels/monarch").exists()


def test_install_again_replaces(tmp_path: Path) -> None:
    assert main(["install", "--prefix", str(tmp_path)]) == 0
    assert main(["install", "--prefix", str(tmp_path), "--display-name", "Mine"]) == 0
    assert spec_in(tmp_path)["display_name"] == "Mine"


def test_what_is_not_ours_is_neither_replaced_nor_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "share/jupyter/kernels/python3"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text('{"argv": ["python", "-m", "ipykernel"]}')
    for command in ("install", "uninstall"):
        assert main([command, "--prefix", str(tmp_path), "--name", "python3"]) == 1
        assert "python3 is not a kernelspec of monarch_kernel, so it is left alone" in capsys.readouterr().err
    assert (other / "kernel.json").exists()
    assert main(["install", "--prefix", str(tmp_path)]) == 0
    ours = tmp_path / "share/jupyter/kernels/monarch"
    (ours / "notes.txt").write_text("mine")
    capsys.readouterr()
    for command in ("install", "uninstall"):
        assert main([command, "--prefix", str(tmp_path)]) == 1
        assert "monarch holds other files (notes.txt), so it is left alone" in capsys.readouterr().err
    assert (ours / "notes.txt").exists() and (ours / "kernel.json").exists()


def test_a_name_of_its_own_shows_in_the_display_name(tmp_path: Path) -> None:
    assert main(["install", "--prefix", str(tmp_path), "--name", "lab"]) == 0
    assert spec_in(tmp_path, "lab")["display_name"] == "Monarch (Python 3) [lab]"


def test_sys_prefix_and_user_go_where_jupyter_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    assert main(["install", "--user"]) == 0
    assert "monarch" in KernelSpecManager(kernel_dirs=[str(tmp_path / "data" / "kernels")]).find_kernel_specs()
    assert main(["install", "--sys-prefix"]) == 0
    assert spec_in(tmp_path / "env")
    assert main(["uninstall", "--user"]) == 0
    assert main(["uninstall", "--sys-prefix"]) == 0
    assert capsys.readouterr().err == ""


def test_uninstalling_what_is_not_there_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = tmp_path / "share" / "jupyter" / "kernels"
    assert main(["uninstall", "--prefix", str(tmp_path), "--name", "nobody"]) == 1
    assert capsys.readouterr().err == f"There is no kernelspec 'nobody' in {kernels}.\n"


def test_a_place_that_cannot_be_written_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "share").write_text("a file where a folder should be")
    assert main(["install", "--prefix", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("Cannot write the kernelspec to ") and "--sys-prefix" in message


def test_a_bad_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["install", "--prefix", str(tmp_path), "--name", "a b"]) == 1
    assert "a b" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "argv", [["bogus"], [], ["install", "--user", "--sys-prefix"]], ids=["unknown", "none", "two places"]
)
def test_usage_errors_name_what_is_possible(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(argv)
    assert exit_status.value.code == 2
    assert "usage: monarch-kernel" in capsys.readouterr().err


def test_help_and_version_do_not_start_a_kernel() -> None:
    assert "install" in command("--help").stdout
    assert command("--version").stdout == f"monarch_kernel {__version__}\n"


def test_the_packaged_kernelspec_is_what_the_wheel_ships() -> None:
    packaged = json.loads(files("monarch_kernel.kernel").joinpath("kernelspec/kernel.json").read_text())
    assert packaged["argv"][0] == "python"  # the wheel cannot know the interpreter's path
    project = Path(monarch_kernel.__file__).parent.parent / "pyproject.toml"
    if project.exists():
        wheel = tomllib.loads(project.read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
        assert wheel["shared-data"]["monarch_kernel/kernel/kernelspec"] == "share/jupyter/kernels/monarch"


def test_a_file_in_the_working_folder_does_not_hide_the_standard_library(
    tmp_path: Path, start_kernel: Callable[..., Kernel]
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('this is the user\\'s own file')")
    (tmp_path / "mine.py").write_text("answer = 42")
    kernel = start_kernel(cwd=str(tmp_path))
    assert kernel.ok("import random, mine; callable(random.random), mine.answer").text == "(True, 42)"
