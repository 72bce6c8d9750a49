"""Explain why the system denies this user access to the memory of a process, and the remedy."""

from __future__ import annotations

_PTRACE_SCOPE = "/proc/sys/kernel/yama/ptrace_scope"


def permission_remedy(who: str, verb: str, ptrace_scope: str | None = None) -> str:
    """Build a clause with the reason and the remedy.

    Args:
        who: the program that was denied access.
        verb: what it tried to do with the memory: "read", "write to".
        ptrace_scope: the value of that setting; by default that of this system.
    """
    scope = _ptrace_scope() if ptrace_scope is None else ptrace_scope
    if scope in ("1", "2", "3"):
        whom = {"1": "its ancestors and root", "2": "root only", "3": "no process"}[scope]
        what = (
            "an administrator can set it to 0 (sysctl kernel.yama.ptrace_scope=0)"
            if scope != "3"
            else "only a restart of the machine can change that"
        )
        return f"the system lets {whom} {verb} its memory (kernel.yama.ptrace_scope is {scope}); {what}"
    return (
        f"the system does not let {who} {verb} its memory; in a container, the capability SYS_PTRACE is missing "
        "(docker run --cap-add SYS_PTRACE, or securityContext.capabilities.add of a Pod)"
    )


def _ptrace_scope() -> str:
    try:
        with open(_PTRACE_SCOPE, encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # a kernel without Yama
        return ""
