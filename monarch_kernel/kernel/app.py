"""The kernel's application: what ``python -m monarch_kernel -f FILE`` runs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from ipykernel.kernelapp import IPKernelApp
from traitlets import Bool, Type

from monarch_kernel import environment
from monarch_kernel.aliases import enable_monarch_imports
from monarch_kernel.kernel.kernel import MonarchKernel


class MonarchKernelApp(IPKernelApp):
    """``IPKernelApp`` for ``MonarchKernel``. It keeps the name, so a user's IPython configuration applies."""

    kernel_class = Type(
        MonarchKernel,
        klass="ipykernel.kernelbase.Kernel",
        help="The kernel class to run.",
    ).tag(config=True)

    classes = [*IPKernelApp.classes, MonarchKernel]  # noqa: RUF012 - traitlets reads it from the class

    prefer_installed_monarch = Bool(
        False, help="Let `import monarch` find an installed torchmonarch, if there is one."
    ).tag(config=True)

    def init_kernel(self) -> None:
        """Make the kernel object. From here on, ``import monarch`` finds this package."""
        if environment.ENGINE.get() != "torchmonarch":  # there, it has to find Monarch itself
            enable_monarch_imports(prefer_installed=self.prefer_installed_monarch)
        super().init_kernel()

    def init_extensions(self) -> None:
        """Load the magics as an IPython extension, so that ``%load_ext`` and ``%reload_ext`` recognise them."""
        # IPython would continue after an extension fails to load, but a kernel without its magics must not start.
        assert self.shell is not None
        self.shell.extension_manager.load_extension("monarch_kernel")
        gc.freeze()  # what was loaded stays until the end: no collection looks at it again
        gc.enable()
        super().init_extensions()


def launch(argv: Sequence[str] | None = None) -> None:
    """Run the kernel until it receives a shutdown request.

    Args:
        argv: ipykernel's arguments, such as ``-f CONNECTION_FILE``; defaults to those of the process.
    """
    options: dict[str, Any] = {} if argv is None else {"argv": list(argv)}
    MonarchKernelApp.launch_instance(**options)
