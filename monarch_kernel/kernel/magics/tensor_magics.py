"""`%mesh plan`, `%mesh watch` and `%mesh memory`: tensors on meshes."""

from __future__ import annotations

from typing import Any

from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.kernel.magics.arguments import Arguments, OptionsAt, text_argument
from monarch_kernel.kernel.magics.subcommands import Subcommands
from monarch_kernel.kernel.magics.tensor_names import handle_named
from monarch_kernel.kernel.usage_errors import usage_error


class TensorMagics(Subcommands):
    """What tensors on meshes cost, where they go wrong, and what memory they take."""

    _watch: Any = None  # of this process

    @magic_arguments("mesh plan")
    @argument("what", nargs="?", choices=("on", "off", "clear"), help="on and off: below each cell; clear: count anew")
    def plan(self, found: Arguments) -> Any:
        """Show what lines cost on meshes: operations, waits for values, layouts changed, bytes (on, off, clear)."""
        from monarch_kernel.tensor import clear_plans, explain

        if found.what == "clear":
            clear_plans()
            self.say("What lines cost is counted anew from here.")
        elif found.what is not None:
            self._notebook.plans.is_on = found.what == "on"
            on = "From now on, what a cell costs on meshes is shown below it; %mesh plan off ends that."
            self.say(on if found.what == "on" else "What cells cost is no longer shown.")
        else:
            return explain()
        return None

    @magic_arguments("mesh watch")
    @text_argument(
        "expression", OptionsAt.BOTH_ENDS, nargs="?", metavar="TENSOR", help="also say what this tensor has now"
    )
    @argument("--nan", action="store_true", help="stop at the operation that makes the first NaN or Inf")
    @argument("--no-inf", action="store_true", help="NaN alone")
    @argument("--later", action="store_true", help="the next fetch tells it, which costs no round trip per operation")
    @argument("--off", action="store_true", help="watch no more")
    def watch(self, found: Arguments) -> None:
        """Stop at the operation on a mesh that makes the first NaN or Inf on any rank, with the line that issued it."""
        from monarch_kernel.tensor import watch_nan

        if found.off == found.nan:
            raise usage_error(found.magic, "say --nan to begin, or --off to end")
        if found.off:
            if TensorMagics._watch is not None:
                TensorMagics._watch.stop()
                TensorMagics._watch = None
                self.say("Operations are no longer watched for NaN.")
            else:
                self.say("Nothing was watched for NaN.")
            return
        if found.expression:
            self.say(self._state(found))
        TensorMagics._watch = watch_nan(inf=not found.no_inf, at_once=not found.later)
        what = "NaN" if found.no_inf else "NaN or Inf"
        how = "the next fetch tells of" if found.later else "a cell stops at"
        self.say(
            f"From now on, {how} the operation on a mesh that makes the first {what}; %mesh watch --off ends that."
        )

    def _state(self, found: Arguments) -> str:
        handle = self._handle(found)
        from monarch_kernel.tensor import no_mesh

        with no_mesh.activate():
            values = handle.detach()
            wrong = int((~values.isfinite()).sum().item())
        what = "its values are finite" if not wrong else f"{wrong:,} of its values are NaN or Inf already"
        where = "" if handle._spec.mesh.sharded else " (on rank 0)"
        return f"{found.expression}: {what}{where}."

    @magic_arguments("mesh memory")
    @text_argument("expression", OptionsAt.BOTH_ENDS, nargs="?", metavar="NAME", help="a tensor, a module, a list")
    def memory(self, found: Arguments) -> Any:
        """Show what tensors take on ranks: by the line that made them, with what holds them here."""
        from monarch_kernel.tensor import memory

        names = {name: value for name, value in self._notebook.shell.user_ns.items() if not name.startswith("_")}
        hidden = getattr(self._notebook.shell, "user_ns_hidden", {})
        names = {name: value for name, value in names.items() if name not in hidden}
        if not found.expression:
            return memory(names=names)
        value = names.get(found.expression)
        if value is None:
            value = self._handle(found)
        try:
            return memory(value, names=names)
        except TypeError as error:
            raise usage_error(found.magic, str(error)) from None

    def _handle(self, found: Arguments) -> Any:
        handle = handle_named(found.expression, self._notebook.shell.user_ns)
        if handle is None:
            raise usage_error(found.magic, f"{found.expression!r} names no tensor on a mesh in this notebook")
        return handle
