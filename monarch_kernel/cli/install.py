"""Make this environment known to Jupyter and shells: ``monarch-kernel install``, ``uninstall`` and ``completion``.

``install`` registers the kernel of this environment with Jupyter, and ``uninstall`` removes it. ``completion`` prints a
script that completes the commands of ``monarch-kernel`` in a shell.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence

from monarch_kernel.kernel.install import DISPLAY_NAME, KERNEL_NAME, InstallError, install, uninstall


def add_install_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``install``."""
    _add_place(parser)
    parser.add_argument("--display-name", help=f"name shown in Jupyter's launcher (default: {DISPLAY_NAME})")
    parser.set_defaults(run=_run_install)


def add_uninstall_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``uninstall``."""
    _add_place(parser)
    parser.set_defaults(run=_run_uninstall)


def _add_place(parser: argparse.ArgumentParser) -> None:
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="for the current user only")
    place.add_argument(
        "--sys-prefix", action="store_const", const=sys.prefix, dest="prefix", help="in this environment"
    )
    place.add_argument("--prefix", help="in PREFIX/share/jupyter")
    parser.add_argument("--name", default=KERNEL_NAME, help="the kernelspec's name (default: %(default)s)")


def _run_install(options: argparse.Namespace) -> int:
    try:
        place = install(options.user, options.prefix, options.name, options.display_name)
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Installed the kernelspec '{options.name}' in {place}")
    return 0


def _run_uninstall(options: argparse.Namespace) -> int:
    try:
        place = uninstall(options.user, options.prefix, options.name)
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Removed {place}")
    return 0


#: Shell scripts that call this program for completions. If it returns none, the shell completes file names.
_SCRIPTS = {
    "bash": """\
_monarch_kernel() {
  local IFS=$'\\n'
  COMPREPLY=($(monarch-kernel completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _monarch_kernel monarch-kernel
""",
    "zsh": """\
#compdef monarch-kernel
_monarch_kernel() {
  local -a found
  found=("${(@f)$(monarch-kernel completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  [[ -n "$found" ]] && compadd -a found || _files
}
compdef _monarch_kernel monarch-kernel
""",
}
_JOB_COMMANDS = ("status", "logs", "kill", "shell", "forward")


def add_completion_command(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``monarch-kernel completion``."""
    parser.description = (
        'Prints the completion script for monarch-kernel. In ~/.bashrc: eval "$(monarch-kernel '
        'completion bash)"; in ~/.zshrc, after compinit: eval "$(monarch-kernel completion zsh)".'
    )
    parser.add_argument(
        "shell", choices=[*_SCRIPTS, "words"], help="words: print the completions of the following words"
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="with words: the words after monarch-kernel")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.shell in _SCRIPTS:
        print(_SCRIPTS[options.shell], end="")
        return 0
    words = options.words or [""]
    found = {shlex.quote(each) for each in _candidates(words) if each.startswith(words[-1])}
    print("\n".join(sorted(found)))  # a shell inserts them into its line unchanged
    return 0


def _candidates(words: Sequence[str]) -> Iterable[str]:
    """Return the candidates for the last word, given the words before it."""
    from monarch_kernel.__main__ import command_parser, commands
    from monarch_kernel.launchers.host_request import add_provider_options, job_ids, provider_of, source_names

    if len(words) == 1:
        return commands()
    command, before, word = words[0], words[-2], words[-1]
    parser = command_parser(command)
    if parser is None or "--" in words[1:-1]:
        return ()
    on = provider_of(parser, words[1:-1])
    if command == "up" and on:
        add_provider_options(parser, on)
    options = {name: action for action in parser._actions for name in action.option_strings}
    action = options.get(before)
    if action is not None and action.nargs != 0:
        return job_ids() if before == "--job" else map(str, action.choices or ())
    if word.startswith("-"):
        return [name for name in options if name.startswith("--")]
    if command in _JOB_COMMANDS:
        return job_ids()
    return set(source_names()) - {"local", *job_ids()} if command == "up" and not on else ()
