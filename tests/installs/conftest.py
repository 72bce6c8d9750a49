"""The wheel of this checkout, and fresh environments, into which uv installs from where pip is set to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from constraints.install import uv_settings as settings_of_pip

ROOT = Path(__file__).resolve().parents[2]
Environment = Callable[..., Path]
#: The version of the Python that runs the tests.
THIS = "{}.{}".format(*sys.version_info)


uv_settings = cache(settings_of_pip)


def clean(**more: str) -> dict[str, str]:
    """The variables of a user who has set up nothing: no environment is active, no folder of Jupyter is named."""
    kept = ("PATH", "LANG", "TMPDIR", "PIP_", "UV_", "SSL_CERT_FILE", "XDG_CACHE_HOME", "MK_TEST_SLOWNESS")
    settings = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    return {**settings, **uv_settings(), "HOME": os.environ["HOME"], **more}


def uv(*words: str | Path, timeout: float = 600, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run uv as `make` does. With ``check``, a failure is an error that shows what it has printed."""
    program = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("uv is not installed: monarch_kernel[test]")
    done = subprocess.run(
        [program, *map(str, words)], capture_output=True, text=True, timeout=timeout, env=clean(), cwd=ROOT
    )
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


def install(python: Path, *words: str | Path) -> None:
    """Install into an environment, in the exact versions for this version of Python."""
    uv("pip", "install", "--quiet", "--python", python, "--constraint", pins(THIS), *words)


def pins(python: str) -> Path:
    """The exact versions for this version of Python, such as "3.12"."""
    return ROOT / "constraints" / f"py{python}.txt"


def build_wheel(tree: Path, into: Path) -> Path:
    """Build the wheel of a source tree into a new folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(into)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=120)
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: monarch_kernel[test]")
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@contextmanager
def environments(folder: Path) -> Generator[Environment]:
    """Make fresh environments of a version of Python. They are removed at the end, as they are large."""
    made: list[Path] = []

    def make(python: str = THIS, *more: str) -> Path:
        interpreter = sys.executable if python == THIS else find_python(python)
        if interpreter is None:
            pytest.skip(f"there is no Python {python}")
        made.append(folder / f"env{len(made)}")
        uv("venv", "--quiet", "--python", os.path.realpath(interpreter), *more, made[-1])
        return made[-1] / "bin" / "python"

    yield make
    for each in made:
        shutil.rmtree(each)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """Makes environments for a test."""
    with environments(tmp_path) as make:
        yield make


def find_python(version: str) -> str | None:
    """An interpreter of this version, of the system, uv, or pyenv; none is downloaded."""
    found = uv("python", "find", "--no-python-downloads", "--no-project", "--system", version, check=False)
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    return found.stdout.strip() or next(map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python"))), None)
