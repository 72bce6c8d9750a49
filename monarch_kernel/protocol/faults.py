"""Convert exceptions for transport across a process boundary.

A `Fault` holds the readable parts (type, message, source lines) separately from the pickled exception, so that they can
be shown even if the pickle cannot be read or would run code. Frames of the runtime are marked and not shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import MemberDescriptorType, TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_kernel import programs
from monarch_kernel.protocol import serialize

if TYPE_CHECKING:
    from traceback import FrameSummary

#: The folders of the runtime's own files, which contain no user bugs.
RUNTIME_PREFIXES = tuple(
    os.path.join(programs.PACKAGE, part) + os.sep for part in ("runtime", "protocol", "debugger", "pool")
)

_MAX_FRAMES = 64
_HALF = _MAX_FRAMES // 2
_MAX_CHAIN = 16
_MAX_TEXT = 32 * 1024
_MAX_PICKLED = 1 << 20
_MAX_PART = 64 << 10
_PARTS, _WHOLE = 0, 1  # how Fault.pickled holds the exception: type, args and state; or as it pickles itself
_HEAPTYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, not in C

_CAUSE = "\nThe above exception was the direct cause of the following exception:\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n"


def _no_label(_file: str) -> str | None:
    return None


_label: Callable[[str], str | None] = _no_label


def label_files(label: Callable[[str], str | None] | None) -> None:
    """Show frames in this process with the label of their file (`Cell In[3]`), if it has one. None disables this."""
    global _label
    _label = label or _no_label


class FaultFrame(msgspec.Struct, array_like=True, frozen=True):
    """One line of a traceback."""

    file: str
    line: int
    function: str
    #: The source line without its indentation; markers under the part that ran may follow on the next line.
    source: str
    is_runtime: bool = False
    #: How many identical frames followed (recursion).
    repeated: int = 0

    def render(self) -> list[str]:
        """Format the frame as Python shows it. Reads the source line here if the other process had none."""
        import linecache

        label = _label(self.file)
        where = f'File "{self.file}"' if label is None else label
        lines = [f"  {where}, line {self.line}, in {self.function}"]
        source = self.source or linecache.getline(self.file, self.line).strip()
        lines += [f"    {line}" for line in source.splitlines()]
        if self.repeated:
            lines.append(f"  [Previous line repeated {self.repeated} more times]")
        return lines


class Fault(msgspec.Struct, array_like=True, frozen=True):
    """An exception in its parts, as recorded in the process where it was raised."""

    module: str
    qualname: str
    #: `str(exc)`
    message: str
    #: The text that Python prints below the frames: `ValueError: boom`, and notes.
    summary: str
    #: Innermost last.
    frames: list[FaultFrame]
    #: The number of frames omitted in the middle of `frames`.
    omitted: int = 0
    cause: Fault | None = None
    context: Fault | None = None
    #: The exceptions of an exception group.
    members: list[Fault] = []
    #: Used by `rebuild`; None if the exception cannot be pickled.
    pickled: bytes | None = None
    #: Whether it failed only because another rank failed, which ended its wait for that rank.
    of_peer: bool = False

    @property
    def type_name(self) -> str:
        """The exception's type as written in code; without `builtins`."""
        return self.qualname if self.module in ("builtins", "__main__") else f"{self.module}.{self.qualname}"

    @property
    def shown_frames(self) -> list[FaultFrame]:
        """The frames outside the runtime; if there are none, the innermost frame."""
        return [frame for frame in self.frames if not frame.is_runtime] or self.frames[-1:]

    @property
    def text(self) -> str:
        """Frames and message as Python shows them, chained exceptions first, without the runtime's frames."""
        return "\n".join(self.render())

    def render(self) -> list[str]:
        """Split `text` into lines."""
        lines: list[str] = []
        if self.cause is not None:
            lines += [*self.cause.render(), _CAUSE]
        elif self.context is not None:
            lines += [*self.context.render(), _CONTEXT]
        shown = self.shown_frames
        for at, frame in enumerate(self.frames):
            if self.omitted and at == _HALF:
                lines.append(f"  [{self.omitted} frames left out]")
            if frame in shown:
                lines += frame.render()
        lines += self.summary.split("\n")
        for number, member in enumerate(self.members, 1):
            lines.append(f"  +---------------- {number} ----------------")
            lines += [f"  | {line}" for part in member.render() for line in part.split("\n")]
        return lines

    def likeness(self) -> tuple[object, ...]:
        """Return a key that is equal for faults of the same kind raised at the same place, whatever their messages."""
        return (
            self.module,
            self.qualname,
            tuple((frame.file, frame.line, frame.function) for frame in self.shown_frames),
            self.cause and self.cause.likeness(),
            self.context and self.context.likeness(),
            tuple(member.likeness() for member in self.members),
        )

    def rebuild(self) -> BaseException | None:
        """Rebuild the original exception; None if this is not possible here. Runs its type's unpickling code."""
        if self.pickled is None:
            return None
        try:
            kind, content = serialize.loads(self.pickled)
            exc = _assemble(*content) if kind == _PARTS else content
        except Exception:  # user code may raise anything; the fault is readable without it
            return None
        return exc if isinstance(exc, BaseException) else None


encode_fault = msgspec.msgpack.Encoder().encode
decode_fault = msgspec.msgpack.Decoder(Fault).decode


def capture(exc: BaseException, skip_prefixes: tuple[str, ...] = ()) -> Fault:
    """Create a fault from `exc`. Never raises, whatever the exception's own methods do.

    Frames in files that start with one of `skip_prefixes` count as runtime frames, like those of this package. Runtime
    frames above the first frame of user code are dropped.
    """
    return _capture(exc, (*RUNTIME_PREFIXES, *skip_prefixes), set(), with_pickle=True)


def static_base(cls: type) -> type[BaseException]:
    """Find the nearest base of an exception class that is written in C, whose `__new__` runs no foreign code."""
    base: Any = cls
    while base.__flags__ & _HEAPTYPE:
        base = base.__base__
    return base


def _capture(exc: BaseException, prefixes: tuple[str, ...], seen: set[int], *, with_pickle: bool) -> Fault:
    seen.add(id(exc))

    def chained(other: BaseException | None) -> Fault | None:
        if other is None or id(other) in seen or len(seen) >= _MAX_CHAIN:
            return None
        return _capture(other, prefixes, seen, with_pickle=False)

    cause = chained(exc.__cause__)
    context = None
    if exc.__cause__ is None and not exc.__suppress_context__:
        context = chained(exc.__context__)
    members = [fault for part in _members(exc) if (fault := chained(part)) is not None]
    frames, omitted = _frames(exc.__traceback__, prefixes)
    cls = type(exc)
    return Fault(
        module=_clean(str(cls.__module__)),
        qualname=_clean(cls.__qualname__),
        message=_message(exc),
        summary=_summary(exc),
        frames=frames,
        omitted=omitted,
        cause=cause,
        context=context,
        members=members,
        pickled=_pickle(exc) if with_pickle else None,
    )


def _members(exc: BaseException) -> tuple[BaseException, ...]:
    return getattr(exc, "exceptions", ()) if issubclass(type(exc), BaseExceptionGroup) else ()


def _frames(tb: TracebackType | None, prefixes: tuple[str, ...]) -> tuple[list[FaultFrame], int]:
    import traceback

    try:
        summaries = list(traceback.extract_tb(tb))
    except Exception:  # the loader of a module, or a lazy linecache entry, may be broken
        return [], 0
    is_user = [not summary.filename.startswith(prefixes) for summary in summaries]
    # If all frames are the runtime's, keep them: the bug may then be in the runtime.
    first = is_user.index(True) if True in is_user else 0
    frames: list[FaultFrame] = []
    for summary, user in zip(summaries[first:], is_user[first:], strict=True):
        file, line, function = _clean(summary.filename), summary.lineno or 0, _clean(summary.name)
        last = frames[-1] if frames else None
        if last is not None and (last.file, last.line, last.function) == (file, line, function):
            frames[-1] = msgspec.structs.replace(last, repeated=last.repeated + 1)
        else:
            frames.append(FaultFrame(file, line, function, _source(summary), not user))
    omitted = max(0, len(frames) - _MAX_FRAMES)
    return (frames[:_HALF] + frames[-_HALF:] if omitted else frames), omitted


def _source(summary: FrameSummary) -> str:
    """Format the source line and its markers, in the layout of this Python's traceback module."""
    import traceback

    lines = "".join(traceback.StackSummary.from_list([summary]).format()).splitlines()[1:]
    return _clean("\n".join(line.removeprefix("    ") for line in lines))


def _message(exc: BaseException) -> str:
    try:
        return _clean(str(exc))
    except Exception:  # user code
        return "<exception str() failed>"


def _summary(exc: BaseException) -> str:
    import traceback

    try:
        return _clean("".join(traceback.format_exception_only(exc)).rstrip("\n"))
    except Exception:  # user code in __str__, __notes__ or the attributes of a SyntaxError
        return f"{_clean(type(exc).__qualname__)}: {_message(exc)}"


def _clean(text: str) -> str:
    """Make text safe to send: bounded, and without lone surrogates."""
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}… ({len(text) - _MAX_TEXT} more characters)"
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _pickle(exc: BaseException) -> bytes | None:
    """Pickle the exception for `Fault.rebuild`: whole, or else with unpicklable arguments replaced by their repr."""
    try:
        cls: Any = type(exc)
        base = static_base(cls)
        args, state = exc.args, vars(exc)
        if (cls.__reduce__, cls.__reduce_ex__) != (base.__reduce__, base.__reduce_ex__):
            pickled = _dumps_small((_WHOLE, exc), _MAX_PICKLED)
            if pickled is None and hasattr(cls, "without_values"):  # an error of a call on a mesh
                pickled = _dumps_small((_WHOLE, cls.without_values(exc)), _MAX_PICKLED)
        else:
            # Its type defines no pickling, and unpickling would call its __init__ with `args`, which fails if
            # __init__ takes other arguments. So `_assemble` rebuilds it without __init__.
            args, state = _parts(exc)
            pickled = _dumps_small((_PARTS, (cls, args, state)), _MAX_PICKLED)
        if pickled is None:
            args = tuple(arg if _dumps_small(arg, _MAX_PART) else _safe_repr(arg) for arg in args)
            state = {name: value for name, value in state.items() if _dumps_small(value, _MAX_PART)}
            pickled = _dumps_small((_PARTS, (cls, args, state)), _MAX_PICKLED)
        return pickled
    except Exception:  # user code in metaclasses, or parts that the type refuses
        return None


def _parts(exc: BaseException) -> tuple[tuple[object, ...], dict[str, object]]:
    """Take an exception apart into the arguments and attributes from which `_assemble` creates an equal one."""
    reduced: Any = exc.__reduce__()
    args, state = reduced[1], dict((reduced[2] if len(reduced) > 2 else None) or {})
    for cls in type(exc).__mro__:
        if cls.__flags__ & _HEAPTYPE:
            for name, member in vars(cls).items():
                if isinstance(member, MemberDescriptorType) and hasattr(exc, name):  # of __slots__
                    state[name] = getattr(exc, name)
    if isinstance(exc, AttributeError):
        state.pop("obj", None)  # the object that lacks the attribute: often the whole actor
    return args, state


def _dumps_small(value: object, limit: int) -> bytes | None:
    try:
        pickled = serialize.dumps_flat(value)
    except Exception:  # pickling runs user code
        return None
    return pickled if len(pickled) <= limit else None


def _safe_repr(value: object) -> str:
    try:
        return _clean(repr(value))
    except Exception:  # user code
        return f"<{type(value).__qualname__} object>"


def _assemble(cls: type[BaseException], args: tuple[object, ...], state: dict[str, object]) -> BaseException:
    base = static_base(cls)
    exc = base.__new__(cls, *args)
    base.__init__(exc, *args)
    for name, value in state.items():
        base.__setattr__(exc, name, value)  # not the type's own, which a frozen dataclass makes raise
    return exc
