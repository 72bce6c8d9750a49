"""``monarch-kernel doctor``: report which parts are installed and usable here, and how to add the others.

It describes the environment and the machine that it runs on. It reads metadata of packages, configuration files of
Jupyter, and device files, and imports neither torch nor a provider's package. It also runs in a server's environment
that has only ``pip install --no-deps monarch_kernel``, so it imports at the top nothing that is not always there.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import glob
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from monarch_kernel._version import __version__

PACKAGE = "monarch_kernel"
PANEL = "monarch-kernel-lab"
SERVER_EXTENSION = "monarch_kernel.server"
#: The extensions of the page that show widgets, and those made with anywidget. The package ``anywidget`` brings both.
WIDGET_EXTENSIONS = ("@jupyter-widgets/jupyterlab-manager", "anywidget")
#: The packages that the server extension imports, and that a Jupyter server does not bring.
SERVER_PACKAGES = ("msgspec", "watchfiles")
#: The width up to which a list of names is shown (characters).
_WIDTH = 90


class Presence(enum.StrEnum):
    """The state of a part."""

    OK = "ok"
    """It is usable."""
    MISSING = "missing"
    """It is not installed; ``command`` adds it."""
    BROKEN = "broken"
    """It is installed, and cannot be used."""
    NONE = "none"
    """This machine does not have it, and no package would help: a GPU, an RDMA card, the commands of a cluster."""
    ELSEWHERE = "elsewhere"
    """It belongs into the environment of the Jupyter server, which is another one."""


@dataclass(frozen=True)
class PartReport:
    """A part, and what was found of it.

    Attributes:
        name: the name on the command line.
        state: its state.
        text: what was found, or what is missing; one clause.
        command: the command that adds, mends or extends it; "": there is nothing to do, or no command does it.
        required: whether the exit status depends on it when no part is named.
    """

    name: str
    state: Presence
    text: str
    command: str = ""
    required: bool = False


@dataclass(frozen=True)
class Provider:
    """What a provider of hosts needs on this machine.

    Attributes:
        packages: distributions of which one must be installed.
        programs: programs of which one must be in PATH, if no distribution is.
        hint: where these programs come from.
    """

    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    hint: str = ""


#: By the name of the launcher; for packages, the extra has the same name.
PROVIDERS = {
    "kubernetes": Provider(packages=("kubernetes",)),
    "lightning": Provider(packages=("lightning-sdk",)),
    "ray": Provider(packages=("ray",)),
    "sky": Provider(packages=("skypilot", "skypilot-nightly"), programs=("sky",)),
    "slurm": Provider(programs=("sbatch",), hint="run on a login node of the cluster, or add Slurm's commands to PATH"),
    "ssh": Provider(programs=("ssh",), hint="install OpenSSH's client with the package manager of the system"),
}


def add_doctor_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        f"parts: {', '.join(_CHECKS)}\n"
        "server means what a Jupyter server needs, providers all providers of hosts.\n\n"
        "Exit status: 0 if the kernel, and the parts of the Jupyter server if one is installed here, are usable; with\n"
        "parts named, if these are; 1 otherwise."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="check only these parts, and require them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    names: list[str] = []
    for name in options.parts:
        if name not in _CHECKS and name not in _GROUPS:
            near = difflib.get_close_matches(name, [*_CHECKS, *_GROUPS], 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join([*_CHECKS, *_GROUPS])}"
            print(f"monarch-kernel doctor: there is no part {name!r}; {hint}", file=sys.stderr)
            return 2
        names += _GROUPS.get(name, (name,))
    parts = examine(names or None)
    failed = [part for part in parts if part.state is not Presence.OK and (part.required or names)]
    if options.json:
        about = {"version": __version__, "python": sys.version.split()[0], "prefix": sys.prefix, "ok": not failed}
        print(json.dumps({**about, "parts": [asdict(part) for part in parts]}, indent=1))
    else:
        print("\n".join(_lines(parts)))
    return 1 if failed else 0


def examine(names: Iterable[str] | None = None) -> list[PartReport]:
    """Check parts, by default all of them, in a fixed order."""
    chosen = _CHECKS if names is None else {name: _CHECKS[name] for name in _CHECKS if name in set(names)}
    return [check(name) for name, check in chosen.items()]


def _lines(parts: list[PartReport]) -> Iterator[str]:
    yield f"monarch_kernel {__version__}, Python {sys.version.split()[0]} at {sys.prefix}"
    yield ""
    width = max(len(part.name) for part in parts)
    status = max(len(part.state) for part in parts)
    for part in parts:
        yield f"{part.name:{width}}  {part.state:{status}}  {part.text}"
        if part.command:
            yield f"{'':{width}}  {'':{status}}  → {part.command}"


# -- the kernel -----------------------------------------------------------------------------------------


def _kernel(name: str) -> PartReport:
    try:
        lacking = _lacking()
    except metadata.PackageNotFoundError:
        text = "this checkout is not installed in this environment, so Jupyter and ranks may not find it"
        return PartReport(name, Presence.BROKEN, text, f"{_install()} PATH_OF_THE_CHECKOUT", True)
    if lacking:
        text = f"it cannot run in this environment, which lacks {_listed(lacking)}"
        return PartReport(name, Presence.MISSING, text, _pip_install(), True)
    return PartReport(name, Presence.OK, "all packages that it needs are installed", required=True)


def _lacking() -> list[str]:
    """Return the unmet requirements of the kernel, without those of extras.

    Raises:
        PackageNotFoundError: this package is not installed, so its requirements are unknown.
    """
    requirements = metadata.requires(PACKAGE) or []
    try:
        from packaging.requirements import Requirement
    except ImportError:  # then names are all that can be compared
        names = [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in requirements if "extra ==" not in each]
        return [each for each in names if not _version(each)]
    lacking: list[str] = []
    for each in map(Requirement, requirements):
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        version = _version(each.name)
        if not version:
            lacking.append(each.name)
        elif not each.specifier.contains(version, prereleases=True):
            lacking.append(f"{each.name}{each.specifier} (it has {version})")
    return lacking


def _kernelspec(name: str) -> PartReport:
    if not _version("jupyter-client"):
        return PartReport(
            name, Presence.MISSING, "jupyter-client is not installed, so no kernel is registered", _pip_install()
        )
    from jupyter_client.kernelspec import KernelSpecManager

    specs: dict[str, dict[str, Any]] = KernelSpecManager().get_all_specs()
    ours = {each: found for each, found in specs.items() if PACKAGE in found["spec"].get("argv", [])}
    runs: dict[str, str] = {each: _interpreter(found["spec"]["argv"][0]) for each, found in ours.items()}
    here = [each for each, python in runs.items() if python and _same_prefix(python)]
    gone = [each for each, python in runs.items() if not python]
    others = [f"{each} ({python})" for each, python in runs.items() if python and each not in here]
    if gone:
        text = f"{gone[0]} is registered with an interpreter that does not exist: {ours[gone[0]]['spec']['argv'][0]}"
        return PartReport(name, Presence.BROKEN, text, _install_spec("--user", gone[0]), True)
    if _kernel("kernel").state is Presence.MISSING:  # this environment is that of a server
        if here:
            text = f"{here[0]} cannot run in this environment, and hides a kernel that you register by the same name"
            place = "--sys-prefix" if _is_inside(ours[here[0]]["resource_dir"], sys.prefix) else "--user"
            return PartReport(name, Presence.BROKEN, text, _install_spec(place, here[0], "uninstall"), True)
        if others:
            return PartReport(name, Presence.OK, f"registered for other environments: {_listed(others)}", required=True)
        text = "none is registered; this command does it, in the environment of the kernel"
        return PartReport(name, Presence.MISSING, text, "monarch-kernel install --user", True)
    if not here:
        text = f"registered only for other environments: {_listed(others)}" if others else "no kernel is registered"
        return PartReport(name, Presence.MISSING, text, "monarch-kernel install --sys-prefix", True)
    text = f"registered as {_listed(here)} in {ours[here[0]]['resource_dir']}"
    if _has_server() or not all(_is_inside(ours[each]["resource_dir"], sys.prefix) for each in here):
        return PartReport(name, Presence.OK, text, required=True)
    text += "; a Jupyter server in another environment does not see it"
    return PartReport(name, Presence.OK, text, "monarch-kernel install --user", True)


def _install_spec(place: str, name: str, verb: str = "install") -> str:
    return f"monarch-kernel {verb} {place}" + ("" if name == "monarch" else f" --name {shlex.quote(name)}")


def _interpreter(command: str) -> str:
    """Return the interpreter that Jupyter of this environment would start; "" if there is none."""
    if re.fullmatch(r"python(\d(\.\d+)?)?", command):  # jupyter_client replaces it by its own
        return sys.executable
    return shutil.which(command) or ""


def _same_prefix(python: str) -> bool:
    """Return whether an interpreter belongs to this environment: they may be links to one program."""
    folder = os.path.realpath(os.path.dirname(os.path.abspath(python)))
    return folder == os.path.realpath(os.path.dirname(os.path.abspath(sys.executable)))


# -- the Jupyter server -----------------------------------------------------------------------------------


def _server(name: str) -> PartReport:
    if not _has_server():
        text = "there is none in this environment; in its own environment, this command adds the panel"
        command = f"python -m pip install --no-deps {PACKAGE} {' '.join(SERVER_PACKAGES)}"
        return PartReport(name, Presence.ELSEWHERE, text, command)
    versions = {each: _version(each) for each in ("jupyter-server", "jupyterlab", "notebook")}
    text = ", ".join(f"{each} {version}" for each, version in versions.items() if version)
    return PartReport(name, Presence.OK, text, required=True)


def _panel(name: str) -> PartReport:
    page = _page()
    if page is None:
        return _page_is_elsewhere(name)
    extension = page.get(PANEL)
    if extension is None:
        return PartReport(
            name, Presence.MISSING, "the page has none", _pip_install("--no-deps", "--force-reinstall"), True
        )
    if extension.version.replace("-", ".") != __version__:
        text = (
            f"the page has that of version {extension.version or 'unknown'} in {extension.folder}, and not that of "
            f"monarch_kernel {__version__}: remove this folder, by uninstalling what it came with"
        )
        return PartReport(name, Presence.BROKEN, text, "", True)
    if extension.disabled:
        return PartReport(name, Presence.BROKEN, "it is disabled", _enable(extension), True)
    return PartReport(name, Presence.OK, f"version {__version__}", required=True)


def _server_extension(name: str) -> PartReport:
    if not _has_server():
        return _page_is_elsewhere(name)
    file, enabled = _server_setting()
    if not file:
        text = "no configuration of the server names it, so kept meshes are not listed"
        return PartReport(name, Presence.MISSING, text, _pip_install("--no-deps", "--force-reinstall"), True)
    if not enabled:
        text = f"it is disabled in {file}, so kept meshes are not listed"
        user = not _is_inside(file, sys.prefix)
        enable = f"jupyter server extension enable {'--user' if user else '--sys-prefix'} {SERVER_EXTENSION}"
        # That command writes to this folder. What the file beside the folder says has precedence.
        return PartReport(name, Presence.BROKEN, text, enable if os.path.dirname(file).endswith(".d") else "", True)
    try:
        import_module(f"{SERVER_EXTENSION}.routes")
    except ImportError as error:
        text = f"it cannot be loaded, so kept meshes are not listed: {error}"
        lacks = error.name is not None and error.name.partition(".")[0] in SERVER_PACKAGES
        return PartReport(
            name, Presence.BROKEN, text, _pip_install(*SERVER_PACKAGES) if lacks else _pip_install(), True
        )
    return PartReport(name, Presence.OK, "enabled; it lists kept meshes", required=True)


def _server_setting() -> tuple[str, bool]:
    """Return the file that decides whether a server loads the extension, and its decision; "": there is none."""
    from jupyter_core.paths import jupyter_config_path

    section = "jupyter_server_config"
    for folder in jupyter_config_path():  # the order in which a server lets one override the next
        inside = sorted(glob.glob(os.path.join(glob.escape(folder), f"{section}.d", "*.json")), reverse=True)
        for file in (os.path.join(folder, f"{section}.json"), *inside):
            try:
                with open(file, encoding="utf-8") as opened:
                    enabled = json.load(opened)["ServerApp"]["jpserver_extensions"][SERVER_EXTENSION]
            except (OSError, ValueError, LookupError, TypeError):
                continue
            return file, bool(enabled)
    return "", False


def _widget_manager(name: str) -> PartReport:
    page = _page()
    if page is None:
        return _page_is_elsewhere(name)
    missing = [each for each in WIDGET_EXTENSIONS if each not in page]
    if missing:
        text = f"live views in cells stay tables, because the page lacks {_listed(missing)}"
        return PartReport(name, Presence.MISSING, text, f"{_install()} anywidget", True)
    for each in WIDGET_EXTENSIONS:
        if page[each].disabled:
            text = f"live views in cells stay tables, because {each} is disabled"
            return PartReport(name, Presence.BROKEN, text, _enable(page[each]), True)
    text = ", ".join(f"{each} {page[each].version}" for each in WIDGET_EXTENSIONS)
    return PartReport(name, Presence.OK, text, required=True)


@dataclass(frozen=True)
class _Extension:
    """An extension of the page.

    Attributes:
        folder: where its files are.
        disabled: the name by which a configuration disables it, or one of its plugins; "": it is enabled.
    """

    version: str
    folder: str
    disabled: str


def _page() -> dict[str, _Extension] | None:
    """Return the prebuilt extensions of the page of JupyterLab or Notebook 7; None: neither is installed here."""
    if not _has_server() or find_spec("jupyterlab_server") is None:
        return None
    from jupyter_core.paths import jupyter_path
    from jupyterlab_server.config import get_federated_extensions, get_page_config  # pyright: ignore[reportMissingImports]

    folders = jupyter_path("labextensions")
    settings = os.path.join(sys.prefix, "share", "jupyter", "lab", "settings")
    disabled: list[str] = get_page_config(folders, settings).get("disabledExtensions", [])
    page: dict[str, _Extension] = {}
    for name, found in get_federated_extensions(folders).items():
        by = next((each for each in disabled if each == name or each.startswith(f"{name}:")), "")
        page[name] = _Extension(str(found.get("version", "")), str(found.get("ext_path", "")), by)
    return page


def _enable(extension: _Extension) -> str:
    """Return the command that enables an extension of the page, in the configuration that has precedence."""
    return (
        f"jupyter labextension enable --level={'sys_prefix' if _environment_first() else 'user'} {extension.disabled}"
    )


def _environment_first() -> bool:
    """Return whether the configuration of the environment has precedence over that of the user."""
    from jupyter_core.paths import prefer_environment_over_user

    return prefer_environment_over_user()


def _page_is_elsewhere(name: str) -> PartReport:
    return PartReport(
        name, Presence.ELSEWHERE, "run 'monarch-kernel doctor server' in the environment of the Jupyter server"
    )


def _has_server() -> bool:
    return bool(_version("jupyter-server"))


# -- devices ----------------------------------------------------------------------------------------------


def _torch(name: str) -> PartReport:
    from monarch_kernel.runtime.host.devices import nvidia_gpus

    version = _version("torch")
    if not version:
        return PartReport(
            name, Presence.MISSING, "it is not installed; only tensors and --dist need it", _extra("torch")
        )
    if "+cpu" in version and nvidia_gpus():
        text = (
            f"{version} is a build for CPUs, and this machine has GPUs: install a build for CUDA, as pytorch.org says"
        )
        return PartReport(name, Presence.BROKEN, text)
    return PartReport(name, Presence.OK, version)


def _gpu(name: str) -> PartReport:
    from monarch_kernel.runtime.host.devices import devices_here, nvidia_gpus

    found = devices_here()
    if found is None:
        return PartReport(name, Presence.NONE, "this machine has no GPU of NVIDIA or AMD whose driver is loaded")
    if not found.names:
        return PartReport(name, Presence.NONE, f"{found.variable} hides all GPUs from this process")
    text = f"{len(found.names)} ({found.variable}={','.join(found.names)})"
    if nvidia_gpus() and not _version("nvidia-ml-py"):
        return PartReport(
            name, Presence.MISSING, f"{text}; how busy they are is not shown without nvidia-ml-py", _extra("gpu")
        )
    return PartReport(name, Presence.OK, text)


def _rdma(name: str) -> PartReport:
    if not _version("msgspec"):
        return PartReport(
            name, Presence.MISSING, "it is not checked, because the kernel cannot run in this environment"
        )
    from monarch_kernel.runtime.transfer.verbs.card import find_ports

    ports = find_ports()
    cards = ", ".join(f"{port.device}:{port.number} ({port.rate:g} Gb/s)" for port in ports)
    version = _version("pyverbs")
    if not ports:
        return PartReport(
            name, Presence.NONE, "this machine has no InfiniBand or RoCE card with an active port; TCP is used"
        )
    if not version:
        return PartReport(name, Presence.MISSING, f"{cards}; without pyverbs, TCP is used", _extra("rdma"))
    return PartReport(name, Presence.OK, f"{cards}, pyverbs {version}")


# -- providers --------------------------------------------------------------------------------------------


def _provider(name: str) -> PartReport:
    needs = PROVIDERS[name]
    for package in needs.packages:
        if version := _version(package):
            return PartReport(name, Presence.OK, f"{package} {version}")
    for program in needs.programs:
        if path := shutil.which(program):
            return PartReport(name, Presence.OK, f"the command {program} at {path}")
    programs = " or ".join(needs.programs)
    if not needs.packages:
        return PartReport(name, Presence.NONE, f"there is no command {programs} in PATH: {needs.hint}")
    text = f"{needs.packages[0]} is not installed" + (f", and there is no command {programs}" if programs else "")
    return PartReport(name, Presence.MISSING, text, _extra(name))


# -- packages and commands ----------------------------------------------------------------------------------


def _version(package: str) -> str:
    """Return the version of an installed distribution; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _install() -> str:
    """Return the beginning of a command that installs packages into this environment."""
    python = shlex.quote(sys.executable)
    return f"{python} -m pip install" if find_spec("pip") is not None else f"uv pip install --python {python}"


def _pip_install(*arguments: str) -> str:
    """Return the command that installs these packages, or with options alone, this version of this package."""
    packages = [] if any(not each.startswith("-") for each in arguments) else [f"{PACKAGE}=={__version__}"]
    return " ".join([_install(), *arguments, *packages])


def _extra(name: str) -> str:
    return f"{_install()} '{PACKAGE}[{name}]'"


def _listed(names: Iterable[str]) -> str:
    """List names, up to a limit of length."""
    names = list(names)
    shown: list[str] = []
    for each in names:
        if shown and len(", ".join([*shown, each])) > _WIDTH:
            return f"{', '.join(shown)} and {len(names) - len(shown)} more"
        shown.append(each)
    return ", ".join(shown)


def _is_inside(path: str, folder: str) -> bool:
    return os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep)


_CHECKS: dict[str, Callable[[str], PartReport]] = {
    "kernel": _kernel,
    "kernelspec": _kernelspec,
    "jupyter": _server,
    "panel": _panel,
    "server-extension": _server_extension,
    "widget-manager": _widget_manager,
    "torch": _torch,
    "gpu": _gpu,
    "rdma": _rdma,
    **dict.fromkeys(PROVIDERS, _provider),
}
_GROUPS = {
    "server": ("kernelspec", "jupyter", "panel", "server-extension", "widget-manager"),
    "providers": tuple(PROVIDERS),
}
