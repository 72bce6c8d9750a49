"""VS Code's Jupyter extension as a kernel sees it: its messages, in its order.

Written after the public sources of microsoft/vscode-jupyter and microsoft/vscode (2022 to 2025), whose code is not
copied. VS Code itself does not run here.
"""

from __future__ import annotations

import time
from typing import Any

from tests.kernel.harness import PATIENCE, Cell, Kernel, Outcome

NOTEBOOK = "/mnt/alice/train.ipynb"
#: What VS Code sets for the kernels that it starts, and what its own processes have.
ENVIRONMENT = {
    "PYDEVD_IPYTHON_COMPATIBLE_DEBUGGING": "1",
    "VSCODE_PID": "4711",
    "VSCODE_CWD": "/mnt/alice",
    "VSCODE_NLS_CONFIG": '{"locale":"en"}',
    "VSCODE_IPC_HOOK": "/run/user/1000/vscode-main.sock",
    "ELECTRON_RUN_AS_NODE": "1",
}
#: How the extension runs a cell of the user, and code of its own. It calls the second "silent"; its output is read.
_VISIBLE: dict[str, Any] = {"store_history": True, "allow_stdin": True, "stop_on_error": False}
_HIDDEN: dict[str, Any] = {**_VISIBLE, "store_history": False}
#: Printed before the version of ipywidgets, to find it among other output.
_MARK = "e976ee50-99ed-4aba-9b6b-9dcd5634d07d:IPyWidgets:"


class Window:
    """A notebook in a window of VS Code, with a kernel.

    Attributes:
        cells: the texts of the code cells.
    """

    def __init__(self, kernel: Kernel, *cells: str) -> None:
        self.kernel = kernel
        self.cells = list(cells)
        self._threads = 0

    def uri(self, index: int) -> str:
        """VS Code's name of a cell, which it also sends as the `cellId` in the metadata of a request."""
        return f"vscode-notebook-cell:{NOTEBOOK}#W{index}sZmlsZQ%3D%3D"

    def open(self) -> dict[str, Any]:
        """Send what is sent to a new kernel. Return the kernel's description, for which VS Code asks last."""
        self._info()
        version = self.hidden(
            "try:\n"
            "    import ipywidgets as _VSCODE_ipywidgets\n"
            f'    print("{_MARK}" + _VSCODE_ipywidgets.__version__)\n'
            "    del _VSCODE_ipywidgets\n"
            "except:\n"
            "    pass"
        )
        assert version.stdout.startswith(f"{_MARK}8."), version
        started = self.hidden(
            "import os as __VSCODE_os\n"
            '__VSCODE_os.environ["PYDEVD_IPYTHON_COMPATIBLE_DEBUGGING"] = "1"\n'
            "del __VSCODE_os\n"
            f'__vsc_ipynb_file__ = "{NOTEBOOK}"\n'
            "%config Completer.use_jedi = False\n"
            "try:\n"
            "    import matplotlib\n"
            "    %matplotlib inline\n"
            "    matplotlib.rcParams.update({'figure.figsize': (6.0, 4.0)})\n"
            "    %config InlineBackend.figure_formats = {'svg', 'png'}\n"
            "except:\n"
            "    pass"
        )
        assert (started.stdout, started.stderr, started.displays) == ("", "", []), started
        return self._info()

    def _info(self) -> dict[str, Any]:
        return self.ask("kernel_info_request", {})

    def ask(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        """Send a request on the shell channel, and return the content of the reply."""
        client = self.kernel.client
        message = client.session.msg(kind, content)
        client.shell_channel.send(message)
        while True:
            reply = client.get_shell_msg(timeout=PATIENCE)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return dict(reply["content"])

    def start(self, index: int) -> Cell:
        """Start a cell of the notebook."""
        metadata = {"cellId": self.uri(index), "tags": ["train"]}
        return self.kernel.send(self.cells[index], metadata=metadata, **_VISIBLE)

    def run(self, code: str) -> Outcome:
        """Append a cell to the notebook, and run it."""
        self.cells.append(code)
        return self.start(len(self.cells) - 1).wait()

    def ok(self, code: str) -> Outcome:
        """Append a cell that must succeed, and run it."""
        self.cells.append(code)
        return self.start(len(self.cells) - 1).ok()

    def send_hidden(self, code: str) -> Cell:
        """Start code of the extension's own."""
        return self.kernel.send(code, **_HIDDEN)

    def hidden(self, code: str) -> Outcome:
        """Run code of the extension's own."""
        return self.send_hidden(code).wait()

    def background(self, *lines: str) -> Any:
        """Run the body of a function in a thread of the kernel; return its value, which an update of a display carries.

        Completions, help and the list of variables are asked for in this way.
        """
        self._threads += 1
        mime = f"application/vnd.vscode.bg.execution.{self._threads}"
        body = "\n".join(f"        {line}" for text in lines for line in text.split("\n"))
        cell = self.send_hidden(
            "def __jupyter_exec_background__():\n"
            "    from IPython.display import display\n"
            "    from threading import Thread\n"
            "    from traceback import format_exc\n"
            f"    output = display({{'{mime}': ''}}, raw=True, display_id=True)\n"
            f"    def work():\n{body}\n"
            "    def main():\n"
            "        try:\n"
            f"            output.update({{'{mime}.result': work()}}, raw=True)\n"
            "        except Exception:\n"
            f"            output.update({{'{mime}.error': format_exc()}}, raw=True)\n"
            "    Thread(target=main, daemon=True).start()\n"
            "__jupyter_exec_background__()\n"
            "del __jupyter_exec_background__"
        )
        found = self._update(cell, mime)
        assert f"{mime}.result" in found, found
        return found[f"{mime}.result"]

    def _update(self, cell: Cell, mime: str) -> dict[str, Any]:
        """Return the data of the update, which may arrive before or after the end of the request, for any parent."""
        display, found, idle = "", {}, False
        deadline = time.monotonic() + PATIENCE
        while not (found and idle):
            assert time.monotonic() < deadline, f"no answer for {mime}; idle: {idle}"
            message = self.kernel.client.get_iopub_msg(timeout=PATIENCE)
            kind, content = message["msg_type"], message["content"]
            ours = message["parent_header"].get("msg_id") == cell.msg_id
            if kind == "display_data" and ours:
                assert list(content["data"]) == [mime], content
                display = content["transient"]["display_id"]
            elif kind == "update_display_data" and display and content["transient"].get("display_id") == display:
                found = content["data"]
            elif kind in ("stream", "error") and ours:
                raise AssertionError(f"hidden code showed {content}")
            elif kind == "status" and ours:
                idle = content["execution_state"] == "idle"
        while self.kernel.client.get_shell_msg(timeout=PATIENCE)["parent_header"].get("msg_id") != cell.msg_id:
            pass
        return found
