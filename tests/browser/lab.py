"""JupyterLab in a real browser, with this checkout's kernel, and words for what a person does with it."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from monarch_kernel.kernel.install import KERNEL_NAME, install
from tests.conftest import alive, children, wait_until
from tests.waiting import end_jupyter, jupyter_url, patience

ROOT = Path(__file__).resolve().parents[2]
#: No test waits longer than this for one thing to appear (milliseconds).
PATIENCE = patience(30_000)

# Asking whether the kernel is idle, not the page: that one says so before there is a session at all.
_BOOK = "Array.from(window.jupyterapp?.shell.widgets('main') ?? []).find(each => each.context?.path === 'book.ipynb')"
_KERNEL = f"{_BOOK}?.sessionContext?.session?.kernel"
READY = f"() => {{ const k = {_KERNEL}; return k?.connectionStatus === 'connected' && k.status === 'idle' }}"


def browser_path() -> str:
    """A Chromium of this machine; on Debian as root it is installed first.

    Raises:
        LookupError: there is none; the sentence says what to do.
    """
    found = subprocess.run([str(Path(__file__).with_name("chromium.sh"))], capture_output=True, text=True)
    if found.returncode:
        raise LookupError(found.stderr.strip().splitlines()[-1])
    return found.stdout.strip()


def serve_panel(data: Path, config: Path) -> None:
    """Have a server of another environment find this checkout's panel, kernel and extension of the server.

    Args:
        data: a folder for JUPYTER_PATH.
        config: a folder of Jupyter's settings.
    """
    panel = data / "labextensions" / "monarch-kernel-lab"
    panel.parent.mkdir(parents=True)
    panel.symlink_to(ROOT / "labextension" / "prebuilt")
    install(prefix=str(data.parents[1]))
    enabled = config / "jupyter_server_config.d"
    enabled.mkdir(parents=True)
    shutil.copy(ROOT / "monarch_kernel" / "server" / "config" / "monarch_kernel.json", enabled)


class Server:
    """A server of its own, with nothing of the user's.

    Args:
        folder: its files, an empty one; notebooks and kernels are in its `work`.
        python: the interpreter of the server's environment; kernels run in that of the tests.
        base_url: the part of the address that all its pages have.
    """

    def __init__(self, folder: Path, python: Path = Path(sys.executable), base_url: str = "/") -> None:
        self.folder = folder
        self.token = secrets.token_hex(8)
        self.url = ""
        self._python = python
        self._base_url = base_url

    def __enter__(self) -> Server:
        folder, data, runtime = self.folder, self.folder / "prefix" / "share" / "jupyter", self.folder / "runtime"
        serve_panel(data, folder / "config")
        self.empty()
        # Else each page that is opened starts a node, to see whether JupyterLab is to be built anew.
        page = {"page_config_data": {"buildAvailable": False, "buildCheck": False}}
        settings = json.dumps({"ServerApp": {"tornado_settings": page}})
        (folder / "config" / "jupyter_server_config.json").write_text(settings)
        env = {
            **os.environ,
            "JUPYTER_PATH": str(data),
            "JUPYTER_PREFER_ENV_PATH": "0",
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(runtime),
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "JUPYTER_TOKEN": self.token,
            "IPYTHONDIR": str(folder / "ipython"),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        with (folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(str(self._python), "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.port=0"),
                    *("--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={folder / 'work'}"),
                    f"--ServerApp.base_url={self._base_url}",
                    *("--LabApp.expose_app_in_browser=True", "--JupyterNotebookApp.expose_app_in_browser=True"),
                    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
                ],
                env=env,
                cwd=folder,  # extensions of the server leave files there
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.url = jupyter_url(self._process, runtime, folder / "server.log")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._end()

    def empty(self) -> None:
        """Have no notebooks, files, settings and layouts but those that it begins with."""
        for name in ("work", "settings", "workspaces"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            (self.folder / name).mkdir()
        quiet = self.folder / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
        quiet.parent.mkdir(parents=True)
        quiet.write_text('{"checkForUpdates": false, "fetchNews": "false"}')

    def write(self, name: str, text: str) -> None:
        """Write a file into the folder of notebooks."""
        (self.folder / "work" / name).write_text(text)

    def end_kernels(self) -> None:
        """End its kernels, and wait until nothing is left of them."""
        for kernel in json.loads(self._ask("api/kernels")):
            self._ask(f"api/kernels/{kernel['id']}", "DELETE")
        wait_until(lambda: not children(self._process.pid), "all processes below its kernels have ended", 20)

    def _end(self) -> None:
        left = children(self._process.pid)
        end_jupyter(self._process)
        for pid in filter(alive, left):  # kernels of a test that has failed
            os.kill(pid, signal.SIGKILL)

    def _ask(self, path: str, method: str = "GET") -> str:
        request = urllib.request.Request(f"{self.url}{path}?token={self.token}", method=method)
        with urllib.request.urlopen(request, timeout=20) as reply:
            return str(reply.read().decode())


class Lab:
    """A notebook that is open in a page.

    Args:
        page: playwright's.
        server: whose notebook it is.
        url: where the browser finds the server, if a proxy stands before it.
    """

    def __init__(self, page: Any, server: Server, url: str = "") -> None:
        self.page = page
        self._server = server
        self._url = url or server.url
        self.folder = server.folder
        page.set_default_timeout(PATIENCE)

    def open(self, *cells: str, kernel: str = KERNEL_NAME, in_notebook_7: bool = False) -> None:
        """Open a new notebook with these cells, in JupyterLab or in Notebook 7, and wait for its kernel."""
        source = [
            {
                "cell_type": "code",
                "id": f"c{at}",
                "metadata": {},
                "outputs": [],
                "execution_count": None,
                "source": text,
            }
            for at, text in enumerate(cells)
        ]
        spec = {"name": kernel, "display_name": kernel, "language": "python"}
        notebook = {"cells": source, "metadata": {"kernelspec": spec}, "nbformat": 4, "nbformat_minor": 5}
        self._server.write("book.ipynb", json.dumps(notebook))
        if self._is_usable() and not in_notebook_7:
            open_book = "() => { window.jupyterapp.commands.execute('docmanager:open', { path: 'book.ipynb' }) }"
            self.page.evaluate(open_book)
        else:
            if self._server.token:  # else the browser has signed in, and must not forget it
                kept = {"origin": urljoin(self._url, "/").rstrip("/"), "storageTypes": "all"}
                self.page.context.new_cdp_session(self.page).send("Storage.clearDataForOrigin", kept)
            path = "notebooks/book.ipynb?" if in_notebook_7 else "lab/tree/book.ipynb?reset&"
            self.page.goto(f"{self._url}{path}token={self._server.token}")
            self.page.evaluate("usable => { window.usable = usable }", not in_notebook_7)
        self.page.wait_for_function(READY)

    def join(self) -> None:
        """Open the notebook that another page has opened, in a workspace of this page."""
        self.page.goto(f"{self._url}lab/workspaces/second/tree/book.ipynb?reset&token={self._server.token}")
        self.page.wait_for_function(f"() => {_KERNEL}?.connectionStatus === 'connected'")

    def _is_usable(self) -> bool:
        """Whether another notebook can be opened in the page: one that was loaded again may still restore the last."""
        return bool(self.page.evaluate("() => window.usable"))

    def clear(self) -> None:
        """Close all that is open, saved or not, and end the kernels."""
        if self._is_usable():
            self.page.evaluate(
                """() => {
                    const { shell } = window.jupyterapp;
                    Array.from(shell.widgets('main')).forEach(each => each.dispose());
                    shell.activateById('filebrowser');
                    shell.collapseRight();
                }"""
            )
        else:
            self.page.goto("about:blank")
        self._server.end_kernels()

    def is_shared(self) -> bool:
        """Whether several pages may share the notebook."""
        return bool(self.page.evaluate(f"() => {_BOOK}.model.collaborative"))

    def write(self, name: str, text: str = "") -> None:
        """Write a file where the notebook is."""
        self._server.write(name, text)

    def save(self) -> None:
        """Save the notebook."""
        self.page.evaluate(f"() => {_BOOK}.context.save()")

    def end_kernel(self) -> None:
        """Shut the kernel down; the notebook then has none."""
        self.page.evaluate(f"() => {_BOOK}.sessionContext.shutdown()")

    def reload(self) -> None:
        """Load the page again: the notebook as it was saved, with its kernel, or a new one if that has ended."""
        self.page.reload()
        self.page.wait_for_function(READY)

    def reload_without_kernel(self) -> None:
        """Load the page again as where the notebook's kernel is not installed, and choose none instead."""
        spec = {"name": "elsewhere", "display_name": "Elsewhere", "language": "elsewhere"}
        self.page.evaluate(f"spec => {_BOOK}.context.model.setMetadata('kernelspec', spec)", spec)
        self.page.evaluate(f"() => {_BOOK}.context.model.deleteMetadata('language_info')")
        self.save()
        self.page.reload()
        dialog = self.page.locator(".jp-Dialog")
        dialog.locator("select").select_option(label="No Kernel")
        dialog.get_by_role("button", name="Select Kernel").click()
        dialog.wait_for(state="detached")

    def trusts(self, at: int) -> bool:
        """Whether JupyterLab shows all of a cell's output, as the user's own."""
        return bool(self.page.evaluate(f"at => {_BOOK}.content.widgets[at].model.trusted", at))

    def second_notebook(self) -> str:
        """Open another notebook, with a kernel of its own; its path."""
        return str(
            self.page.evaluate(
                """async kernelName => {
                    const panel = await window.jupyterapp.commands.execute('notebook:create-new', {kernelName});
                    await panel.sessionContext.ready;
                    return panel.context.path;
                }""",
                KERNEL_NAME,
            )
        )

    def cell(self, at: int) -> Any:
        """A cell."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(at)

    def start(self, at: int) -> None:
        """Run a cell, and do not wait for its end."""
        self.page.evaluate(
            f"""at => {{
                const book = {_BOOK};
                window.jupyterapp.shell.activateById(book.id);
                book.content.activeCellIndex = at;
                window.cellEnded = false;
                window.jupyterapp.commands.execute('notebook:run-cell').then(() => {{ window.cellEnded = true }});
            }}""",
            at,
        )

    def beside(self, at: int) -> None:
        """Run a cell while another one runs, for whose end `done` still waits."""
        self.page.evaluate(
            f"""at => {{
                const book = {_BOOK};
                book.content.activeCellIndex = at;
                window.jupyterapp.commands.execute('notebook:run-cell');
            }}""",
            at,
        )

    def run_all(self, above: int) -> None:
        """Run all cells above one, and do not wait for their ends."""
        self.page.evaluate(
            f"""at => {{
                const book = {_BOOK};
                window.jupyterapp.shell.activateById(book.id);
                book.content.activeCellIndex = at;
                window.jupyterapp.commands.execute('notebook:run-all-above');
            }}""",
            above,
        )

    def answer(self, at: int, line: str) -> None:
        """Type a line into the prompt of a cell."""
        box = self.cell(at).locator(".jp-Stdin-input")
        box.wait_for()
        box.fill(line)
        box.press("Enter")

    def run(self, at: int) -> str:
        """Run a cell to its end; its output."""
        self.start(at)
        self.done()
        return self.output(at)

    def done(self) -> None:
        """Wait until the cell that was started has ended."""
        self.page.wait_for_function("() => window.cellEnded")

    def output(self, at: int) -> str:
        """All that a cell has put out, as text."""
        return "\n".join(self.cell(at).locator(".jp-OutputArea-output").all_inner_texts())

    def prints(self, at: int, pattern: str) -> None:
        """Wait until a cell's output matches."""
        self.cell(at).locator(".jp-OutputArea").filter(has_text=re.compile(pattern)).first.wait_for()

    # -- its debugger --------------------------------------------------------------------------------

    def debug(self, on: bool = True) -> None:
        """Press the bug button, which turns the debugger on or off, and wait until it is.

        While JupyterLab restores or stops a session it ignores the button, and shows a notebook as debugged, or not,
        too early. So the kernel is asked, too, and the button pressed again, as a person would.
        """
        panel = self.page.locator(".jp-NotebookPanel[data-jp-debugger=true]")

        def is_done() -> bool:
            return self.ask_debugger("mesh/state")["success"] == on == bool(panel.count())

        for _ in range(6):
            self.page.locator("jp-button.jp-DebuggerBugButton[aria-disabled=false]").first.click()
            with suppress(AssertionError):
                wait_until(is_done, "it is", 10)
                break
        else:
            raise AssertionError(f"the debugger is not {'on' if on else 'off'}")
        self.ask_debugger("threads")  # which is answered when all that was asked before is done

    def break_at(self, at: int, line: int) -> None:
        """Click into the gutter of a cell, at a line counted from 1."""
        gutter = self.cell(at).locator(".cm-breakpoint-gutter .cm-gutterElement")
        gutter.nth(line).click()  # the first element is a spacer

        def is_set() -> bool:
            known = self.ask_debugger("debugInfo")["body"]["breakpoints"]
            return any(each["line"] == line for of in known for each in of["breakpoints"])

        wait_until(is_set, f"the breakpoint in line {line} is set")

    def has_break(self, at: int, line: int) -> None:
        """Wait until the gutter of a cell shows a breakpoint at that line."""
        gutter = self.cell(at).locator(".cm-breakpoint-gutter .cm-gutterElement")
        gutter.nth(line).locator(".cm-breakpoint-icon").wait_for()

    def frames(self, wanted: str) -> list[str]:
        """Wait until the innermost frame is called so (a pattern); the call stack."""
        names = self.page.locator(".jp-DebuggerCallstackFrame-name")
        names.first.filter(has_text=re.compile(wanted)).wait_for()
        return list(names.all_inner_texts())

    def highlighted(self, at: int) -> int:
        """Wait until a line of a cell is lit up; which one, counted from 1."""
        self.cell(at).locator(".cm-line.jp-DebuggerEditor-highlight").wait_for()
        lines = self.cell(at).locator(".cm-line")
        marks = lines.evaluate_all("lines => lines.map(line => line.classList.contains('jp-DebuggerEditor-highlight'))")
        return int(marks.index(True)) + 1

    def lit(self, at: int, line: int) -> None:
        """Wait until that line of a cell is lit up."""
        self.cell(at).locator(f".cm-line:nth-child({line}).jp-DebuggerEditor-highlight").wait_for()

    def shows(self, name: str, value: str) -> None:
        """Wait until the side bar shows a variable with that value."""
        names = self.page.locator(".jp-DebuggerVariables-name").filter(has_text=re.compile(rf"^{name}$"))
        values = names.locator("xpath=following-sibling::*[contains(@class, 'jp-DebuggerVariables-detail')]")
        values.filter(has_text=re.compile(rf"^{value}$")).first.wait_for()

    def press(self, title: str) -> None:
        """Press a button of the call stack: Continue, Next, Step In, Step Out, Evaluate."""
        self.page.locator(f".jp-DebuggerSidebar [title^={title!r}]").first.click()

    def evaluate(self, expression: str) -> str:
        """Type an expression into the debugger's console, which the button "Evaluate Code" opens; its answer."""
        console = self.page.locator(".jp-DebugConsole")
        if not console.count():
            self.press("Evaluate Code")
        before = console.locator(".jp-OutputArea-output").count()
        prompt = console.locator(".jp-CodeConsole-promptCell .cm-content")

        def is_typed() -> bool:
            prompt.fill(expression)
            return prompt.inner_text() == expression

        # JupyterLab moves the keyboard to the cell of the frame that it shows, a moment after it shows it.
        wait_until(is_typed, f"{expression!r} is typed")
        self.page.evaluate("() => window.jupyterapp.commands.execute('debugger:run-in-console')")
        answer = console.locator(".jp-OutputArea-output").nth(before)
        answer.wait_for()
        return str(answer.inner_text())

    def ask_debugger(self, command: str, **arguments: Any) -> dict[str, Any]:
        """A debug request of the front end's, as an extension (or our panel) sends it."""
        return dict(
            self.page.evaluate(
                f"""async ([command, args]) => {{
                    const future = {_KERNEL}.requestDebug({{type: 'request', seq: 900, command, arguments: args}});
                    const reply = new Promise(resolve => {{ future.onReply = message => resolve(message.content) }});
                    await future.done;
                    return await reply;
                }}""",
                [command, arguments],
            )
        )

    def all_stopped(self, count: int) -> None:
        """Wait until so many ranks are stopped."""

        def are_stopped() -> bool:
            meshes = self.ask_debugger("mesh/state")["body"]["meshes"]
            return sum(rank["state"] == "stopped" for mesh in meshes for rank in mesh["ranks"]) == count

        wait_until(are_stopped, f"{count} ranks are stopped")
