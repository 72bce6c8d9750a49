"""A kernel that differs from ipykernel's as Google Colab's does, for tests. `python tests/kernel/colab.py -f FILE`.

Written after the public source of googlecolab/colabtools: the shell and the kernel override what Colab's do, help and
completions are answered without `async` and without `omit_sections`, errors are sent by the shell itself, and displays
pass a hook. `google.colab` can be imported, as in Colab; nothing of Google's service is here.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from ipykernel.jsonutil import json_clean
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from IPython.utils.tokenutil import token_at_cursor


class Shell(ZMQInteractiveShell):  # type: ignore[misc]
    """Colab's shell."""

    def run_cell_magic(self, magic_name: str, line: str, cell: str) -> Any:
        """Run a cell magic; one with options and no body is allowed."""
        return super().run_cell_magic(magic_name, line, " " if line and not cell else cell)

    def system(self, cmd: str) -> None:
        """Run a command, with its output in the cell."""
        print(self.getoutput(cmd).nlstr)

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        hook: Any = self.displayhook
        content = {"traceback": stb, "ename": etype.__name__, "evalue": str(evalue)}
        hook.session.send(hook.pub_socket, "error", json_clean(content), hook.parent_header, ident=b"error")
        self._last_traceback = stb


class Kernel(IPythonKernel):  # type: ignore[misc]
    """Colab's kernel."""

    def _shell_class_default(self) -> Any:
        return Shell

    shell: Any
    session: Any

    def do_inspect(self, code: str, cursor_pos: int, detail_level: int = 0) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # as Colab's
        """Answer a request for help."""
        name = token_at_cursor(code, cursor_pos)
        info = self.shell.object_inspect(name)
        data = {"text/plain": self.shell.object_inspect_text(name, detail_level=detail_level)} if info["found"] else {}
        return {"status": "ok", "data": data, "metadata": {}, "found": info["found"]}

    async def inspect_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Answer a request for help, with the arguments that `do_inspect` takes."""
        content = parent["content"]
        reply = self.do_inspect(content["code"], content["cursor_pos"], content.get("detail_level", 0))
        self.session.send(stream, "inspect_reply", json_clean(reply), parent, ident)

    async def complete_request(self, stream: Any, ident: Any, parent: Any) -> None:
        """Answer a request for completions."""
        content = parent["content"]
        matches = json_clean(self.do_complete(content["code"], content["cursor_pos"]))
        self.session.send(stream, "complete_reply", matches, parent, ident)


def main() -> None:
    """Run the kernel."""
    for name in ("google", "google.colab"):
        sys.modules.setdefault(name, types.ModuleType(name))
    IPKernelApp.launch_instance(kernel_class=Kernel)


if __name__ == "__main__":
    main()
