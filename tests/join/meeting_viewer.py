"""Runs lines of its standard input as a notebook's cells; prints what they show, or their errors, and a last line."""

import sys

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "monarch_kernel")
for line in sys.stdin:
    with capture_output() as shown:
        ran = shell.run_cell(line)
    outputs = [str(each.data.get("text/plain", "")) for each in shown.outputs]
    error = ran.error_in_exec or ran.error_before_exec
    print(
        shown.stdout,
        shown.stderr,
        *outputs,
        *([f"{type(error).__name__}: {error}"] if error else []),
        "--- done",
        sep="\n",
        flush=True,
    )
