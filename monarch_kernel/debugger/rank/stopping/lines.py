"""Map a breakpoint's line to a code object, and find the code objects that are loaded."""

from __future__ import annotations

import gc
import inspect
import linecache
import opcode
from collections.abc import Callable, Iterator
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, FunctionType, GeneratorType

from monarch_kernel.thread_frames import current_frames

# The types that have code, and the attribute that contains it.
_CODE_OF: dict[type, str] = {
    FunctionType: "__code__",
    GeneratorType: "gi_code",
    CoroutineType: "cr_code",
    AsyncGeneratorType: "ag_code",
}
_RESUME: int = opcode.opmap["RESUME"]


def nested(code: CodeType) -> list[CodeType]:
    """Return the code objects of functions, classes and comprehensions directly inside `code`."""
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def tree(code: CodeType) -> Iterator[CodeType]:
    """Yield `code`, and all code within it."""
    yield code
    for inner in nested(code):
        yield from tree(inner)


def own_lines(code: CodeType) -> list[int]:
    """Return the lines at which `code` itself can stop, in order."""
    instructions = code.co_code
    begin = next((i for i in range(0, len(instructions), 2) if instructions[i] == _RESUME), -2)
    # Threads cannot stop at the instructions before the body, which create a generator or enter the frame.
    return sorted({line for _, end, line in code.co_lines() if line and end > begin + 2})


def bind(code: CodeType, line: int) -> int | None:
    """Return the line of `code` at which a breakpoint at `line` stops; None if `line` is not in this code.

    A line without code is moved to the next line with code in the same function. The head of a function is moved to the
    first line of its body, and is not bound in the code that defines the function.
    """
    lines = own_lines(code)
    inner = nested(code)
    if not lines:
        return None
    if _heads(code, line, lines[0]):
        return lines[0]
    if line in lines:
        defined = any(_heads(other, line, (own_lines(other) or [0])[0]) for other in inner)
        body_of_class = not _is_body(code) and line == code.co_firstlineno and code.co_name != "<module>"
        return None if defined or body_of_class else line
    if not code.co_firstlineno <= line <= _last_line(code):
        return None
    if any(other.co_firstlineno <= line <= _last_line(other) for other in inner):
        return None
    if line < lines[0] and _has_code(code.co_filename, range(line, lines[0])):
        return None  # parts of a cell all begin at line 1: the line is in another part
    return next((own for own in lines if own > line), None)


def _has_code(file: str, lines: range) -> bool:
    """Return whether any of these lines is code, rather than empty, a comment, or the `%%mesh` line of a cell."""
    texts = [linecache.getline(file, line).strip() for line in lines]
    return any(text and not text.startswith(("#", "%%")) for text in texts)


def _is_body(code: CodeType) -> bool:
    """Return whether it is the code of a function, rather than of a class or a module."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED)


def _heads(code: CodeType, line: int, first: int) -> bool:
    """Return whether `line` is in the head of a named function whose body begins at `first`."""
    if not _is_body(code) or code.co_name.startswith("<") or not code.co_firstlineno <= line <= first:
        return False
    if line == first:
        return line == code.co_firstlineno  # def f(): return 1
    # Decorators run as part of the code that defines the function.
    return not linecache.getline(code.co_filename, line).lstrip().startswith("@")


def _last_line(code: CodeType) -> int:
    return max((line for part in tree(code) for _, _, line in part.co_lines() if line), default=0)


def running_frames() -> Iterator[tuple[int, FrameType]]:
    """Yield every running frame of this process, with its thread: thread by thread, innermost first."""
    for thread, innermost in current_frames().items():
        frame: FrameType | None = innermost
        while frame is not None:
            yield thread, frame
            frame = frame.f_back


def loaded_codes(wanted: Callable[[str], object]) -> list[CodeType]:
    """Return all code objects with a wanted `co_filename`, of functions, running frames and suspended generators.

    Code that the garbage collector does not see (`gc.freeze`) is found once it runs.
    """
    matches: dict[str, object] = {}
    found: dict[int, CodeType] = {}
    for code in _roots():
        name = code.co_filename
        match = matches.get(name, matches)
        if match is matches:
            match = matches[name] = wanted(name)
        if match:
            found[id(code)] = code
    for code in list(found.values()):
        found.update((id(inner), inner) for inner in tree(code))
    return list(found.values())


def _roots() -> Iterator[CodeType]:
    for _, frame in running_frames():
        yield frame.f_code
    # There may be millions of objects, so one comprehension filters them.
    things: list[object] = [thing for thing in gc.get_objects() if type(thing) in _CODE_OF]
    for thing in things:
        yield getattr(thing, _CODE_OF[type(thing)])
