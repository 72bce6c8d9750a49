"""Install extras of this project into the environment that runs this, once, from the exact versions here.

`make` runs it before each target with the extras that the target needs; what an earlier target has brought stays. uv
does the work where there is one, with the settings that pip has here, so that both get the same files.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = ROOT / "constraints" / "py{}.{}.txt".format(*sys.version_info[:2])
#: What was installed: {"extras": {name: digest of what it then was}, "project": digest}; "" is the kernel's part.
STATE = Path(sys.prefix) / ".set-up.json"
#: What builds the project, beside the environment's own packages: nothing is built in an environment of its own.
BUILDERS = ["editables", "hatchling"]
#: What is copied into the environment as the project is installed, beside its metadata.
COPIED = [
    "pyproject.toml",
    "labextension/bundles.json",
    "monarch_kernel/kernel/kernelspec",
    "monarch_kernel/server/config",
]
#: uv's variable for what is so called in pip's configuration, and what separates its values.
UV_SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}


def requirements(extra: str) -> list[str]:
    """What an extra asks for, with that of the project's other extras that it names; of "", what the kernel needs.

    Raises:
        SystemExit: there is no such extra.
    """
    if not extra:
        return [*BUILDERS, *PROJECT["dependencies"]]
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    if extra not in extras:
        sys.exit(f"pyproject.toml has no extra {extra!r}; it has {', '.join(sorted(extras))}")
    found: list[str] = []
    for requirement in extras[extra]:
        own = re.fullmatch(r"monarch_kernel\[(.+)\]", requirement)
        found += [each for name in own[1].split(",") for each in requirements(name)] if own else [requirement]
    return found


def digest(*contents: Any) -> str:
    """Of values that can be written as JSON, and of files and folders."""
    total = hashlib.sha256()
    for content in contents:
        if not isinstance(content, Path):
            total.update(json.dumps(content).encode())
            continue
        for path in sorted(filter(Path.is_file, content.rglob("*"))) if content.is_dir() else [content]:
            total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()


def uv_settings() -> dict[str, str]:
    """Environment variables that give uv the indexes and files that pip is set to use here; those that are set stay."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    found: dict[str, tuple[int, str]] = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        level, _, name = key.rpartition(".")
        rank = {":env:": 3, "install": 2, "site": 1}.get(level, 0)
        if name in UV_SETTINGS and rank >= found.get(name, (0, ""))[0]:
            found[name] = rank, ast.literal_eval(value)
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip's: the best version of all indexes
    for name, (_, value) in found.items():
        variable, separator = UV_SETTINGS[name]
        settings[variable] = separator.join(value.split())
    return {name: value for name, value in settings.items() if name not in os.environ}


def install(arguments: list[str]) -> None:
    """Install with uv or pip, which say how far they are.

    Raises:
        SystemExit: it has failed, and has said why.
    """
    uv = shutil.which("uv")
    if uv is not None:
        command = [uv, "pip", "install", "--python", sys.executable, *arguments]
        status = subprocess.run(command, env={**os.environ, **uv_settings()}, cwd=ROOT).returncode
    else:
        status = _pip(["install", "--no-compile", "--progress-bar", "off", *arguments])
    if status:
        sys.exit(f"{'uv' if uv else 'pip'} has failed, so the environment is not complete; the next make tries again")


def _pip(arguments: list[str]) -> int:
    """Run pip, and show how many packages it has found and installs; its exit status."""
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [sys.executable, "-m", "pip", *arguments]
    found, loaded = 0, 0.0
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if re.match(r"(Collecting|Processing) ", line):
                found += 1
            elif size := re.match(r" *Downloading \S+ \(([\d.]+) (kB|MB|GB)\)", line):
                loaded += float(size[1]) * {"kB": 1e-3, "MB": 1, "GB": 1e3}[size[2]]
            elif line.startswith("Installing collected packages: "):
                print(f"    {line.count(',') + 1} packages to install, {loaded:.0f} MB were downloaded", flush=True)
                continue
            if sys.stdout.isatty() and found:
                print(f"    {found} packages found, {loaded:.0f} MB downloaded", end="\r", flush=True)
    return pip.returncode


def compile_packages() -> None:
    """Write the byte code of all packages, on all cores: where nothing else may write it, as in many containers, each
    process would compile what it imports. Packages' own tests are left out, and what is not of this Python fails."""
    command = [sys.executable, "-m", "compileall", "-qq", "-j", "0", "-x", "/site-packages/.*/tests/"]
    subprocess.run([*command, *{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}])


def set_up(target: str, extras: list[str]) -> None:
    """Install what is not there as it should be: the extras, what the kernel needs, and the project, editable.

    Args:
        target: for whom, in words.
    """
    if not PINS.is_file():
        sys.exit(
            f"There are no exact versions for this Python ({PINS.name}): remove .venv, and name another by PYTHON="
        )
    try:
        state = json.loads(STATE.read_text())
    except (OSError, ValueError):
        state = dict[str, Any](extras={}, project="")
    wanted = {name: digest(requirements(name), PINS) for name in ("", *extras)}
    project = digest(*(ROOT / name for name in COPIED))
    packages = not wanted.items() <= state["extras"].items()
    steps = [*(["packages", "compile"] if packages else []), *(["project"] if project != state["project"] else [])]
    if not steps:
        return
    start = time.monotonic()
    uses = "uv" if shutil.which("uv") else "pip"
    print(f"Setting up .venv for {target} with {uses}, once, in {len(steps)} steps:", flush=True)
    STATE.unlink(missing_ok=True)  # written when all is there
    for number, step in enumerate(steps, 1):
        if step == "packages":
            # With those that earlier targets have brought, so that new versions come to all of them.
            known = {"", *PROJECT["optional-dependencies"]} & state["extras"].keys()
            wanted |= {name: digest(requirements(name), PINS) for name in known}
            names = ", ".join(sorted(wanted.keys() - {""})) or "no extras"
            print(f"{number}/{len(steps)} packages of the kernel and of {names} ...", flush=True)
            asked = {each for name in wanted for each in requirements(name)}
            install(["--constraint", str(PINS), *sorted(asked)])
        elif step == "compile":
            print(f"{number}/{len(steps)} compiling them ...", flush=True)
            compile_packages()
        else:
            print(f"{number}/{len(steps)} monarch_kernel itself, editable ...", flush=True)
            install(["--quiet", "--no-deps", "--no-build-isolation", "--editable", "."])
    STATE.write_text(json.dumps({"extras": wanted if packages else state["extras"], "project": project}))
    print(
        f"Done in {time.monotonic() - start:.0f} s; what other targets need is added when they are called.", flush=True
    )


def main() -> None:
    """Command line: TARGET [EXTRA,...]."""
    parser = argparse.ArgumentParser(description="Install extras of this project, once, from exact versions.")
    parser.add_argument("target", help="for whom, in words")
    parser.add_argument("extras", nargs="?", default="", help="comma-separated")
    given = parser.parse_args()
    lock = os.open(sys.prefix, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # two targets may be made at a time
    set_up(given.target, [name for name in given.extras.split(",") if name])


if __name__ == "__main__":
    main()
