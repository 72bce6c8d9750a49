"""Load the modules that run async actors, a fifth of everything that a rank may need.

Fork servers import this module for ranks that will probably have async actors.
"""

import monarch_kernel.runtime.actor.execution.async_instance  # noqa: F401  # pyright: ignore[reportUnusedImport]
