"""Subcommands of `%mesh` for values of ranks and tensors on meshes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.actor import ActorMesh, SupervisionError, ValueMesh
from monarch_kernel.introspection import TensorArgument
from monarch_kernel.kernel.magics.arguments import (
    Arguments,
    OptionsAt,
    Subcommands,
    check_name,
    listed,
    mesh_option,
    ranks_option,
    select,
    text_argument,
)
from monarch_kernel.kernel.managed_mesh import ManagedMesh
from monarch_kernel.kernel.usage_errors import check_drives, replacing, usage_error
from monarch_kernel.runtime.actor.errors import ActorError


class ValueMagics(Subcommands):
    """Comparing values of ranks, drawing them, and following tensors: their costs, first NaN and memory."""

    _watch: Any = None  # of this process
    _rules: Any = None  # MeshRules of this process

    @magic_arguments("mesh diff")
    @text_argument(
        "expression",
        OptionsAt.BOTH_ENDS,
        nargs="?",
        metavar="EXPR",
        help="a Python expression: the rest of the line, verbatim",
    )
    @ranks_option()
    @mesh_option("the mesh (default: the one in use), or a variable with actors: their self")
    @argument("--in-frame", action="store_true", help="evaluate in stopped frames, also those of %%mesh pm")
    @argument("--up", type=int, default=0, metavar="N", help="N frames of user code up from the innermost one")
    @argument("--grads", action="store_true", help="compare the gradients of a module")
    @argument("--timeout", type=float, metavar="S", help="how long ranks may take (default: 30 seconds)")
    def diff(self, found: Arguments) -> object:
        """Evaluate an expression on every rank: one line per distinct value, and where the values differ.

        While ranks of the mesh are stopped, it evaluates in their stopped frames, and otherwise in the namespace of
        the cells. What the notebook knows as a tensor on a mesh is compared as the ranks of that mesh hold it, unless
        --on names a mesh. Tensors, modules and containers of them are not sent: ranks reduce them to figures.
        """
        if not found.expression:
            raise usage_error(found.magic, "give an expression to compare, for example loss or net.fc.weight")
        if found.timeout is not None and not found.timeout > 0:
            raise usage_error(found.magic, f"--timeout takes a number of seconds above 0, not {found.timeout:g}")
        from monarch_kernel.debugger.controller.values import diff

        handle = None if found.on or found.in_frame else handle_named(found.expression, self._notebook.shell.user_ns)
        if handle is not None:
            mesh, extent, name = handle, handle.mesh.extent, handle.mesh.name
        else:
            mesh, name = self._meant(found.on, found.magic)
            extent = mesh.extent
        ranks = select(found.magic, found.ranks, [], extent, name)
        limit = {} if found.timeout is None else {"timeout": found.timeout}
        try:
            return diff(
                mesh,
                found.expression,
                ranks=ranks,
                in_frame=found.in_frame or None,
                up=found.up,
                grads=found.grads,
                **limit,
            )
        except ValueError as error:
            raise usage_error(found.magic, str(error)) from None

    @magic_arguments("mesh plot")
    @text_argument(
        "expression",
        OptionsAt.BOTH_ENDS,
        nargs="?",
        metavar="EXPR",
        help="a number of each rank: loss, trainer.loss, grad.norm()",
    )
    @ranks_option()
    @mesh_option("the mesh (default: the one in use), or a variable with actors")
    @argument("--period", type=float, metavar="S", help="how often it is read at most (default and least: 0.2 seconds)")
    @argument("--stop", action="store_true", help="end all plots; their charts stay")
    def plot(self, found: Arguments) -> object:
        """Draw a live chart of an expression of the ranks: while this cell runs, or the next if this line is alone."""
        from monarch_kernel.widgets import plot
        from monarch_kernel.widgets.plot_view import stop_plots

        if found.stop:
            count = stop_plots()
            self.say(f"{count} plot{'s' * (count != 1)} stopped." if count else "There are no plots.")
            return None
        if not found.expression:
            raise usage_error(found.magic, "give an expression to draw, for example loss or trainer.loss")
        period = 0.2 if found.period is None else found.period
        if not period > 0:
            raise usage_error(found.magic, f"--period takes a number of seconds above 0, not {period:g}")
        mesh, name = self._meant(found.on, found.magic)
        ranks = select(found.magic, found.ranks, [], mesh.extent, name)
        try:
            return plot(mesh, found.expression, ranks=ranks, period=period)
        except ValueError as error:
            raise usage_error(found.magic, str(error)) from None

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
        "expression", OptionsAt.BOTH_ENDS, nargs="?", metavar="TENSOR", help="also report the values of this tensor"
    )
    @argument("--nan", action="store_true", help="stop at the operation that makes the first NaN or Inf")
    @argument("--no-inf", action="store_true", help="NaN alone")
    @argument("--later", action="store_true", help="the next fetch reports it, which costs no round trip per operation")
    @argument(
        "--rules",
        nargs="?",
        const="all",
        metavar="R,R",
        help="check rules on training steps of the ranks, all or these: replicas, updates, data, random, grads, lr, "
        "buffers, memory; again: report",
    )
    @argument("--every", type=int, metavar="N", help="check rules on every Nth step (default: 10)")
    @argument("--stop", action="store_true", help="stop in the debugger after a step that breaks a rule")
    @argument("--placements", metavar="NAME", help="a variable with the placements of plain tensors by patterns")
    @mesh_option("the mesh whose ranks check rules (default: the one in use)")
    @argument("--off", action="store_true", help="watch no more")
    def watch(self, found: Arguments) -> None:
        """Stop at the operation on a mesh that makes the first NaN or Inf on any rank, with the line that issued it.

        With --rules, ranks check rules on their training steps, in cells of a mesh and in joined jobs, and a broken
        rule is reported with its step, rank, parameter and line.
        """
        if found.rules is not None:
            self._check_rules(found)
            return
        from monarch_kernel.tensor import watch_nan

        if found.off == found.nan:
            raise usage_error(found.magic, "say --nan to begin, --rules to check training steps, or --off to end")
        if found.off:
            ended = self._end_rules()
            if ValueMagics._watch is not None:
                ValueMagics._watch.stop()
                ValueMagics._watch = None
                self.say("Operations are no longer watched for NaN.")
            elif not ended:
                self.say("Nothing was watched for NaN.")
            return
        if found.expression:
            self.say(self._state(found))
        ValueMagics._watch = watch_nan(inf=not found.no_inf, at_once=not found.later)
        what = "NaN" if found.no_inf else "NaN or Inf"
        how = "the next fetch reports" if found.later else "a cell stops at"
        self.say(
            f"From now on, {how} the operation on a mesh that makes the first {what}; %mesh watch --off ends that."
        )

    def _check_rules(self, found: Arguments) -> None:
        from monarch_kernel.numerics.control import NumericsError
        from monarch_kernel.numerics.mesh_rules import MeshRules

        current = ValueMagics._rules
        if found.off:
            if not self._end_rules():
                self.say("No rules were checked.")
            return
        changes = found.rules != "all" or found.every is not None or found.stop or found.placements or found.on
        if current is not None and not current.has_ended and not changes:
            self.say(current.report())
            return
        every = 10 if found.every is None else found.every
        if every < 1:
            raise usage_error(found.magic, f"--every takes a number of steps from 1 on, not {every}")
        placements = None
        if found.placements:
            placements = self._notebook.shell.user_ns.get(found.placements)
            if not isinstance(placements, Mapping):
                raise usage_error(
                    found.magic, f'no variable {found.placements} has placements, as in {{"*.wq": Shard(0)}}'
                )
        names = None if found.rules == "all" else [each for each in found.rules.strip("[]").split(",") if each]
        mesh, name = self._meant(found.on, found.magic)
        self._end_rules()
        try:
            rules = MeshRules(mesh, names, every=every, stop=found.stop, placements=placements, say=self.say)
        except NumericsError as error:
            raise usage_error(found.magic, str(error)) from None
        ValueMagics._rules = rules
        then = "a step that breaks one stops in the debugger" if found.stop else "broken ones are reported here"
        steps = "every step" if every == 1 else f"one step in {every}"
        self.say(
            f"The ranks of {name} check {', '.join(rules.names)} on {steps}; {then}. "
            "%mesh watch --rules reports, %mesh watch --off ends that."
        )

    def _end_rules(self) -> bool:
        """End the check of rules, if there is one, with its last report."""
        current, ValueMagics._rules = ValueMagics._rules, None
        if current is None:
            return False
        if not current.has_ended:
            self.say(f"Rules are no longer checked. {current.end()}")
        return True

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

    def _meant(self, name: str | None, command: str) -> tuple[Any, str]:
        """Return the proc mesh of that name (or the one in use), or the actor mesh in the variable of that name."""
        if name is not None and name not in self._session.proc_meshes():
            value = self._notebook.shell.user_ns.get(name)
            if isinstance(value, ActorMesh):
                return value, name
        mesh = self._session.find(name, command)
        return mesh, mesh.name


def handle_named(expression: str, names: Mapping[str, object]) -> Any:
    """Return the tensor handle that a name refers to, also through attributes and constant indices; otherwise None.

    The function calls no user code.
    """
    if "monarch_kernel.tensor" not in sys.modules:  # the notebook has no such tensor
        return None
    try:
        found = _value(ast.parse(expression.strip(), mode="eval").body, names)
    except Exception:  # it is something else: an expression for the ranks, say
        return None
    return found if is_handle(found) else None


def is_handle(value: object) -> bool:
    """Return whether a value is a handle of a tensor on a mesh."""
    from monarch_kernel.tensor import Tensor

    return isinstance(value, Tensor)


def _value(node: ast.expr, names: Mapping[str, object]) -> Any:
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, names), node.attr)
    if isinstance(node, ast.Subscript) and not is_handle(container := _value(node.value, names)):
        return container[ast.literal_eval(node.slice)]
    raise ValueError(ast.unparse(node))


# Subcommands of `%mesh` that copy variables between the notebook and ranks.


class VariableMagics(Subcommands):
    """Copying variables."""

    @magic_arguments("mesh push")
    @argument("names", nargs="+", metavar="VAR", help="variables of the notebook")
    @ranks_option()
    @mesh_option()
    def push(self, found: Arguments) -> None:
        """Copy variables of the notebook to the ranks."""
        values = {name: self._notebook.variable(name, found.magic) for name in found.names}
        managed, ranks = self._cells_at(found)
        check_drives(managed.procs, found.magic)
        for name, value in values.items():
            try:
                cloudpickle.dumps(value)
            except TensorArgument:  # ranks receive their part of the tensor
                pass
            except Exception as error:  # pickling runs user code
                kind = type(value).__name__
                raise usage_error(
                    found.magic, f"{name} (a {kind}) cannot be sent: {error}; create it on the ranks, in a %%mesh cell"
                ) from None
        try:
            calls = [(part, part.mesh.push.call(values)) for part in managed.executors(ranks)]
        except Exception as error:  # a tensor that is on no rank of this mesh, or on a dead one
            raise usage_error(found.magic, str(error)) from None
        for part, call in calls:
            try:
                call.get()
            except ActorError as error:  # the result of an operation that has failed
                raise usage_error(found.magic, f"ranks of mesh {managed.name} did not get it: {error}") from None
            except SupervisionError as error:
                more = "; the other ranks have it" if len(error.ranks) < len(ranks) else ""
                raise _cannot_answer(found.magic, managed.name, part.ranks, error, more) from None

    @magic_arguments("mesh pull")
    @argument("names", nargs="+", metavar="VAR", help="variables of the ranks")
    @argument("--as", dest="target", metavar="NAME", help="what to call it in the notebook")
    @argument("--as-handle", action="store_true", help="tensors stay on the ranks; the notebook gets handles of them")
    @ranks_option()
    @mesh_option()
    def pull(self, found: Arguments) -> None:
        """Copy variables of the ranks to the notebook: each becomes a ValueMesh, with one value per rank.

        With --as-handle it becomes a handle: a DTensor of the ranks one of the whole, another tensor one of what each
        rank has. Nothing is copied.
        """
        for name in found.names:
            check_name(found.magic, name, "variable")
        if found.target is not None:
            check_name(found.magic, found.target, "variable")
            if len(found.names) > 1:
                raise usage_error(found.magic, "--as names one variable, so give one to pull")
        managed, ranks = self._cells_at(found)
        got: dict[int, dict[str, object]] = {}
        calls = [
            (part, (part.mesh.offer if found.as_handle else part.mesh.pull).call(found.names))
            for part in managed.executors(ranks)
        ]
        for part, call in calls:
            try:
                values = call.get()
            except SupervisionError as error:
                raise _cannot_answer(found.magic, managed.name, part.ranks, error) from None
            except ActorError as error:
                first = error.failures[0]
                where = f"rank {part.ranks[first.rank]}"
                raise usage_error(found.magic, f"{where} cannot send it: {first.message.rstrip('.')}") from None
            got.update(zip(part.ranks, values.values(), strict=True))
        for name in found.names:
            missing = [rank for rank in ranks if name not in got[rank]]
            if missing:
                who = "any rank" if len(missing) == len(ranks) else f"rank {listed(missing)}"
                raise usage_error(found.magic, f"there is no variable {name!r} on {who} of mesh {managed.name}")
        shape = managed.shape(ranks)
        for name in found.names:
            values: Any = ValueMesh(shape, [got[rank][name] for rank in ranks])
            if found.as_handle:
                values = self._handle(found.magic, managed, ranks, values)
            self._notebook.shell.user_ns[found.target or name] = values

    def _handle(self, command: str, managed: ManagedMesh, ranks: tuple[int, ...], offers: object) -> Any:
        """Return a handle of the values that the ranks have offered."""
        from monarch_kernel.distributed import adopt

        found = managed.procs_at(ranks)
        if len(found) > 1:
            raise usage_error(command, f"ranks {listed(ranks)} are no slice of mesh {managed.name}: a handle needs one")
        try:
            return adopt(offers, found[0].mesh)
        except (TypeError, ValueError) as error:
            raise usage_error(command, str(error).removeprefix("adopt(): ")) from None

    def _cells_at(self, found: Arguments) -> tuple[ManagedMesh, tuple[int, ...]]:
        managed = self._session.get(found.on, found.magic)
        return managed, select(found.magic, found.ranks, [], managed.extent, managed.name)


def _cannot_answer(
    command: str, mesh: str, ranks: Sequence[int], error: SupervisionError, more: str = ""
) -> UsageError:
    """Return the error for a command that addresses dead ranks."""
    dead = [ranks[rank] for rank in error.ranks]
    who = f"rank {listed(dead)} of mesh {mesh}"
    return usage_error(command, f"{who} cannot answer: {error.cause}{more}; choose others with -r; {replacing(mesh)}")
