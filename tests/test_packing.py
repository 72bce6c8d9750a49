"""What is packed: one wheel with kernel, magics, widget, panel and server extension, and none that lacks a part."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from bench.environments import bare_above
from monarch_kernel import __version__
from tests.test_project import ROOT

pytest.importorskip("hatchling", reason="hatchling is not installed: monarch_kernel[test]")
PANEL = "share/jupyter/labextensions/monarch-kernel-lab"


def pack(tree: Path, into: Path, kind: str) -> subprocess.CompletedProcess[str]:
    """What `pip install` does with a tree, without an environment for it."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of this checkout."""
    return packed(ROOT, tmp_path_factory.mktemp("made"), "sdist")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return packed(ROOT, tmp_path_factory.mktemp("made"), "wheel")


def packed(tree: Path, into: Path, kind: str) -> Path:
    """What a tree gives, in a new folder."""
    done = pack(tree, into, kind)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = into.iterdir()
    return made


def unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
        archive.extractall(folder)
    (tree,) = folder.iterdir()
    return tree


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_all_parts(wheel: Path) -> None:
    files = contents(wheel)
    data = f"monarch_kernel-{__version__}.data/data"
    for name in (
        "monarch_kernel/widgets/static/mesh.js",
        "monarch_kernel/server/openapi.json",
        "workspace_sync/__main__.py",
        f"{data}/share/jupyter/kernels/monarch/kernel.json",
        f"{data}/etc/jupyter/jupyter_server_config.d/monarch_kernel.json",
        f"{data}/{PANEL}/schemas/monarch-kernel-lab/panel.json",
        f"{data}/{PANEL}/install.json",
    ):
        assert files.get(name), name
    package = json.loads(files[f"{data}/{PANEL}/package.json"])
    assert package["version"].replace("-", ".") == __version__
    assert files[f"{data}/{PANEL}/{package['jupyterlab']['_build']['load']}"]
    scripts = [content for name, content in files.items() if PANEL in name and name.endswith(".js")]
    assert sum(len(gzip.compress(each)) for each in scripts) < 300_000


def test_the_sdist_gives_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    assert contents(packed(unpacked(sdist, tmp_path / "tree"), tmp_path / "made", "wheel")) == contents(wheel)


def test_jupyter_finds_all_parts_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed: monarch_kernel[lab]")
    python = str(bare_above(tmp_path / "fresh"))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, timeout=120)

    # The user's own folders and the machine's play no part; the checkout below has the same, under another prefix.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
    clean |= {"HOME": str(tmp_path), "JUPYTER_PREFER_ENV_PATH": "1", "NO_COLOR": "1"}

    def listed(module: str) -> list[str]:
        command = [python, "-m", module, "list"]
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return (done.stdout + done.stderr).splitlines()

    where = "import monarch_kernel; print(monarch_kernel.__file__)"
    found = subprocess.run([python, "-c", where], cwd=tmp_path, env=clean, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(tmp_path / "fresh"))
    extensions = listed("jupyterlab.labextensions")
    assert f"{tmp_path}/fresh/share/jupyter/labextensions" in extensions
    panel = next(line for line in extensions if "monarch-kernel-lab" in line)
    assert "OK" in panel and "enabled" in panel and "(python, monarch_kernel)" in panel
    of_server = [x for x in listed("jupyter_server.extension.serverextension") if "monarch_kernel.server" in x]
    assert "enabled" in of_server[0] and "OK" in of_server[-1]
    assert any(f"{tmp_path}/fresh/share/jupyter/kernels/monarch" in x for x in listed("jupyter_client.kernelspecapp"))


def spoil(tree: Path, name: str) -> str:
    """Make one thing wrong in a tree; the sentence that says so."""
    if name == "missing":
        shutil.rmtree(tree / "labextension" / "prebuilt")
        return "the panel and the widget are not built."
    if name == "no widget":
        shutil.rmtree(tree / "monarch_kernel" / "widgets" / "static")
        return "the panel and the widget are not built."
    if name == "other sources":
        (tree / "labextension" / "src" / "index.ts").write_text("export default [];\n")
        return "the panel and the widget were built from other sources than those in labextension/."
    if name == "other bundle":
        (tree / "monarch_kernel" / "widgets" / "static" / "mesh.js").write_text("export default {};\n")
        return "the panel and the widget are not as they were built."
    (tree / "labextension" / "bundles.json").write_text("<<<<<<< ours\n")
    return "the panel and the widget were built from other sources than those in labextension/."


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("missing", "sdist"),
        ("no widget", "wheel"),
        ("other sources", "wheel"),
        ("other bundle", "wheel"),
        ("a merge", "wheel"),
    ],
)
def test_nothing_is_packed_without_a_part(sdist: Path, tmp_path: Path, name: str, kind: str) -> None:
    tree = unpacked(sdist, tmp_path / "tree")
    why = spoil(tree, name)
    done = pack(tree, tmp_path / "made", kind)
    assert done.returncode == 1
    said = " ".join((done.stdout + done.stderr).split())
    assert said == f"monarch_kernel cannot be packed: {why} Run `make bundles`, which needs node and npm."
    assert not list(tmp_path.glob("made/*"))


@pytest.mark.parametrize(("name", "status"), [("other sources", 0), ("missing", 1)])
def test_a_checkout_that_is_worked_on_can_be_installed(sdist: Path, tmp_path: Path, name: str, status: int) -> None:
    tree = unpacked(sdist, tmp_path / "tree")
    spoil(tree, name)
    build = "import sys; from hatchling.build import build_editable; build_editable(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=tree, capture_output=True, timeout=120)
    assert done.returncode == status
    assert len(list(tmp_path.glob("*.whl"))) == 1 - status
