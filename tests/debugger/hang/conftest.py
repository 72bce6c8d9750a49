"""Kernels for the tests that type into cells."""

from tests.kernel.conftest import jupyter_folders as jupyter_folders
from tests.kernel.conftest import kernel as kernel
