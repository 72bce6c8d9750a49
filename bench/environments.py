"""A separate environment for each peer, created when first needed and kept under .bench/."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / ".bench"
REQUIREMENTS = ROOT / "bench" / "requirements"


class EnvironmentFailed(Exception):
    """A peer's environment could not be created; the message has the reason and the remedy."""


def python_for(peer: str) -> Path:
    """Return the interpreter that runs `peer`; ours and the limits use the one that runs the bench.

    Raises EnvironmentFailed when the peer cannot be installed here.
    """
    requirements = REQUIREMENTS / f"{peer}.txt"
    if not requirements.exists():
        return Path(sys.executable)
    folder = STATE / "envs" / peer
    stamp = folder / ".installed"
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    python = folder / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"making the environment of {peer} in {folder.relative_to(ROOT)} ...", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True, text=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)]
        environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        subprocess.run(install, check=True, capture_output=True, text=True, env=environ)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines()
        why = said[-1] if said else f"exit status {error.returncode}"
        raise EnvironmentFailed(
            f"{peer} could not be installed from {requirements.relative_to(ROOT)}: {why}; "
            f"leave it out with --peers, or install it there by hand"
        ) from None
    stamp.write_text(wanted)
    return python


def python_above(peer: str, torch: bool = True) -> Path:
    """Return an interpreter with the packages of this one and the further ones that `peer` needs; created in seconds.

    Args:
        peer: the name of its requirements.
        torch: whether it also needs the torch of this environment.

    Raises EnvironmentFailed when it cannot be created here.
    """
    wanted = (REQUIREMENTS / f"{peer}.txt").read_text().split()
    folder = STATE / "envs" / f"{peer}-above"
    stamp, python = folder / ".installed", folder / "bin" / "python"
    state = hashlib.sha256(f"{wanted}{sys.version}{sys.prefix}".encode()).hexdigest()
    STATE.mkdir(exist_ok=True)
    with open(STATE / f"{peer}-above.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may need it
        if stamp.exists() and stamp.read_text() == state:
            return python
        if torch and not _is_here("torch"):
            raise EnvironmentFailed(f"{peer} needs torch, which this environment lacks: make venv EXTRAS=torch,...")
        shutil.rmtree(folder, ignore_errors=True)
        missing = [line for line in wanted if not _is_here(line.partition("==")[0])]
        try:
            bare_above(folder)
            install = [
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(python),
                "install",
                "--quiet",
                "--no-deps",
                *missing,
            ]
            environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
            subprocess.run(install, check=True, capture_output=True, text=True, env=environ)
        except (subprocess.CalledProcessError, ValueError) as error:
            said = str(getattr(error, "stderr", "") or error).strip().splitlines()
            raise EnvironmentFailed(f"{peer} could not be installed: {said[-1]}") from None
        stamp.write_text(state)
    return python


def bare_above(folder: Path) -> Path:
    """Create an environment with the packages of this one in a new folder; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "_below.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in sys.path if path.endswith("-packages"))
    )
    return folder / "bin" / "python"


def _is_here(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False
