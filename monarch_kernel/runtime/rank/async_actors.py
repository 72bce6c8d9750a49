"""Loads what runs async actors, a fifth of what a rank may need: fork servers import this module for ranks that will
probably have some."""

import monarch_kernel.runtime.actor.execution.async_instance  # noqa: F401  # pyright: ignore[reportUnusedImport]
