"""The main loop of a rank, from its configuration to its end.

The main thread polls until an actor needs a driver. It drives the rank's first actor, because signals and
interrupts reach only the main thread.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import Any

import msgspec

# Every actor, or every actor of a cell or script, needs these, so the fork server loads them once for all ranks:
# a module that is loaded after the fork costs each rank its pages.
import monarch_kernel.protocol.by_value  # pyright: ignore[reportUnusedImport]
import monarch_kernel.runtime.actor.meshes.proc_mesh  # noqa: F401  # pyright: ignore[reportUnusedImport]
from monarch_kernel import aliases, environment, logs
from monarch_kernel.loading import after_import
from monarch_kernel.protocol import main_module
from monarch_kernel.protocol.kept_mesh import Adopt
from monarch_kernel.protocol.messages import ERROR, OK, Bootstrap, ProcRef, RankConfig, Reply
from monarch_kernel.protocol.messages import encode as encode_header
from monarch_kernel.protocol.observation import ActorActivity, ObserveRank, RankActivity
from monarch_kernel.protocol.refs import Death
from monarch_kernel.protocol.serialize import Body, dumps, loads
from monarch_kernel.runtime.actor import child_processes, extensions
from monarch_kernel.runtime.actor.calls.pending import acknowledge
from monarch_kernel.runtime.actor.context import Context, current, shared
from monarch_kernel.runtime.actor.definition import class_label
from monarch_kernel.runtime.actor.execution import collectives
from monarch_kernel.runtime.actor.execution.collectives import fault_body
from monarch_kernel.runtime.actor.execution.instance import ActorInstance
from monarch_kernel.runtime.actor.process import set_system
from monarch_kernel.runtime.actor.system import ActorSystem
from monarch_kernel.runtime.node.interfaces import PeerLink
from monarch_kernel.runtime.node.node import Node
from monarch_kernel.runtime.node.poller import Timer
from monarch_kernel.runtime.rank import output_capture
from monarch_kernel.thread_frames import LockGuard

# Report the activity of a rank's actors to its host agent while a controller watches.
#
# The polling thread checks the actors a few times in each period of the lease, and reports changes. An actor with a
# sequence of short calls counts as running throughout, because its state would otherwise flicker.

#: The number of checks of the actors in a period.
LOOKS = 4
#: The interval of reports in which only counts have changed (seconds).
COUNTS = 1.0
#: A call that runs longer is reported with its own start. Shorter ones are reported with the start of the first in a
#: row (seconds).
LONG_CALL = 1.0


class _Seen:
    """An actor at the last check."""

    def __init__(self) -> None:
        self.calls = 0
        self.since = 0.0  # the start of the first call in a row; 0: it was idle
        self.told: ActorActivity | None = None


class RankObserver:
    """Answers ``ObserveRank``. Does nothing without a lease."""

    def __init__(self, system: ActorSystem) -> None:
        self._system = system
        self._agent = ""
        self._until = 0.0
        self._period = 0.0
        self._timer: Timer | None = None
        self._seen: dict[str, _Seen] = {}
        self._told_at = 0.0
        self._told = RankActivity([], [])
        self._number = 0

    def on_observe(self, link: PeerLink, message: ObserveRank, _body: Body) -> None:
        """Handle a lease."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if message.again or not message.lease:
            self._seen.clear()
            self._told = RankActivity([], [])
            self._told_at = 0.0
        self._number = message.number or self._number
        if message.lease:
            self._agent = link.peer
            self._until = time.monotonic() + message.lease
            self._period = message.period
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now >= self._until:
            self._timer = None
            return
        self._timer = self._system.node.poller.call_later(self._period / LOOKS, self._look)
        urgent = self._update(now)
        waited = now - self._told_at
        if waited >= (self._period / 2 if urgent else COUNTS):
            self._tell(now)

    def _update(self, now: float) -> bool:
        """Record which actors work. Return whether one differs from the last report in more than counts."""
        actors = self._system.actors
        urgent = False
        for key, actor in list(actors.items()):
            seen = self._seen.get(key)
            if seen is None:
                seen = self._seen[key] = _Seen()
                seen.calls = actor.calls
            working = actor.running is not None or actor.calls != seen.calls or bool(_tasks(actor))
            seen.calls = actor.calls
            if not working:
                seen.since = 0.0
            elif not seen.since:
                seen.since = actor.began or now
            told = seen.told
            urgent = urgent or told is None or bool(told.endpoint) != working or self._is_other(actor, told)
        return urgent or not self._seen.keys() <= actors.keys()

    @staticmethod
    def _is_other(actor: ActorInstance, told: ActorActivity) -> bool:
        running = actor.running
        return running is not None and running != told.endpoint

    def _tell(self, now: float) -> None:
        """Send the changes."""
        system = self._system
        ahead = time.time() - now
        changed: list[ActorActivity] = []
        cell, cell_since = "", 0.0
        for key, seen in self._seen.items():
            actor = system.actors.get(key)
            if actor is None:
                continue
            since = seen.since
            if actor.running is not None and now - actor.began > LONG_CALL:
                since = actor.began
            if actor.spec.tool:
                # Actors of tools are not shown, except for running a cell.
                if since and actor.running_for and not cell:
                    cell, cell_since = actor.running_for, since + ahead
                seen.told = ActorActivity(key, actor.name, "", "tool" if since else "")
                continue
            activity = ActorActivity(
                key,
                actor.name,
                actor.class_name,
                _endpoint(actor) if since else "",
                self._wall(since, ahead, seen.told),
                len(actor._queue),
                actor.calls,
                actor.failures,
            )
            if activity != seen.told:
                changed.append(activity)
                seen.told = activity
        gone = [key for key in self._seen if key not in system.actors]
        for key in gone:
            del self._seen[key]
        last = self._told
        if cell and cell == last.cell and abs(cell_since - last.cell_since) < LONG_CALL:
            cell_since = last.cell_since
        activity = RankActivity(changed, gone, cell, cell_since, system.sent, system.received, self._number)
        rest = (activity.cell, activity.cell_since, activity.sent, activity.received, activity.number)
        if changed or gone or rest != (last.cell, last.cell_since, last.sent, last.received, last.number):
            self._told = activity
            self._told_at = now
            system.node.send(self._agent, activity)

    @staticmethod
    def _wall(since: float, ahead: float, told: ActorActivity | None) -> float:
        """Convert a start to the host's clock, with the same result in each report."""
        if not since:
            return 0.0
        wall = since + ahead
        return told.since if told is not None and abs(told.since - wall) < 0.01 else wall


def _tasks(actor: ActorInstance) -> Collection[str]:
    """Return the running concurrent endpoints of an async actor."""
    return dict(getattr(actor, "_tasks", ())).values()


def _endpoint(actor: ActorInstance) -> str:
    return actor.running or next(iter(_tasks(actor)), "") or actor.latest or "__init__"


#: The time for actors to stop before the rank exits anyway (seconds).
STOP_TIMEOUT = 30.0
#: The time for the thread and process pools of user code to end (seconds).
EXECUTORS_TIMEOUT = 2.0
#: The time for other hosts to fetch the last large messages of a proc that ends (seconds).
DRAIN_TIMEOUT = 2.0

#: Created when the fork server loads this module, once for all ranks.
_decode_config = msgspec.msgpack.Decoder(RankConfig).decode


class Rank:
    """One proc, from its start to its end."""

    def __init__(self, config: RankConfig) -> None:
        self._config = config
        self.node = Node(config.ref.id, "rank", config.run_dir, config.ref.host, config.agent)
        self.node.refs.update({r.id: r for r in (config.agent, config.owner, config.root)})
        self.system = ActorSystem(self.node, config.root, config.mesh)
        self.system.agent = config.agent
        self.system.launch = config.launch
        if config.placement is not None:
            self.system.placements.adopt(config.agent.id, config.placement)
        self.system.main_driver = self._take_main
        self.system.on_end_proc = self._end
        if config.owner.id == config.root.id:  # then its output goes to the controller
            output_capture.marks.reads = lambda peer: peer in (self.system.root.id, config.agent.id)
            self.system.output_marks = output_capture.marks
        self.node.handle(Bootstrap, self._on_bootstrap)
        self.node.handle(ObserveRank, RankObserver(self.system).on_observe)
        if config.kept:
            self._keep_from(config.root)
            self.node.handle(Adopt, self._on_adopt)
        self._main_work: deque[Callable[[], None]] = deque()
        self._main_taken = False
        self._locks = LockGuard()
        self._ending: str | None = None
        # Makes this object the waitable of the main thread while it drives no actor.
        self._done = False
        self._parked: list[threading.Lock] = []

    def run(self) -> int:
        """Serve until told to end. Return the exit code."""
        set_system(self.system)
        self.node.listen()
        self.node.poller.calm = self._on_sigint
        signal.signal(signal.SIGINT, self.node.poller.calm)
        self.node.on_peer_dead.append(self._on_peer_dead)
        # Connect to the agent first: the agent then reports that this proc listens.
        self.node.link_to(self._config.agent.id)
        self.node.link_to(self._config.owner.id)
        while True:
            self._done = bool(self._main_work) or self._ending is not None
            if not self._done:
                self.node.poller.wait(self)
            if not self._main_work:
                break
            # An actor on the main thread must be driven to its end, even if the proc was told to end first.
            self._main_work.popleft()()
        self.system.stop_all_actors(self._ending or "", STOP_TIMEOUT)
        self._finalize()
        self.node.drain(DRAIN_TIMEOUT)
        _flush()
        return 0

    def _finalize(self) -> None:
        """Run user code's finalizers and exit handlers; the host agent kills the proc if they take too long."""
        if any(actor() is not None for actor in self.system.finalizing):
            gc.collect()  # actors in cycles
        # As at the end of an interpreter: executors end their processes and threads, which exit handlers wait for.
        ending = threading.Thread(target=_end_executors, name="monarch-executors", daemon=True)
        ending.start()
        ending.join(EXECUTORS_TIMEOUT)
        atexit._run_exitfuncs()

    def _notify(self) -> None:
        self._done = True
        self.node.poller.notify(self)

    # -- controllers that come and go ----------------------------------------------------------

    def _keep_from(self, root: ProcRef) -> None:
        """Continue after the end of this controller."""
        self.system.kept_from.add(root.id)
        self.node.may_return.add(root.id)

    def _on_adopt(self, _link: PeerLink, message: Adopt, _body: Body) -> None:
        """Give the new controller everything here that belonged to earlier controllers."""
        root = message.root
        system, node = self.system, self.node
        for actor in list(system.actors.values()):
            if actor.owner_proc.id in system.kept_from:
                actor.owner_proc = root
        self._keep_from(root)
        node.deaths.pop(root.id, None)
        node.refs[root.id] = root
        system.root = root
        # The controller is on this machine, so other hosts reach this proc the way they reach the controller.
        node.ref = node.refs[node.id] = msgspec.structs.replace(
            node.ref, gateway=root.gateway, gateway_address=root.gateway_address
        )

    # -- the main thread ------------------------------------------------------------------------

    def _take_main(self, drive: Callable[[], None]) -> bool:
        """Make the main thread drive this actor. Return False if it is not free."""
        if self._main_taken or self._ending is not None:
            return False
        self._main_taken = True

        def work() -> None:
            try:
                drive()
            finally:
                self._main_taken = False

        self._main_work.append(work)
        self._notify()
        return True

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        """Interrupt user code; the runtime itself is never interrupted."""
        if self._locks.postpones(signum, frame):
            return
        self.system.sigints += 1
        here = current.get()
        instance = here.actor_instance if here is not None else None
        if isinstance(instance, ActorInstance) and instance._interruptible:
            instance.interrupted_here()
            raise KeyboardInterrupt
        if self._bootstrapping:
            raise KeyboardInterrupt

    # -- bootstrap ------------------------------------------------------------------------------

    _bootstrapping = False

    def _on_bootstrap(self, link: PeerLink, message: Bootstrap, body: Body) -> None:
        if not len(body):
            acknowledge(link, message.call, message.rank)
            return
        # Messages behind it on the wire have to wait: before its bootstrap has returned, a proc runs nothing except
        # actors that the bootstrap creates. These get their own threads, as the main thread is taken.
        self.system.hold()
        self._main_taken = True
        data = bytes(body)
        self._main_work.append(lambda: self._bootstrap(link, message, data))
        self._notify()

    def _bootstrap(self, link: PeerLink, message: Bootstrap, body: bytes) -> None:
        token = current.set(Context(self.system.client, message.rank, shared(message.labels, message.sizes)))
        self._bootstrapping = True
        status, answer = OK, dumps(None)[0]
        try:
            result = loads(body, message.buffers)()
            import inspect

            if inspect.isawaitable(result):
                import asyncio

                asyncio.run(_awaited(result))
        except BaseException as e:
            status, answer = ERROR, fault_body(e)
            self.system.bootstrap_error = answer
        finally:
            self._bootstrapping = False
            current.reset(token)
        self._main_taken = False
        self.system.release()
        link.send(encode_header(Reply(message.call, message.rank, status)), answer)

    # -- the end --------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        if self._ending is None:
            self._ending = reason
            # An actor may be on the main thread; it has to end before run() continues.
            if self._main_taken:
                threading.Thread(
                    target=self.system.stop_all_actors,
                    args=(reason, STOP_TIMEOUT),
                    name="monarch-end",
                    daemon=True,
                ).start()
            self._notify()

    def _on_peer_dead(self, proc: str, _death: Death) -> None:
        if proc == self._config.agent.id:
            # Without its agent, nothing could stop or watch this proc.
            _flush()
            os._exit(1)


async def _awaited(result: Any) -> object:
    return await result


def _end_executors() -> None:
    callbacks: list[Callable[[], object]] = threading._threading_atexits  # type: ignore[attr-defined]
    while callbacks:
        try:
            callbacks.pop()()
        except Exception:
            traceback.print_exc()


def _flush() -> None:
    output_capture.flush()


def main(config: bytes) -> None:
    """Run a rank in this process, and exit with its code. Called in a fresh fork, or by ``python -m``."""
    decoded: RankConfig = _decode_config(config)
    if decoded.cpus:
        os.sched_setaffinity(0, decoded.cpus)
    if decoded.memory:
        _bind_memory(decoded.memory)
    if os.environ.pop(aliases.VARIABLE, None):
        aliases.enable_monarch_imports()
    logs.load_reports()  # if this is no fork
    _log_as_monarch()
    sys.argv = [f"monarch rank {decoded.rank} of {decoded.mesh}"]
    main_module.install_rank_main()
    after_import("inspect", main_module.find_files_of_classes)
    child_processes.install()
    output_capture.install()
    collectives.install()
    _seed_generators()
    sys.breakpointhook = _breakpoint
    extensions.use_display(os.environ.pop(environment.DISPLAY, ""))
    if extensions.display_module:
        _display_in_cells()
    _explain_signals()
    code = 1
    try:
        code = Rank(decoded).run()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        # Not an ordinary exit, which threads of user code would block.
        os._exit(code)


def _log_as_monarch() -> None:
    """Set logging defaults as programs written for Monarch expect them.

    The root logger is at INFO, and a record of an actor begins with its name, as in ``[actor=<root>.<train.Trainer
    trainer{'gpus': 0/2}>] step 3``. A program that configures logging itself changes this as it changes any default.
    Programs and cells that an actor of this package runs log as they do elsewhere.
    """
    logging.getLogger().setLevel(logging.INFO)
    for name, level in (("monarch_kernel", logging.WARNING), ("monarch_kernel.actors", logging.INFO)):
        logging.getLogger(name).setLevel(level)  # this package's own records are not for users; ``Actor.logger`` is
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    logging.lastResort = shown  # used while the program has set no handler
    make = logging.getLogRecordFactory()

    def with_actor(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        name = _logging_actor()
        if name:
            record.msg = f"[actor={name.replace('%', '%%') if record.args else name}] {record.msg}"
        return record

    logging.setLogRecordFactory(with_actor)


def _logging_actor() -> str:
    """Return the running actor, if it is a user's; "" otherwise."""
    here = current.get()
    if here is None or not here.actor_instance.creator:
        return ""
    instance: Any = here.actor_instance
    spec = instance._spec
    if spec.tool or spec.cls.__module__.startswith("monarch_kernel."):
        return ""
    owner = instance.creator if instance.creator != "root" else "<root>"
    return f"{owner}.<{class_label(spec.cls)} {instance.name}{instance.rank!r}>"


def _explain_signals() -> None:
    """Make the error of ``signal.signal`` off the main thread name the actor that runs on the main thread.

    A typical cause is a time limit by SIGALRM.
    """
    set_handler = signal.signal

    @functools.wraps(set_handler)
    def explained(signalnum: Any, handler: Any) -> object:
        if threading.current_thread() is threading.main_thread():
            return set_handler(signalnum, handler)
        raise ValueError(
            "signal handlers can be set in the main thread of a rank only, which runs its first actor (the cells, "
            "with %mesh up): spawn this actor first, or on procs of its own; or limit the time of the call at its "
            "caller, with get(timeout)"
        )

    signal.signal = explained


def _breakpoint(*args: object, **kwargs: object) -> object:
    """Implement `breakpoint()`: stop here for the controller's debugger. PYTHONBREAKPOINT works as usual."""
    if "PYTHONBREAKPOINT" in os.environ:
        return sys.__breakpointhook__(*args, **kwargs)
    extensions.rank_debugger().stop_here(sys._getframe(1))
    return None


def _display_in_cells() -> None:
    """Show figures and rich values in the cell that called for them, once this process has loaded their libraries."""

    def install(_module: object) -> None:
        extensions.display().install()

    after_import("IPython", install)
    after_import("matplotlib", install)
    names: Any = builtins
    names.display = lambda *objects, **options: extensions.display().display(*objects, **options)
    names.get_ipython = lambda: extensions.display().get()


#: The number of the system call set_mempolicy, by machine, and its mode MPOL_BIND.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_BIND = 2


def _bind_memory(nodes: Sequence[int]) -> None:
    """Restrict this process's memory to these NUMA nodes."""
    import ctypes

    words = max(nodes) // 64 + 1
    mask = (ctypes.c_uint64 * words)(*(sum(1 << n % 64 for n in nodes if n // 64 == word) for word in range(words)))
    call = _SET_MEMPOLICY.get(os.uname().machine)
    libc = ctypes.CDLL(None, use_errno=True)
    if call is None or libc.syscall(call, _BIND, mask, words * 64 + 1):
        why = os.strerror(ctypes.get_errno()) if call is not None else f"not on {os.uname().machine}"
        raise OSError(f"membind: memory cannot be bound to the NUMA nodes {list(nodes)} here: {why}")


class _Seeds:
    """The seeds of this process's random number generators."""

    torch: int | None = None  # the seed that torch has here
    children = 0


def _seed_generators() -> None:
    """Give this rank, and each process that it forks, separate random numbers, without importing anything.

    A rank is a fork of a process that may have loaded torch and NumPy, so it inherits the state of their generators,
    and a newly loaded torch has the same seed in every process. ``random`` reseeds itself in each fork. Generators that
    a user has seeded stay reproducible: torch keeps its state, and NumPy in a child of a rank is seeded from the rank's
    state and the child's number.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    after_import("torch", _seed_torch)
    os.register_at_fork(before=_count_child, after_in_child=_seed_child)


def _seed_torch(torch: Any) -> None:
    """Seed torch. CUDA uses the same seed on its first use."""
    torch.seed()
    _Seeds.torch = torch.initial_seed()


def _count_child() -> None:
    _Seeds.children += 1


def _seed_child() -> None:
    """Reseed a process that the rank, or one of its children, has forked."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        state = numpy_random.get_state()
        if isinstance(state, tuple):  # other kinds of generators have another state
            numpy_random.seed([*state[1][:8], state[2], _Seeds.children])
    torch = sys.modules.get("torch")
    # torch.seed() would also seed CUDA, which fails in a child of a process that has used CUDA.
    if torch is not None and _Seeds.torch is not None and torch.initial_seed() == _Seeds.torch:
        torch.default_generator.seed()
        _Seeds.torch = torch.initial_seed()
