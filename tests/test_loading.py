"""msgspec is loaded without typing_extensions and platform, which all other imports find; and collection pauses."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from monarch_kernel.loading import NoCollection
from tests.waiting import patience

_WHILE_OTHERS_IMPORT = """
import builtins, sys, threading
from monarch_kernel.loading import load_msgspec

found = []
def other():
    import typing_extensions
    found.append(typing_extensions.NotRequired)

real, threads = builtins.__import__, []
def importing(name, *others):  # another thread imports it while msgspec is being loaded
    if name == "typing" and not threads and "msgspec" in sys.modules:
        threads.append(threading.Thread(target=other))
        threads[0].start()
        threads[0].join(30)
    return real(name, *others)

builtins.__import__ = importing
finders = list(sys.meta_path)
load_msgspec()
builtins.__import__ = real
assert threads and found and sys.meta_path == finders
"""
_AS_BEFORE = """
from monarch_kernel.loading import load_msgspec
load_msgspec()
import sys
assert not {"typing_extensions", "platform"} & sys.modules.keys()
import platform, typing, typing_extensions, uuid, msgspec
assert platform.system() == "Linux" and uuid._LINUX and not uuid._AIX and uuid.uuid1() != uuid.uuid4()

class Point(typing_extensions.TypedDict):
    x: int
    y: typing_extensions.NotRequired[int]

assert msgspec.json.decode(b'{"x": 1}', type=Point) == {"x": 1}
class Limited(msgspec.Struct):
    n: typing_extensions.Annotated[int, msgspec.Meta(ge=0)]
try:
    msgspec.convert({"n": -1}, Limited)
except msgspec.ValidationError:
    pass
else:
    raise AssertionError
"""


@pytest.mark.parametrize("program", [_WHILE_OTHERS_IMPORT, _AS_BEFORE], ids=["another thread", "as before"])
def test_typing_extensions_can_be_imported_all_the_same(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=patience(60))


def test_collection_is_as_before_the_block() -> None:
    assert gc.isenabled()
    with NoCollection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with NoCollection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
