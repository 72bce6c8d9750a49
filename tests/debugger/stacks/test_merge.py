"""Stacks of many ranks as one tree: as data, as text, as HTML. Without any process."""

from __future__ import annotations

import json
import random
from html.parser import HTMLParser
from pathlib import Path

import pytest

from monarch_kernel.actor import Extent
from monarch_kernel.debugger.controller.stacks import Stacks
from monarch_kernel.debugger.controller.stacks.merge import MOST_BRANCHES, StackBranch, continuations_of, merge
from monarch_kernel.debugger.model.stops import CODE, ENDPOINT, NATIVE, TASK, THREAD, Stack, StackFrame, StackSnapshot
from monarch_kernel.debugger.source_locations import LIBRARY, USER, SourceLocation

TORCH = "/v/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"
EIGHT = Extent(("hosts", "gpus"), (2, 4))


def user(name: str, line: int, source: str = "", **more: object) -> StackFrame:
    return StackFrame(SourceLocation("/w/train.py", line, name, USER), source, **more)  # type: ignore[arg-type]


def library(name: str, line: int, file: str = TORCH) -> StackFrame:
    return StackFrame(SourceLocation(file, line, name, LIBRARY))


def native(name: str, module: str = "/usr/lib/libc.so.6") -> StackFrame:
    return StackFrame(SourceLocation(module, 0, name, NATIVE))


MAIN = user("main", 30, "step(batch)")
REDUCES = (MAIN, user("step", 20, "dist.all_reduce(g)", span=(0, 18)), library("wrapper", 80), library("all_reduce", 9))
LOADS = (MAIN, user("load", 12, "time.sleep(30)"))


def rank(*stacks: Stack, **more: object) -> StackSnapshot:
    return StackSnapshot(100, stacks, **more)  # type: ignore[arg-type]


def endpoint(*frames: StackFrame, name: str = "trainer.step", **more: object) -> Stack:
    return Stack(ENDPOINT, name, frames, **more)  # type: ignore[arg-type]


def shown(snapshots: dict[int, StackSnapshot], extent: Extent = EIGHT, **more: object) -> Stacks:
    return Stacks("m", extent, range(extent.nelements), snapshots, **more)  # type: ignore[arg-type]


def test_ranks_share_a_path_up_to_where_they_diverge() -> None:
    merged = merge({0: rank(endpoint(*REDUCES)), 1: rank(endpoint(*LOADS)), 2: rank(endpoint(*REDUCES))})
    (root,) = merged.roots
    assert (root.kind, root.name, root.ranks) == (ENDPOINT, "trainer.step", [0, 1, 2])
    (main,) = root.children
    assert main.ranks == [0, 1, 2] and len(continuations_of(main)) > 1 and not main.here
    load, step = main.children
    assert (load.frame.place.name, load.ranks, load.here) == ("load", [1], [1])  # the fewest ranks first
    assert (step.ranks, step.here) == ([0, 2], [])
    (wrapper,) = step.children
    assert [node.here for node in wrapper.children] == [[0, 2]]
    assert [(each.ranks, each.idle) for each in merged.classes] == [((1,), False), ((0, 2), False)]


def test_a_stack_that_ends_where_others_go_on() -> None:
    merged = merge({0: rank(endpoint(MAIN)), 1: rank(endpoint(*LOADS))})
    (main,) = merged.roots[0].children
    assert len(continuations_of(main)) > 1 and main.here == [0] and main.children[0].ranks == [1]


def test_the_text() -> None:
    snapshots = {at: rank(endpoint(*(LOADS if at == 5 else REDUCES))) for at in range(6)}
    snapshots[6] = rank()
    stacks = shown(snapshots, dead={7: "killed by SIGKILL"})
    assert stacks.text() == (
        "8 ranks of mesh m: 3 different stacks, 1 dead\n"
        "[7] dead: killed by SIGKILL  (hosts=1,gpus=3)\n"
        "\n"
        "[6] idle: waiting for a message  (hosts=1,gpus=2)\n"
        "\n"
        "[0-5] trainer.step()  (hosts=0,gpus=0-3; hosts=1,gpus=0-1)\n"
        "  train.py:30 in main  step(batch)\n"
        "  ├─ [5]  (hosts=1,gpus=1)\n"
        "  │    train.py:12 in load  time.sleep(30)\n"
        "  └─ [0-4]  (hosts=0,gpus=0-3; hosts=1,gpus=0)\n"
        "       train.py:20 in step  dist.all_reduce(g)\n"
        "       · torch: wrapper › all_reduce  (torch/distributed/distributed_c10d.py:9)"
    )


def test_all_at_the_same_place() -> None:
    stacks = shown({at: rank(endpoint(*LOADS)) for at in range(8)})
    assert stacks.headline == "8 ranks of mesh m, all at the same place"
    assert "hosts" not in stacks.text()


def test_all_idle() -> None:
    stacks = shown({at: rank() for at in range(8)})
    assert stacks.text().splitlines()[-1] == "[0-7] idle: waiting for a message"
    assert stacks.idle == tuple(range(8)) and stacks.classes[0].idle


def test_a_mesh_without_ranks_that_tell() -> None:
    stacks = shown({}, Extent(("gpus",), (2,)), unread={0: "no py-spy", 1: "no py-spy"})
    assert stacks.text() == "2 ranks of mesh m: 2 unknown\n[0-1] unknown: no py-spy"


def test_library_frames_take_one_line() -> None:
    deep = (MAIN, *(library(f"f{at}", at + 1) for at in range(20)), user("hook", 5, "x = 1"))
    text = shown({at: rank(endpoint(*deep)) for at in range(8)}).text()
    assert "· torch: f0 › … 18 … › f19  (torch/distributed/distributed_c10d.py:20)" in text
    assert len(text.splitlines()) == 6


def test_native_frames_of_all_libraries_take_one_line_and_merge() -> None:
    ends = (native("wait", "/v/libtorch.so"), native("?", "/v/libtorch.so"), native("poll"))
    text = shown({at: rank(endpoint(MAIN, *ends)) for at in range(8)}).text()
    assert text.splitlines()[-1] == "  » native: wait › poll  (libc.so.6)"


@pytest.mark.parametrize(
    "name, shown",
    [
        ("clock_nanosleep", "clock_nanosleep"),
        ("torch::autograd::Engine::execute(std::vector<int> const&)", "Engine::execute"),
        ("c10d::Reducer::run<std::pair<int, long> >", "Reducer::run"),
        ("std::function<void (int)>::operator()", "function::operator"),
        ("?", "?"),
    ],
)
def test_names_of_native_functions_are_short(name: str, shown: str) -> None:
    text = shown_native(native(name))
    assert f"» native: {shown}  (" in text


def shown_native(*frames: StackFrame) -> str:
    return shown({at: rank(endpoint(MAIN, *frames)) for at in range(8)}).text()


def test_where_a_long_chain_of_native_functions_is_stays_to_be_seen() -> None:
    line = shown_native(*(native(f"a_rather_long_name_of_a_function_{at}") for at in range(12))).splitlines()[-1]
    assert "function_0 › " in line and " › a_rather_long_name_of_a_function_11  (libc.so.6)" in line


def test_recursions_of_different_depths_are_the_same_place() -> None:
    snapshots = {at: rank(endpoint(MAIN, user("down", 7, "down(n - 1)", times=3 + at))) for at in range(8)}
    stacks = shown(snapshots)
    assert "train.py:7 in down ×3–10  down(n - 1)" in stacks.text()
    assert len(stacks.classes) == 1


def test_concurrent_work_of_a_rank_is_no_divergence() -> None:
    tasks = [Stack(TASK, "go", (MAIN, user(name, line))) for name, line in (("one", 1), ("two", 2))]
    stacks = shown({at: rank(*tasks) for at in range(8)})
    assert "├─ [0-7] 1 of 2 at once\n" in stacks.text()
    assert "ranks diverge here" not in stacks.html()
    assert len(stacks.classes) == 1


def test_the_number_of_equal_threads_is_no_difference() -> None:
    worker = Stack(THREAD, "pool", LOADS)
    merged = merge({0: rank(worker), 1: rank(worker, worker, worker)})
    assert [each.ranks for each in merged.classes] == [(0, 1)]
    assert merged.roots[0].ranks == [0, 1]
    assert merged.roots[0].children[0].children[0].counts == {1: 3}
    stacks = shown({0: rank(worker), 1: rank(worker, worker, worker)}, Extent(("gpus",), (2,)))
    assert stacks.text().splitlines()[-1] == "    1–3 of these at once"
    assert "1–3 of these at once" in stacks.html()


def test_states_and_values_are_shown_by_rank() -> None:
    snapshots = {
        at: rank(endpoint(*LOADS, state="stopped by the debugger" if at == 2 else "", values=(("n", str(at // 6)),)))
        for at in range(8)
    }
    text = shown(snapshots).text()
    assert "■ [2] stopped by the debugger" in text
    assert "n = 1 [6-7] · 0 [0-5]" in text
    html = shown(snapshots).html()
    assert "stopped by the debugger" in html


def test_a_cell_is_called_as_the_front_end_calls_it() -> None:
    place = SourceLocation("/tmp/ipykernel_1/123.py", 3, "<module>", USER)
    stacks = shown(
        {at: rank(Stack(CODE, "", (StackFrame(place, "work()"),))) for at in range(8)},
        label=lambda file: "Cell In[5]" if file.endswith("123.py") else None,
    )
    assert stacks.text().splitlines()[2:] == ["[0-7] Cell In[5]", "  Cell In[5]:3  work()"]
    assert stacks.tree[0].name == place.file


def test_the_cell_that_has_called_an_endpoint_is_said() -> None:
    def label(name: str) -> str | None:
        return {"c7": "Cell In[7]", "c8": "Cell In[8]"}.get(name)

    def head(*cells: str) -> str:
        snapshots = {at: rank(endpoint(*LOADS, cell=cell)) for at, cell in enumerate(cells)}
        return shown(snapshots, Extent(("gpus",), (len(cells),)), label=label).text().splitlines()[2]

    assert head("c7", "c7") == "[0-1] trainer.step(), called by Cell In[7]"
    assert head("c7", "c8") == "[0-1] trainer.step(), called by Cell In[7] [0], Cell In[8] [1]"
    assert head("of a kernel before", "") == "[0-1] trainer.step()"


def test_what_was_read_from_outside_joins_the_endpoint_of_the_others() -> None:
    inside = rank(endpoint(*LOADS))
    outside = rank(Stack(ENDPOINT, "main", LOADS), outside=True)
    merged = merge({0: inside, 1: outside})
    assert [(root.name, root.ranks) for root in merged.roots] == [("trainer.step", [0, 1])]


def test_notes_of_equal_text_are_one_line_the_worst_first() -> None:
    stacks = shown(
        {0: rank()},
        late=dict.fromkeys(range(1, 4), "did not answer within 1 s: it is stopped (SIGSTOP)"),
        dead={4: "exit code 1", 5: "exit code 1"},
        unread={6: "no py-spy", 7: "no py-spy"},
    )
    lines = stacks.text().splitlines()
    assert lines[0] == "8 ranks of mesh m: 1 stack, 3 late, 2 dead, 2 unknown"
    assert [line.partition("  (")[0] for line in lines[1:4]] == [
        "[4-5] dead: exit code 1",
        "[6-7] unknown: no py-spy",
        "[1-3] did not answer within 1 s: it is stopped (SIGSTOP)",
    ]


def test_the_text_is_as_long_as_there_are_different_stacks() -> None:
    def text(ranks: int) -> str:
        extent = Extent(("hosts", "gpus"), (ranks // 8, 8))
        return shown({at: rank(endpoint(*(LOADS if at == 5 else REDUCES))) for at in range(ranks)}, extent).text()

    assert len(text(1000).splitlines()) == len(text(8).splitlines())
    assert max(map(len, text(1000).splitlines())) <= 120


def test_hundreds_of_ways_are_counted() -> None:
    snapshots = {at: rank(endpoint(MAIN, user("load", at + 100))) for at in range(500)}
    stacks = shown(snapshots, Extent(("gpus",), (500,)))
    text = stacks.text()
    assert f"… {500 - MOST_BRANCHES + 1} more ways: [39-499]" in text
    assert len(text.splitlines()) < 4 * MOST_BRANCHES
    assert len(stacks.asdict()["tree"][0]["children"][0]["children"]) == 500  # the data has all


class Tags(HTMLParser):
    """Checks that each tag is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_html_is_closed_escaped_and_needs_nothing() -> None:
    odd = user("<lambda>", 3, "a < b & '\"'", span=(0, 5))
    snapshots = {at: rank(endpoint(MAIN, odd if at == 3 else REDUCES[1], values=(("<v>", "<1>"),))) for at in range(8)}
    html = shown(snapshots, dead={7: "<b>cause</b>"}).html()
    tags = Tags()
    tags.feed(html)
    assert not tags.open
    assert set(tags.seen) <= {"div", "span", "details", "summary", "pre", "b"}
    assert "&lt;lambda&gt;" in html and "&lt;b&gt;cause" in html and "&lt;v&gt;" in html
    assert "ranks diverge here: 2 ways" in html
    assert 'title="3: pid 100"' in html
    assert "<script" not in html and "http" not in html


def test_a_frame_opens_the_code_around_it() -> None:
    # The code is looked up here: it is shown only if it is what the rank has said.
    right_source = 'EIGHT = Extent(("hosts", "gpus"), (2, 4))'
    line = 1 + Path(__file__).read_text().splitlines().index(right_source)
    right = StackFrame(SourceLocation(__file__, line, "f", USER), right_source)
    html = shown({at: rank(endpoint(right)) for at in range(8)}).html()
    assert "TORCH = " in html and f"→ {line:>4}" in html.replace("&#x27;", "'")
    wrong = right._replace(source="something else")
    assert "TORCH = " not in shown({at: rank(endpoint(wrong)) for at in range(8)}).html()


def test_as_data() -> None:
    stacks = shown({at: rank(endpoint(*(LOADS if at == 5 else REDUCES))) for at in range(7)}, dead={7: "exit code 1"})
    data = json.loads(json.dumps(stacks.asdict()))
    assert data["mesh"] == "m" and data["dimensions"] == {"hosts": 2, "gpus": 4}
    assert [each["ranks"] for each in data["classes"]] == [[5], [0, 1, 2, 3, 4, 6]]
    (main,) = data["tree"][0]["children"]
    assert (main["file"], main["line"], main["name"], main["code"]) == ("/w/train.py", 30, "main", "user")
    assert [child["ranks"] for child in main["children"]] == [[5], [0, 1, 2, 3, 4, 6]]
    assert data["dead"] == {"7": "exit code 1"}


def test_the_bundle_has_text_and_html() -> None:
    bundle = shown({at: rank() for at in range(8)})._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert str(shown({at: rank() for at in range(8)})) == bundle["text/plain"]


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_is_where_its_stacks_are(seed: int) -> None:
    """Random trees: each rank is found along its own paths, and nowhere else."""
    chance = random.Random(seed)
    frames = [user(f"f{at}", at) for at in range(6)]

    def some() -> tuple[StackFrame, ...]:
        return tuple(chance.choice(frames) for _ in range(chance.randint(1, 5)))

    snapshots = {
        at: rank(*(endpoint(*some(), name=chance.choice("ab")) for _ in range(chance.randint(0, 3))))
        for at in range(chance.randint(1, 30))
    }
    merged = merge(snapshots)
    told: dict[int, set[tuple[str, ...]]] = {at: set() for at in snapshots}

    def look(branch: StackBranch, path: tuple[str, ...]) -> None:
        counts = [len(child.ranks) for child in branch.children]
        assert counts == sorted(counts)
        for child in branch.children:
            assert set(child.ranks) <= set(branch.ranks) and child.ranks == sorted(set(child.ranks))
            below = (*path, child.frame.place.name)
            for at in child.here:
                told[at].add(below)
            look(child, below)

    for root in merged.roots:
        look(root, (root.name,))
    for at, snapshot in snapshots.items():
        paths = {(stack.name, *(frame.place.name for frame in stack.frames)) for stack in snapshot.stacks}
        assert told[at] == paths
    assert sorted(at for each in merged.classes for at in each.ranks) == sorted(snapshots)
