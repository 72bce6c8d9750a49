"""The actor of one stream on one rank, which runs records in the order in which they were issued: `TensorExecutor`."""

from __future__ import annotations

import os
import pickle
import traceback
from array import array
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from monarch_kernel.runtime.actor.context import current_rank
from monarch_kernel.runtime.actor.definition import Actor, endpoint
from monarch_kernel.runtime.actor.execution.collectives import failed_by_peer
from monarch_kernel.runtime.tensor.rank import current_executor
from monarch_kernel.runtime.tensor.rank.current_executor import StreamState, runs_here, runs_one
from monarch_kernel.runtime.tensor.rank.program import Program, compiled, operation_of
from monarch_kernel.runtime.tensor.rank.recorded import CheckedPrograms, NanCheck, RecordedProgram
from monarch_kernel.runtime.tensor.rank.values import LENT, forget, store_of
from monarch_kernel.runtime.tensor.wire import (
    DELETE,
    FIRST_DEFINITION,
    LEND,
    SIGNAL,
    WAIT,
    Definition,
    FailedValue,
    OperationFailed,
    Recorded,
    TensorSlot,
    digest,
    packed,
)

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.sharded.rank.rules import OperationRules

#: The number of traceback lines that are kept.
LINES = 12


class TensorExecutor(StreamState, Actor):
    """Runs the records of one stream. All streams of the engine share the values."""

    __tool__ = True

    def __init__(self, engine: str, stream: str, together: int) -> None:
        runs_here(self)
        current_executor.keep_device(runs_one)
        share_cores(together)
        rank = current_rank().rank
        super().__init__(engine, stream, rank, store_of(engine, rank))
        self.programs: dict[int, Program] = {}
        self.nan_check: NanCheck | None = None
        self.record = 0
        if stream == "main":
            self.store.at = lambda: self.at

    # -- records --------------------------------------------------------------------------------------

    @endpoint
    def define(self, definitions: list[Definition]) -> None:
        """Store definitions for later records."""
        programs = self.programs.unwatched if isinstance(self.programs, CheckedPrograms) else self.programs
        for definition in definitions:
            try:
                operation = definition.operation
                programs[definition.number] = (
                    RecordedProgram(definition, operation, programs)
                    if isinstance(operation, Recorded)
                    else compiled(definition, self._rules().of_definition if definition.sharded else None)
                )
            except Exception as e:
                programs[definition.number] = _broken(definition, e)

    @endpoint
    def run(self, ints: bytes, floats: bytes, record: int) -> None:
        """Run records. `record` is the number of the first."""
        self._run(ints, floats, record)

    @endpoint
    def watch(self, inf: bool | None) -> None:
        """Check the results of operations for NaN (and Inf, if `inf`) from now on. None ends the checks."""
        if isinstance(self.programs, CheckedPrograms):
            self.programs = self.programs.unwatched
        self.nan_check = None
        if inf is not None:
            self.nan_check = NanCheck(self.rank, inf, lambda: self.at)
            self.programs = CheckedPrograms(self.programs, self.nan_check)

    def _run(self, ints: bytes, floats: bytes, record: int) -> None:
        numbers = array("q")
        numbers.frombytes(ints)
        L = numbers.tolist()  # noqa: N806  # as in the compiled programs
        reals = array("d")
        reals.frombytes(floats)
        F = reals.tolist()  # noqa: N806
        V, programs, i, n = self.store.values, self.programs, 0, len(L)  # noqa: N806
        with torch.no_grad():
            while i < n:
                number = L[i]
                if number < FIRST_DEFINITION:
                    i = self._control(number, L, i)
                    continue
                program = programs[number]
                self.at = record
                try:
                    program.run(V, L, i, F)
                except BaseException as e:
                    self._failed(V, program, L[i : i + program.size], F, record, e)
                i += program.size
                record += 1
        self.record = record

    def _control(self, number: int, L: list[int], i: int) -> int:  # noqa: N803
        """Run a control record. Return where the next record begins."""
        if number == DELETE:
            count = L[i + 1]
            pop = self.store.values.pop
            for value in L[i + 2 : i + 2 + count]:
                pop(value, None)
            return i + 2 + count
        token, store = L[i + 1], self.store
        if number == LEND:
            return self._lend(token, L, i + 2)
        with store.changed:
            if number == SIGNAL:
                store.signals.add(token)
                store.changed.notify_all()
            else:  # the other stream is a thread of this process: it reaches the record, or both end
                assert number == WAIT, number
                store.changed.wait_for(lambda: token in store.signals or store.closed)
                store.signals.discard(token)
        return i + 2

    def _lend(self, token: int, L: list[int], i: int) -> int:  # noqa: N803
        """Store values for actors of this process. Return where the next record begins."""
        first, store = i + 1, self.store
        end = first + L[i]
        after = end + 1 + L[end]
        if self.rank in L[end + 1 : after]:
            with store.changed:
                values = [store.values[number] for number in L[first:end]]
                store.lent[token] = {k: self._for_actors(value) for k, value in enumerate(values)}
                if len(store.lent) > LENT:
                    store.let_go = next(iter(store.lent))
                    del store.lent[store.let_go]
                store.changed.notify_all()
        return after

    def _for_actors(self, value: Any) -> Any:
        """Return the same memory in a separate tensor for actors, whose gradients stay there."""
        if type(value) is torch.Tensor:
            return value.detach()
        if not isinstance(value, torch.Tensor):
            return value
        from monarch_kernel.runtime.tensor.sharded.rank.rules import rules_of

        return rules_of(self.store.extras).for_actors(value)

    def _failed(
        self,
        V: dict[int, Any],  # noqa: N803
        program: Program,
        L: list[int],  # noqa: N803
        F: list[float],  # noqa: N803
        record: int,
        error: BaseException,
        steps: tuple[int, ...] = (),
    ) -> None:
        """Store a failure as the results of the record `L`.

        Args:
            steps: the steps that lead to `L` in a recorded sequence.
        """

        def step_failed(
            values: Any, inner: Program, step: list[int], reals: list[float], e: BaseException, k: int
        ) -> None:
            self._failed(values, inner, step, reals, record, e, (*steps, k))

        if isinstance(program, RecordedProgram) and program.fail(V, L, F, error, step_failed):
            return
        inputs = L[1 : 1 + program.inputs]
        failed = next((v for v in (V[j] for j in inputs) if isinstance(v, FailedValue)), None)
        inherits = failed is not None
        if inherits and self.unseen is None:
            self.unseen = failed
        if isinstance(error, OperationFailed):  # of an input, or of another rank in the collective
            failed = error.failed
        elif failed is None:
            failed = FailedValue(record, self.rank, _text(error), steps=steps, of_peer=failed_by_peer(error))
            if self.unseen is None:
                self.unseen = failed
            if program.definition.sharded and self.store.report is not None:
                self.store.report(failed, [V[j] for j in inputs])
        if inherits and program.standins is not None:
            self._take_part(program, L, F, failed)
        for j in L[program.size - program.outputs :]:
            V[j] = failed
        for k in program.mutates:  # these values differ from what the program expects
            V[inputs[k]] = failed

    def _take_part(self, program: Program, L: list[int], F: list[float], failed: FailedValue) -> None:  # noqa: N803
        """Take part in a collective with zeros, so that other ranks do not wait for this one.

        The result is discarded.
        """
        assert program.standins is not None
        zeros = {
            L[1 + k]: torch.zeros(size, dtype=dtype, device=current_executor.of_rank())
            for k, (size, dtype) in enumerate(program.standins)
        }
        self.standing_in = failed
        try:
            program.run(zeros | dict.fromkeys(L[program.size - program.outputs :]), L, 0, F)
        except Exception:  # the first failure is reported
            pass
        finally:
            self.standing_in = None

    # -- answers --------------------------------------------------------------------------------------

    @endpoint
    def fetch(
        self, ints: bytes, floats: bytes, record: int, values: list[int], rank: int, compare: bool = False
    ) -> Any:
        """Return the values on `rank` (-1: on every rank). Other ranks return whether a value has failed.

        With `compare`, the other ranks return digests of their values.
        """
        self._run(ints, floats, record)
        found = [self.value(number) for number in values]
        whole = [self.whole(v) for v in found]
        if rank in (self.rank, -1):
            return [_to_send(v) for v in whole]
        return [digest(v) for v in whole] if compare else None

    @endpoint
    def ask(self, ints: bytes, floats: bytes, record: int, function: bytes, values: list[Any]) -> Any:
        """Return the result of a function of values of this rank."""
        self._run(ints, floats, record)
        with torch.no_grad():
            return pickle.loads(function)(*[self.value(v) if type(v) is int else v for v in values])

    @endpoint
    def call_and_fetch(self, ints: bytes, floats: bytes, record: int, call: bytes, values: list[int], rank: int) -> Any:
        """Call a pickled function with values of this rank.

        Return its result if `rank` is this rank (-1: every rank).
        """
        self._run(ints, floats, record)
        inputs: list[Any] = []
        self.at = self.record
        try:
            inputs += [self.value(number) for number in values]
            function, template = pickle.loads(call)
            args, kwargs = tree_map(lambda x: inputs[x.index] if type(x) is TensorSlot else x, template)
            with torch.no_grad():
                result = function(*args, **kwargs)
        except OperationFailed:
            raise
        except BaseException as e:
            raise self._failed_alone(e, inputs) from None
        finally:
            self.record += 1
        return [tree_map(_to_send, result)] if rank in (self.rank, -1) else None

    def _failed_alone(self, error: BaseException, inputs: list[Any]) -> OperationFailed:
        """Return the error for an answer that fails here, and free ranks that wait for this one in it."""
        failed = FailedValue(self.record, self.rank, _text(error))
        if self.store.report is not None and any(type(x) is not torch.Tensor for x in inputs):
            self.store.report(failed, inputs)
        return OperationFailed(failed)

    @endpoint
    def check(self) -> None:
        """Raise the first failure that no check has raised yet."""
        self._tell_found()
        failed, self.unseen = self.unseen, None
        if failed is not None:
            raise OperationFailed(failed)

    @endpoint
    def done(self) -> int:
        """Return how many records have run. The answer is sent after all earlier records have run."""
        return self.record

    @endpoint
    def put(self, number: int, tensor: torch.Tensor, layout: Any) -> None:
        """Store a tensor, or, with a layout of a sharded mesh, this rank's part of it."""
        if layout is None:
            self.store.values[number] = tensor.to(current_executor.of_rank())
            return
        from monarch_kernel.runtime.tensor.sharded.rank.rules import rules_of

        try:
            self.store.values[number] = rules_of(self.store.extras).placed(tensor, layout)
        except Exception as e:
            self.store.values[number] = FailedValue(self.record, self.rank, _text(e))

    @endpoint
    def run_and_describe(
        self,
        ints: bytes,
        floats: bytes,
        record: int,
        operation: str,
        template: bytes,
        ins: list[int],
        first: int,
        count: int,
        sharded: bool,
    ) -> list[Any]:
        """Run an operation, and return size, stride and dtype of its results, which depend on values.

        Results that are not tensors (of ``allclose``) are returned themselves.
        """
        self._run(ints, floats, record)
        inputs = [self.value(number) for number in ins]
        args, kwargs = tree_map(lambda x: inputs[x.index] if type(x) is TensorSlot else x, pickle.loads(template))
        try:
            run = operation_of(operation)
            self.at = self.record
            if sharded:
                run = self._rules().of(run, operation)
            with torch.no_grad():
                out = run(*args, **kwargs)
        except BaseException as e:
            raise self._failed_alone(e, inputs) from None
        else:
            if self.nan_check is not None:
                made = [out] if count == 1 else list(out)
                self.nan_check.check(operation, inputs, [x for x in made if isinstance(x, torch.Tensor)])
                self._tell_found()
        finally:
            self.record += 1
        results = [out] if count == 1 else list(out)
        described: list[Any] = []
        for i, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                self.store.values[first + i] = result
                result = tuple(result.shape), result.stride(), result.dtype
            described.append(result)
        return described

    @endpoint
    def held(self) -> int:
        """Return the number of values on this rank."""
        return len(self.store.values)

    def _rules(self) -> OperationRules:
        """Return the rules that replace operations on DTensors."""
        from monarch_kernel.runtime.tensor.sharded.rank.rules import rules_of  # loads DTensor, therefore on first use

        return rules_of(self.store.extras)

    def value(self, number: int) -> Any:
        """Return a value of this rank.

        Raises:
            OperationFailed: the value is a failure, or the watch for NaN has found one.
        """
        self._tell_found()
        return super().value(number)

    def _tell_found(self) -> None:
        """Raise the finding of the watch, once."""
        watch = self.nan_check
        if watch is not None and watch.found is not None:
            failed, watch.found = watch.found, None
            raise OperationFailed(failed)

    def whole(self, value: Any) -> Any:
        """Gather a DTensor as one tensor, a collective of all its ranks. Return anything else unchanged."""
        if type(value) is not torch.Tensor and hasattr(value, "full_tensor"):
            with torch.no_grad():
                return value.full_tensor()
        return value

    def __cleanup__(self, error: BaseException | None) -> None:
        """Release the engine's values when its executors stop."""
        forget(self.engine)


def _to_send(value: Any) -> Any:
    """Return a tensor without its graph, on the CPU, and without the rest of the memory of a view."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    small = packed(value)
    if small is not value:
        return small
    if value.layout == torch.strided and value.untyped_storage().nbytes() > value.numel() * value.element_size():
        return value.clone()
    return value


def share_cores(together: int) -> None:
    """Limit torch to this rank's share of the cores of its host, unless the program has set its number of threads.

    Args:
        together: the number of ranks on the host.
    """
    cores = len(os.sched_getaffinity(0))
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() >= cores:
        torch.set_num_threads(max(1, cores // together))


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-LINES:])


def _broken(definition: Definition, error: Exception) -> Program:
    """Return a program that raises the error of its compilation. On the rank, it counts as a failed operation."""
    text = f"{definition.label} cannot run on this rank: {type(error).__name__}: {error}"

    def run(V: Any, L: Any, i: int, F: Any) -> None:  # noqa: N803
        raise RuntimeError(text)

    return Program(run, definition, run)
