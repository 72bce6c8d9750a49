"""The comm of views, in real kernels: the feed, while cells run too, and what a closed page leaves: nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.kernel.harness import Bell, Kernel
from tests.kernel.views.page import Page


@pytest.fixture(scope="module")
def mesh(kernel: Kernel) -> Kernel:
    """The file's kernel, with a mesh `m` of 4 ranks in use."""
    kernel.ok("%mesh up --procs 4")
    return kernel


@pytest.fixture
def page(mesh: Kernel) -> Iterator[Page]:
    """A page that shows the kernel's meshes."""
    page = Page(mesh)
    page.lease()
    yield page
    page.close()


def test_a_page_gets_all_that_is_there(page: Page) -> None:
    key = page.key("m")
    meshes, ranks = page.state()
    assert meshes[key]["sizes"] == [4]
    assert sorted(ranks[key]) == [0, 1, 2, 3]
    page.rank("m", 3, state="idle")
    alive = page.until(lambda: page.of_kind("alive"))[0]
    assert alive["version"] >= 1


def test_changes_come_while_a_cell_runs_and_the_kernel_stays_busy(mesh: Kernel, page: Page, bell: Bell) -> None:
    page.rank("m", 2, state="idle")
    mesh.ok("fired = []\nget_ipython().events.register('pre_execute', lambda: fired.append(1))")
    fired = int(mesh.ok("len(fired)").text)
    mesh.ok(f"%%mesh\n{bell.code()}")
    cell = mesh.send("%%mesh -r 2\nring()\nimport time\nwhile True: time.sleep(0.01)")
    bell.wait()
    page.until(lambda: cell.msg_id in page.busy_with)
    page.rank("m", 2, state="running")
    page.statuses.clear()
    begin = len(page.messages)
    page.lease()  # a message to the kernel in the middle of the cell: it does not even say that it is busy with it
    page.until(lambda: page.of_kind("alive", begin))
    assert page.statuses == []
    page.beside()  # any other message on a subshell, such as a widget's
    page.until(lambda: page.statuses == ["busy", "idle", "busy"])
    mesh.interrupt()
    assert cell.wait().ename == "MeshCellInterrupt"
    page.rank("m", 2, state="idle")
    assert int(mesh.ok("len(fired)").text) - fired == 3  # one for each cell, and none for what the page sent


def test_two_pages_see_the_same(mesh: Kernel, page: Page) -> None:
    other = Page(mesh)
    other.lease()
    try:
        assert other.key("m") == page.key("m")
        other.ask("code", other.key("m"), action="use")
        assert not page.of_kind("answer")
    finally:
        other.close()


def test_a_page_that_has_missed_something_gets_all_again(page: Page) -> None:
    page.key("m")
    begin = len(page.messages)
    page.send({"kind": "again"})
    assert page.until(lambda: page.of_kind("snapshot", begin))


@pytest.mark.parametrize("how", ["close", "vanish"])
def test_a_page_that_is_gone_costs_nothing(start_kernel: Callable[..., Kernel], how: str) -> None:
    kernel = start_kernel()
    kernel.ok("%mesh up --procs 2\nfrom monarch_kernel.watch import feed\nfeed.LEASE = 2.0")
    named = "[t.name for t in threading.enumerate() if t.name.startswith(('monarch-view', 'monarch-watch'))]"
    threads = f"import threading\n{named}"
    assert kernel.ok(threads).text == "[]"
    page = Page(kernel)
    page.lease()
    page.key("m")
    page.send({"kind": "follow", "id": "1", "mesh": page.key("m"), "ranks": [], "search": ""})
    assert "monarch-view" in kernel.ok(threads).text
    getattr(page, how)()
    wait_until(lambda: kernel.ok(threads).text == "[]", "the feed ends")
    assert kernel.ok("import threading\n'monarch-log' in [t.name for t in threading.enumerate()]").text == "False"


def test_a_cell_does_not_end_the_feed_of_a_page_whose_messages_wait_for_it(
    start_kernel: Callable[..., Kernel], tmp_path: Path
) -> None:
    kernel = start_kernel()
    kernel.ok(
        "%mesh up --procs 2\nimport os, time\nfrom monarch_kernel.watch import feed\n"
        "from monarch_kernel.widgets import connection\n"
        "feed.LEASE, connection.RENEW = 1.0, 0.1"
    )
    page = Page(kernel, subshell=False)
    page.lease()
    key = page.key("m")
    end = tmp_path / "end"
    cell = kernel.send(f"while not os.path.exists({str(end)!r}): time.sleep(0.01)")
    begin = len(page.messages)
    page.until(lambda: len(page.of_kind("alive", begin)) > 15)  # for longer than the lease
    assert not page.of_kind("snapshot", begin), "the feed has not ended meanwhile"
    end.touch()
    assert cell.wait().status == "ok"
    page.rank("m", 1, state="idle")
    assert page.key("m") == key
    page.close()


def test_a_plain_kernel_with_the_extension_has_the_same(start_kernel: Callable[..., Kernel]) -> None:
    kernel = start_kernel("python3")
    kernel.ok("%load_ext monarch_kernel")
    kernel.ok("%mesh up --procs 2")
    page = Page(kernel)
    page.lease()
    page.rank("m", 1, state="idle")
    assert page.do("use", page.key("m")) == "mesh m: 2 ranks (gpus=2), in use"
    page.close()
    kernel.ok("%unload_ext monarch_kernel\n%reload_ext monarch_kernel")
    assert page
