"""Subcommands of `%mesh` that copy variables between the notebook and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cloudpickle
from IPython.core.error import UsageError
from IPython.core.magic_arguments import argument, magic_arguments

from monarch_kernel.actor import SupervisionError, ValueMesh
from monarch_kernel.introspection import TensorArgument
from monarch_kernel.kernel.magics.arguments import Arguments, check_name, mesh_option, ranks_option, select
from monarch_kernel.kernel.magics.subcommands import Subcommands, listed
from monarch_kernel.kernel.managed_mesh import ManagedMesh
from monarch_kernel.kernel.usage_errors import check_drives, replacing, usage_error
from monarch_kernel.runtime.actor.errors import ActorError


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
        got: dict[int, dict[str, Any]] = {}
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

    def _handle(self, command: str, managed: ManagedMesh, ranks: tuple[int, ...], offers: Any) -> Any:
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
