"""Kernels for the tests that are front ends."""

from tests.kernel.conftest import bell as bell
from tests.kernel.conftest import jupyter_folders as jupyter_folders
from tests.kernel.conftest import start_kernel as start_kernel
from tests.otheruser import other_user as other_user
from tests.workers import workers as workers
