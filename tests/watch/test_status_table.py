"""The table of a mesh: the worst first, and groups where there are many ranks."""

from __future__ import annotations

from monarch_kernel.watch import Board
from monarch_kernel.watch.board import ActorsFact, Condition, FailureFact, HostFact, MeshFact, MeshMark
from monarch_kernel.watch.model import ActorView, RankState
from monarch_kernel.watch.status_table import StatusTable, status_tables
from monarch_kernel.widgets.mesh_display import mesh_html


def board_of(ranks: int) -> Board:
    """A mesh of ranks that are up, eight on each host."""
    board = Board()
    procs = tuple(f"p{rank}" for rank in range(ranks))
    hosts = tuple(f"h{rank // 8}" for rank in range(ranks))
    names = {key: f"node{key}" for key in hosts}
    board.apply(MeshFact("m", "train", ("gpus",), (ranks,), procs, hosts, names), 100.0)
    for proc in procs:
        board.apply(Condition(proc, RankState.STARTING, False), 100.0)
    return board


def table_of(board: Board) -> StatusTable:
    (table,) = status_tables(board.snapshot(), 160.0)
    return table


def test_the_worst_rank_is_first_with_its_cause() -> None:
    board = board_of(4)
    board.apply(ActorsFact("p1", {"a": ActorView("trainer", endpoint="step", since=130.0, waiting=2)}), 131.0)
    board.apply(Condition("p3", RankState.DEAD, True, cause="killed by SIGKILL"), 140.0)
    board.apply(FailureFact("death", "killed by SIGKILL", ("p3",)), 140.0)
    table = table_of(board)
    assert table.states == (RankState.DEAD, RankState.RUNNING, RankState.IDLE, RankState.IDLE)
    assert table.view.headings == ["", "rank", "state", "for", "doing", "waiting", "host", "why"]
    assert table.view.rows[0] == ["✖", "3", "dead", "20 s", "", "", "nodeh0", "killed by SIGKILL"]
    assert table.view.rows[1] == ["▶", "1", "running", "30 s", "trainer.step", "2", "nodeh0", ""]
    assert table.view.caption == "train (gpus=4) · ✖ 1 dead · ▶ 1 running · ○ 2 idle"
    assert table.view.note == "20 s ago: rank 3: killed by SIGKILL"


def test_hosts_that_end_soon_are_told_of_with_what_to_do() -> None:
    board = board_of(48)
    assert "walltime" not in table_of(board).view.caption
    for host in range(6):
        board.apply(HostFact(f"h{host}", {"ends_at": 200.0 + host, "then": "save what you need"}), 150.0)
    said = "the walltime of nodeh0, nodeh1, nodeh2, nodeh3 and 2 more ends in 40 s: save what you need"
    assert table_of(board).view.caption.endswith(said)
    assert said in mesh_html(board.snapshot(), "m", 160.0)
    assert "walltime" not in mesh_html(board.snapshot(), "m", 210.0)  # they have ended


def test_many_ranks_are_groups_that_do_the_same() -> None:
    board = board_of(1024)
    for rank in range(1000):
        board.apply(ActorsFact(f"p{rank}", {"a": ActorView("trainer", endpoint="step", since=130.0)}), 131.0)
    board.apply(Condition("p7", RankState.DEAD, True, cause="out of memory"), 140.0)
    board.apply(MeshMark("m", {"hang": "rank 7 is gone"}), 141.0)
    rows = [row[1:5] for row in table_of(board).view.rows]
    assert rows == [
        ["7", "dead", "20 s", ""],
        ["0-6,8-999", "running", "30 s", "trainer.step"],
        ["1000-1023", "idle", "1 min 0 s", ""],
    ]
    assert table_of(board).view.caption.endswith("hangs: rank 7 is gone")


def test_a_mesh_or_some_of_its_ranks_can_be_chosen() -> None:
    snapshot = board_of(4).snapshot()
    assert status_tables(snapshot, 160.0, "other") == []
    (table,) = status_tables(snapshot, 160.0, "m", (1, 2))
    assert [row[1] for row in table.view.rows] == ["1", "2"]
