"""Which modules a reload is for, as ``%autoreload`` and ``%aimport`` of IPython say it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec


class ModuleSelection(msgspec.Struct, array_like=True, frozen=True):
    """A mode of ``%autoreload``, with what ``%aimport`` has named. Names stand for one module each, as in IPython.

    Attributes:
        mode: "off" (0): no modules; "explicit" (1): those in ``included``; "all" (2, 3): all but those in ``excluded``.
        included: modules of ``%aimport NAME``.
        excluded: modules of ``%aimport -NAME``.
    """

    mode: str = "all"
    included: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    def wants(self, module: str) -> bool:
        """Whether a module is to be reloaded."""
        if self.mode == "explicit":
            return module in self.included
        return self.mode == "all" and module not in self.excluded


#: All modules.
EVERY = ModuleSelection()


def selection_of(mode: str | int, included: Iterable[str] = (), excluded: Collection[str] = ()) -> ModuleSelection:
    """The selection for what a user writes behind ``%autoreload``.

    Args:
        mode: "off", "now", "explicit", "all", "complete", or 0 to 3 ("" and "now" mean all modules, once). On ranks,
            "complete" is the same as "all": a module that is executed in place has its new names, too.
        included: the modules that ``%aimport`` named.
        excluded: the modules that ``%aimport -NAME`` named.

    Raises:
        ValueError: there is no such mode.
    """
    modes = {"0": "off", "off": "off", "1": "explicit", "explicit": "explicit"}
    modes |= dict.fromkeys(("", "now", "2", "all", "3", "complete"), "all")
    wanted = modes.get(str(mode).strip().lower())
    if wanted is None:
        raise ValueError(f"%autoreload has no mode {mode!r}: use off, explicit, all or complete (0 to 3)")
    return ModuleSelection(wanted, tuple(sorted(set(included))), tuple(sorted(set(excluded))))
