"""``Simulator``: a mesh of any size without processes, and what a program on it computes, keeps and sends."""

from __future__ import annotations

from typing import Any

from monarch_kernel.display.tables import table_text
from monarch_kernel.runtime.tensor.simulation.mesh import SimulatedEngine, SimulatedMesh
from monarch_kernel.runtime.tensor.simulation.rates import SimulatedRates
from monarch_kernel.runtime.tensor.simulation.report import SimulationReport
from monarch_kernel.runtime.tensor.simulation.trace import write_trace


class SimulatorInterface:
    """A simulated mesh, and what a program on it has come to. Made by `Simulator`."""

    def __init__(self, engine: SimulatedEngine, trace_path: str, group_workers: bool) -> None:
        self._engine = engine
        self._trace_path = trace_path
        self._group_workers = group_workers
        engine.shared["exit"] = self.write_trace

    @property
    def mesh(self) -> SimulatedMesh:
        """The mesh."""
        return self._engine.mesh

    def report(self) -> SimulationReport:
        """What each rank has computed, keeps and has sent, since the beginning or the last `step`."""
        with self._engine.lock:
            self._engine.collect()
            return SimulationReport.of(self._engine.ledger)

    def step(self) -> tuple[float, float]:
        """End an iteration: its time in seconds and the most that a rank has kept in MB. The next one begins at 0."""
        with self._engine.lock:
            report = self.report()
            self._engine.ledger.begin_again()
            return report.seconds, report.peak / 1e6

    def write_trace(self, path: str | None = None) -> str:
        """Write the timeline since the beginning or the last `step`, for ui.perfetto.dev; returns where it is."""
        with self._engine.lock:
            self._engine.collect()
            path = self._trace_path if path is None else path
            write_trace(path, self._engine.ledger, self._group_workers)
            return path

    def display(self) -> None:
        """Show the report: as a table in a notebook, as text elsewhere."""
        import builtins

        report = self.report()
        shown = getattr(builtins, "display", None)
        if shown is None:
            print(table_text(report.table()))
        else:
            shown(report)


def Simulator(  # noqa: N802  # Monarch's name
    hosts: int,
    gpus: int,
    *,
    simulate_mode: Any = "simulate",
    trace_mode: Any = "stream_only",
    upload_trace: bool = False,
    trace_path: str = "trace.json",
    command_history_path: str | None = None,
    group_workers: bool = True,
    build_ir: bool = False,
    rates: SimulatedRates | None = None,
) -> SimulatorInterface:
    """A mesh of ``hosts * gpus`` ranks without processes, with dimensions ``host`` and ``gpu``.

    ```python
    sim = Simulator(hosts=32, gpus=8)
    with sim.mesh.activate():
        train_step()
    sim.report()          # memory, communication and estimated time of each rank
    sim.write_trace()     # for ui.perfetto.dev
    ```

    A program runs on it by shapes alone: autograd, modules, optimizers, `reduce`, `to_mesh`, streams. Values that it
    reads are zeros.

    Args:
        hosts, gpus: how many hosts, and ranks on each.
        trace_path: where `SimulatorInterface.write_trace` and ``mesh.exit()`` write.
        group_workers: ranks that do the same are one in the trace.
        rates: how fast ranks compute and send, for times.
        simulate_mode, trace_mode: taken for Monarch's sake: all modes simulate, and trace the streams of the ranks.

    Raises:
        ValueError: there is no such number of ranks; or what is asked for exists in Monarch only (`upload_trace`,
            `command_history_path`, `build_ir`).
    """
    for name, size in (("hosts", hosts), ("gpus", gpus)):
        if size < 1:
            raise ValueError(f"Simulator({name}={size}): at least 1")
    for name, given in (
        ("upload_trace", upload_trace),
        ("command_history_path", command_history_path),
        ("build_ir", build_ir),
    ):
        if given:
            raise ValueError(f"Simulator({name}={given!r}): there is no such thing here: leave it away")
    engine = SimulatedEngine({"host": hosts, "gpu": gpus}, rates or SimulatedRates(), hosts)
    return SimulatorInterface(engine, trace_path, group_workers)
