"""What `%mesh ls` and `%mesh status` show, from plain data. No mesh."""

from __future__ import annotations

from monarch_kernel.kernel.output.formatters import (
    KeptState,
    MeshList,
    MeshStatus,
    MeshSummary,
    RankSummary,
    kept_elsewhere,
)
from monarch_kernel.meshes import KeptInfo, KeptMesh


def test_the_list_of_meshes() -> None:
    meshes = [MeshSummary("m", {"hosts": 2, "gpus": 4}, 8, 7, in_use=True), MeshSummary("other", {}, 1, None)]
    assert repr(MeshList(meshes)).splitlines() == [
        "   mesh   dimensions       ranks  alive",
        "*  m      hosts=2, gpus=4      8      7",
        "   other                       1      ?",
    ]


def test_kept_meshes_say_which_process_holds_them() -> None:
    told = [
        KeptState(here=True),
        KeptState(here=True, lost=True),
        KeptState(holder=42),
        KeptState(free_for=65.0),
        KeptState(free_for=1.0, ends_in=7200.0),
    ]
    shown = repr(MeshList([MeshSummary("m", {}, 1, 1, kept=state) for state in told])).splitlines()
    assert [line.partition("     1      1  ")[2] for line in shown[1:]] == [
        "by this kernel",
        "no longer: its host agent died; %mesh heal starts another",
        "by process 42",
        "free for 1 min 5 s",
        "free for 1.0 s, ends in 2 h 0 min",
    ]


def test_meshes_that_no_kernel_holds() -> None:
    mesh = KeptMesh("a", {"gpus": 2}, 2, 1)
    info = KeptInfo("k", 1, "ipc://x", "h", 0.0, free_since=100.0, idle=50.0, meshes=[mesh])
    (found,) = kept_elsewhere(info, 110.0)
    assert (found.name, found.ranks, found.alive) == ("k: a", 2, 1)
    assert found.kept == KeptState(free_for=10.0, ends_in=40.0)
    info.meshes, info.held_by = [], 7
    assert [(each.name, each.kept) for each in kept_elsewhere(info, 110.0)] == [("k", KeptState(holder=7))]


def test_the_status_of_a_mesh() -> None:
    ranks = [
        RankSummary(0, {"gpus": 0}, "alive", 12, "h", "In[3]:4", 10**8, 3.4, 100.0),
        RankSummary(1, {"gpus": 1}, "dead", 13, "h", "it was killed"),
    ]
    lines = repr(MeshStatus("m", ranks, KeptState(here=True))).splitlines()
    assert lines[0] == "mesh m"
    assert lines[2].split() == [
        "0",
        "gpus=0",
        "alive",
        "12",
        "h",
        "100",
        "MB",
        "3",
        "%",
        "1",
        "min",
        "40",
        "s",
        "In[3]:4",
    ]
    assert lines[3].split() == ["1", "gpus=1", "dead", "13", "h", "it", "was", "killed"]
    assert repr(MeshStatus("m", ranks, KeptState(lost=True))).startswith("mesh m: kept no longer: its host agent died")
    assert MeshStatus("m", ranks)._repr_html_().count("<tr>") == 3


def test_gpus_that_ranks_use_and_share() -> None:
    ranks = [
        RankSummary(0, {"gpus": 0}, "alive", 12, "h", "idle", gpus={0: (2 * 10**9, 61.0)}),
        RankSummary(1, {"gpus": 1}, "alive", 13, "h", "idle", gpus={0: (10**9, 61.0), 1: (10**8, 0.0)}),
        RankSummary(2, {"gpus": 2}, "alive", 14, "other", "idle", gpus={0: (10**9, 5.0)}),
    ]
    lines = repr(MeshStatus("m", ranks)).splitlines()
    assert lines[1].split()[-1] == "gpu"
    assert lines[2].endswith("0: 2.0 GB, 61 %") and lines[3].endswith("0: 1.0 GB, 61 %, 1: 100 MB, 0 %")
    assert lines[-1] == "ranks 0-1 share GPU 0 of h"
