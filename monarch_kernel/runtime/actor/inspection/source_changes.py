"""News of changed sources: a tool that reloads them tells the tools that show lines of them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from monarch_kernel.subscriptions import Subscribers, Subscription

_changed: Subscribers[[Collection[str]]] = Subscribers("a callback on changed sources")


def on_sources_changed(callback: Callable[[Collection[str]], object]) -> Subscription:
    """Call ``callback(paths)``, with paths of this controller, after ranks have loaded new versions of sources."""
    return _changed.subscribe(callback)


def sources_changed(paths: Collection[str]) -> None:
    """Tell that ranks run new versions of these sources (paths of this controller) from now on."""
    _changed.notify(paths)
