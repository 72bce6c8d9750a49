"""The public conformance suite for Jupyter kernels, with everything that a Python kernel can do turned on."""

from __future__ import annotations

from typing import ClassVar

import jupyter_kernel_test
import pytest

from tests.kernel import harness


class Started:
    """Tests of the suite, on a kernel that the harness starts."""

    connected = True
    """Whether the tests begin with a client that is connected."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.kernel = harness.start_kernel() if cls.connected else harness.launch_kernel()
        cls.km, cls.kc = cls.kernel.manager, cls.kernel.client

    @classmethod
    def tearDownClass(cls) -> None:
        harness.stop_kernel(cls.kernel)


@pytest.mark.usefixtures("jupyter_folders")
class TestMonarchKernel(Started, jupyter_kernel_test.KernelTests):
    """What any front end may ask of any kernel."""

    language_name = "python"
    file_extension = ".py"

    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('to stderr', file=sys.stderr)"
    code_page_something = "zip?"
    code_generate_error = "raise ValueError('on purpose')"
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output; clear_output()"

    completion_samples: ClassVar = [
        {"text": "zi", "matches": {"zip"}},
        {"text": "from functools import redu", "matches": {"reduce"}},
        {"text": "%capt", "matches": {"%%capture"}},
    ]
    complete_code_samples: ClassVar = [
        "1",
        "print('hello, world')",
        "def f(x):\n  return x*2\n\n\n",
        "%%capture\nx\n\n",
    ]
    incomplete_code_samples: ClassVar = ["print('''hello", "def f(x):\n  x*2", "for i in range(3):"]
    invalid_code_samples: ClassVar = ["import = 7q", "print('unclosed)"]

    code_execute_result: ClassVar = [
        {"code": "6*7", "result": "42"},
        {"code": "'a' + 'b'", "result": "'ab'"},
        {"code": "await __import__('asyncio').sleep(0, 7)", "result": "7"},
        {
            "code": "class Rich:\n    def _repr_html_(self): return '<b>rich</b>'\nRich()",
            "mime": "text/html",
            "result": "<b>rich</b>",
        },
    ]
    code_display_data: ClassVar = [
        {"code": "from IPython.display import HTML, display; display(HTML('x'))", "mime": "text/html"},
        {"code": "from IPython.display import Math, display; display(Math('1/2'))", "mime": "text/latex"},
        {"code": "display({'application/json': {'a': 1}}, raw=True)", "mime": "application/json"},
    ]
    code_history_pattern = "6?7*"
    supported_history_operations = ("tail", "range", "search")


@pytest.mark.usefixtures("jupyter_folders")
class TestWelcome(Started, jupyter_kernel_test.IopubWelcomeTests):
    """A subscriber is welcomed before anything is published, so that nothing it wants is lost."""

    connected = False
    support_iopub_welcome = True
