"""The public names of the installed torchmonarch, one module a line: ``python tests/parity/list_names.py``.

A module's names are its ``__all__``, or those without an underscore that it defines. Modules of its tests, its private
modules and those that cannot be imported here are left out.
"""

import importlib
import pkgutil
import warnings


def names_of(module):
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    return sorted(set(listed))


def walk(name):
    last = name.rpartition(".")[2]
    if last.startswith(("_", "test")) or last.endswith(("_test", "mock_cuda")):
        return
    try:
        module = importlib.import_module(name)
    except Exception:
        return
    print("=", name, *names_of(module))
    for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        walk(f"{name}.{info.name}")


warnings.simplefilter("ignore")
walk("monarch")
