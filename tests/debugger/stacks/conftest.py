"""A kernel as in its own tests, and workers that stand for other hosts."""

from tests.kernel.conftest import jupyter_folders as jupyter_folders
from tests.kernel.conftest import kernel as kernel
from tests.workers import workers as workers
