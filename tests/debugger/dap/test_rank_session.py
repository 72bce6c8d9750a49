"""The requests and events of a front end: DAP over a mesh debugger in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from monarch_kernel.debugger.dap.rank_session import RankSession
from monarch_kernel.debugger.dap.stop_table import BASE
from monarch_kernel.debugger.events import RankGone, RankRanOff
from monarch_kernel.debugger.model.stops import Bound
from tests.debugger.memory import CELL, MemoryDebugger, Mesh


def shown(value: Any) -> tuple[dict[str, str], dict[str, str]]:
    return {"text/html": f"<b>{value}</b>"}, {}


class Desk:
    """A session, and what it published."""

    def __init__(self, client: str) -> None:
        self.debugger = MemoryDebugger()
        self.meshes = [Mesh("m", 4)]
        self.published: list[dict[str, Any]] = []
        self.timers: list[Callable[[], None]] = []
        self.waited: dict[str, list[int]] = {}
        self.session = RankSession(
            self.debugger,
            self.published.append,
            lambda _seconds, function: self.timers.append(function),
            lambda: self.meshes,
            lambda: self.waited,
            shown,
        )
        self.session.initialize({"clientID": client, "clientName": client})
        self.session.attach()

    def events(self) -> list[tuple[str, int]]:
        """What was published since the last look."""
        found = [(event["event"], event["body"].get("threadId")) for event in self.published]
        self.published.clear()
        return found

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        request = {"type": "request", "seq": 5, "command": command, "arguments": arguments}
        assert self.session.owns(request), f"{command} {arguments} would go to the kernel's own debugger"
        reply = self.session.answer(request)
        assert (reply["type"], reply["request_seq"], reply["command"]) == ("response", 5, command)
        return reply

    def body(self, command: str, **arguments: Any) -> dict[str, Any]:
        reply = self.ask(command, **arguments)
        assert reply["success"], reply["message"]
        return dict(reply["body"])

    def owns(self, command: str, **arguments: Any) -> bool:
        return self.session.owns({"command": command, "arguments": arguments})

    def said(self, word: str) -> list[tuple[Any, ...]]:
        return [each for each in self.debugger.said if each[0] == word]


@pytest.fixture
def lab() -> Desk:
    """JupyterLab."""
    return Desk("jupyterlab")


@pytest.fixture
def code() -> Desk:
    """VS Code."""
    return Desk("vscode")


# -- looking ------------------------------------------------------------------------------------------


def test_a_stop_is_reported_with_the_frames_of_user_code(lab: Desk) -> None:
    lab.debugger.stop(2)
    ((event, thread),) = lab.events()
    assert event == "stopped"
    assert thread >= BASE
    frames = lab.body("stackTrace", threadId=thread)["stackFrames"]
    assert [(frame["name"], frame["line"]) for frame in frames] == [
        ("[rank 2] work", 3),
        ("[rank 2] Sequential.forward", 217),
        ("[rank 2] <module>", 6),
    ]
    assert frames[0]["source"] == {"name": "42.py", "path": CELL, "sourceReference": 0}
    assert [frame.get("presentationHint") for frame in frames] == [None, "subtle", None]
    assert lab.body("stackTrace", threadId=thread, startFrame=1, levels=1)["stackFrames"] == frames[1:2]


def test_variables_are_found_through_scopes_and_runtime_names_are_hidden(lab: Desk) -> None:
    lab.debugger.stop(2)
    frame = lab.body("stackTrace", threadId=lab.events()[0][1])["stackFrames"][0]["id"]
    scopes = lab.body("scopes", frameId=frame)["scopes"]
    assert [scope["name"] for scope in scopes] == ["Locals", "Globals"]
    variables = lab.body("variables", variablesReference=scopes[0]["variablesReference"])["variables"]
    assert [(each["name"], each["value"], each["evaluateName"]) for each in variables] == [
        ("x", "2", "x"),
        ("items", "[0, 1]", "items"),
    ]
    hidden = lab.body("variables", variablesReference=scopes[1]["variablesReference"])["variables"]
    assert [each["name"] for each in hidden] == ["rank"]


def test_long_values_come_in_parts(code: Desk) -> None:
    code.debugger.stop(0)
    frame = code.body("stackTrace", threadId=code.events()[0][1])["stackFrames"][0]["id"]
    locals_ = code.body("scopes", frameId=frame)["scopes"][0]["variablesReference"]
    items = code.body("variables", variablesReference=locals_)["variables"][1]
    assert (items["indexedVariables"], items["namedVariables"]) == (1200, 0)
    ref = items["variablesReference"]
    part = code.body("variables", variablesReference=ref, filter="indexed", start=1190, count=100)["variables"]
    assert [each["name"] for each in part] == [str(at) for at in range(1190, 1200)]
    named = code.body("variables", variablesReference=ref, filter="named")["variables"]
    assert [each["name"] for each in named] == ["append"]
    everything = code.body("variables", variablesReference=ref)["variables"]
    assert len(everything) == 501
    assert everything[-1]["value"] == "more than 500"


def test_an_expression_is_evaluated_in_the_frame(lab: Desk) -> None:
    lab.debugger.stop(3)
    frames = lab.body("stackTrace", threadId=lab.events()[0][1])["stackFrames"]
    body = lab.body("evaluate", expression="x + 1", frameId=frames[2]["id"])
    assert (body["result"], body["type"]) == ("4", "int")
    assert lab.said("evaluate") == [("evaluate", 3, "x + 1", 2)]
    assert lab.body("evaluate", expression="x")["result"] == "3"  # without a frame: of the rank that is shown
    reply = lab.ask("evaluate", expression="x / 0", frameId=frames[0]["id"])
    assert reply["success"] is False
    assert reply["message"] == "ZeroDivisionError: division by zero"
    assert reply["body"]["result"] == ""


def test_jupyterlab_sees_new_frames_after_it_evaluated_and_the_old_ones_still_hold(lab: Desk) -> None:
    lab.debugger.stop(0)
    thread = lab.events()[0][1]
    before = lab.body("stackTrace", threadId=thread)["stackFrames"]
    assert lab.body("stackTrace", threadId=thread)["stackFrames"] == before
    lab.body("evaluate", expression="x", frameId=before[0]["id"], context="repl")
    after = lab.body("stackTrace", threadId=thread)["stackFrames"]
    assert {frame["id"] for frame in before}.isdisjoint(frame["id"] for frame in after)
    assert lab.body("scopes", frameId=before[0]["id"])["scopes"]


def test_values_are_changed(lab: Desk) -> None:
    lab.debugger.stop(1)
    frame = lab.body("stackTrace", threadId=lab.events()[0][1])["stackFrames"][0]["id"]
    scope = lab.body("scopes", frameId=frame)["scopes"][0]["variablesReference"]
    assert lab.body("setVariable", variablesReference=scope, name="x", value="9")["value"] == "9"
    assert lab.said("set") == [("set", 1, 1, "x", "9")]
    assert lab.body("setExpression", frameId=frame, expression="x", value="7")["value"] == "1"
    lab.body("copyToGlobals", srcFrameId=frame, srcVariableName="x", dstVariableName="y")
    assert [each[2] for each in lab.said("evaluate")] == ["x = 7", "x"]
    reply = lab.ask("copyToGlobals", srcFrameId=frame, srcVariableName="x.y", dstVariableName="y")
    assert "names of two variables" in reply["message"]


def test_rich_values_completions_and_sources_come_from_the_rank(lab: Desk) -> None:
    lab.debugger.stop(1)
    frame = lab.body("stackTrace", threadId=lab.events()[0][1])["stackFrames"][0]["id"]
    assert lab.body("richInspectVariables", variableName="x", frameId=frame)["data"] == {"text/html": "<b>1</b>"}
    reply = lab.ask("richInspectVariables", variableName="nowhere", frameId=frame)
    assert reply["message"] == "NameError: name 'nowhere' is not defined"
    assert reply["body"]["data"] == {}
    targets = lab.body("completions", text="print(items.app", column=16, frameId=frame)["targets"]
    assert targets == [{"label": "items.append", "start": 6, "length": 9}]
    assert lab.session.source(__file__) == ""  # no frame of a stopped rank is there
    assert lab.session.source(CELL) == ""


# -- going on -----------------------------------------------------------------------------------------


def test_continue_moves_all_ranks_of_the_mesh_that_is_shown(lab: Desk) -> None:
    lab.meshes.append(Mesh("n", 2))
    for rank in range(3):
        lab.debugger.stop(rank)
    lab.debugger.stop(1, mesh="n")
    ((_, first),) = lab.events()
    # From 4.6.1 on JupyterLab forgets the thread before it continues it, and then says 1.
    assert lab.body("continue", threadId=1) == {"allThreadsContinued": False}
    (gone, (event, second)) = lab.events()
    assert (gone, event) == (("continued", first), "stopped")
    assert lab.said("resume") == [("resume", [0, 1, 2], "continue")]
    assert lab.body("stackTrace", threadId=1)["stackFrames"][0]["name"] == "[n rank 1] work"  # up to 4.4.4: always 1
    lab.body("continue", threadId=second)
    assert lab.events() == [("continued", second)]


def test_ranks_that_did_not_continue_keep_their_turn(lab: Desk) -> None:
    for rank in range(2):
        lab.debugger.stop(rank)
    ((_, first),) = lab.events()
    with lab.debugger.viewer("another") as other:
        other.drive()
        assert not lab.ask("continue", threadId=first)["success"]
    assert lab.events() == []
    lab.debugger.go(lab.debugger.stops()[0])
    assert [event for event, _ in lab.events()] == ["continued", "stopped"]


def test_a_step_out_of_user_code_shows_another_stopped_rank(lab: Desk) -> None:
    at = lab.debugger.stop(0)
    lab.debugger.stop(1)
    ((_, thread),) = lab.events()
    lab.body("stepOut", threadId=thread)
    assert lab.events() == []
    lab.debugger.tell(RankRanOff(at.key))
    (gone, (event, other)) = lab.events()
    assert (gone, event) == (("continued", thread), "stopped")
    assert other != thread


def test_steps_stay_with_their_rank(lab: Desk) -> None:
    lab.debugger.stop(0)
    lab.debugger.stop(1)
    ((_, thread),) = lab.events()
    for number, command in enumerate(("next", "stepIn", "stepOut"), 2):
        lab.body(command, threadId=thread)
        assert lab.events() == []
        lab.debugger.stop(0, number, reason="step", line=number)
        assert lab.events() == [("stopped", thread)]
        assert lab.body("stackTrace", threadId=thread)["stackFrames"][0]["line"] == number
    assert [how for _, _, how in lab.said("resume")] == ["next", "step", "out"]


def test_a_step_that_does_not_end_shows_another_stopped_rank(lab: Desk) -> None:
    lab.debugger.stop(0)
    lab.debugger.stop(1)
    ((_, thread),) = lab.events()
    lab.body("next", threadId=thread)
    for timer in lab.timers:
        timer()
    (gone, (event, other)) = lab.events()
    assert gone == ("continued", thread)
    assert event == "stopped"
    assert lab.body("stackTrace", threadId=other)["stackFrames"][0]["name"] == "[rank 1] work"
    lab.debugger.stop(0, 2, reason="step")
    assert lab.events() == []  # it waits for its turn


def test_the_timer_of_a_step_that_is_over_does_nothing(lab: Desk) -> None:
    lab.debugger.stop(0)
    lab.debugger.stop(1)
    ((_, thread),) = lab.events()
    lab.body("next", threadId=thread)
    lab.debugger.stop(0, 2)
    lab.body("next", threadId=thread)
    lab.events()
    lab.timers[0]()
    assert lab.events() == []


def test_a_request_about_what_is_over_is_refused_and_never_goes_to_the_kernel(lab: Desk) -> None:
    at = lab.debugger.stop(0)
    ((_, thread),) = lab.events()
    frame = lab.body("stackTrace", threadId=thread)["stackFrames"][0]["id"]
    scope = lab.body("scopes", frameId=frame)["scopes"][0]["variablesReference"]
    lab.debugger.go(at)
    for command, arguments, empty in [
        ("stackTrace", {"threadId": thread}, "stackFrames"),
        ("scopes", {"frameId": frame}, "scopes"),
        ("variables", {"variablesReference": scope}, "variables"),
    ]:
        reply = lab.ask(command, **arguments)
        assert reply["success"] is False
        assert reply["body"][empty] == []
        assert "runs again" in reply["message"] or "not stopped there any more" in reply["message"]


def test_another_viewers_control_is_respected(lab: Desk) -> None:
    terminal = lab.debugger.viewer("a terminal")
    terminal.drive()
    lab.debugger.stop(0)
    lab.debugger.stop(1)
    ((_, thread),) = lab.events()
    reply = lab.ask("next", threadId=thread)
    assert "a terminal controls" in reply["message"]
    assert lab.said("resume") == []
    lab.session.close()
    assert len(lab.debugger.stops()) == 2
    assert lab.debugger.viewers.names() == ["a terminal"]


def test_turning_the_debugger_off_lets_everybody_go(lab: Desk) -> None:
    lab.session.set_breakpoints({"source": {"path": CELL}, "breakpoints": [{"line": 3}]}, None)
    lab.debugger.stop(0)
    lab.debugger.stop(1)
    lab.session.close()
    assert lab.debugger.stops() == []
    assert lab.debugger.breakpoints() == []
    assert lab.debugger.viewers.names() == []


# -- which rank is shown -------------------------------------------------------------------------------


def test_the_focus_switches_between_ranks(lab: Desk) -> None:
    for rank in range(3):
        lab.debugger.stop(rank)
    ((_, first),) = lab.events()
    assert lab.body("mesh/focus", mesh="m", rank=2) == {"shown": "rank 2"}
    ((event, third),) = lab.events()
    assert event == "stopped"
    assert lab.body("stackTrace", threadId=third)["stackFrames"][0]["name"] == "[rank 2] work"
    assert lab.session.stopped_threads == [third]
    lab.body("mesh/focus", rank=0)
    assert lab.events() == [("stopped", first)]
    reply = lab.ask("mesh/focus", rank=3)
    assert reply["message"] == "rank 3 is not stopped, so it cannot be shown; stopped ranks: 0, 1, 2"


def test_the_focus_goes_through_the_threads_of_a_rank(lab: Desk) -> None:
    lab.debugger.stop(0, 1, thread=7)
    lab.debugger.stop(0, 2, thread=8)
    ((_, first),) = lab.events()
    lab.body("mesh/focus", rank=0)
    ((_, second),) = lab.events()
    assert second != first
    lab.body("mesh/focus", rank=0)
    assert lab.events() == [("stopped", first)]


def test_a_rank_of_two_meshes_needs_its_mesh(lab: Desk) -> None:
    lab.meshes.append(Mesh("other", 2))
    lab.debugger.stop(0)
    lab.debugger.stop(0, mesh="other")
    ((_, thread),) = lab.events()
    assert lab.ask("mesh/focus", rank=0)["message"] == "rank 0 is stopped on m and other; say which mesh"
    assert lab.body("mesh/focus", rank=0, mesh="other") == {"shown": "other rank 0"}
    assert lab.body("stackTrace", threadId=thread)["stackFrames"][0]["name"] == "[m rank 0] work"


def test_the_state_tells_of_every_rank(lab: Desk) -> None:
    lab.meshes = [Mesh("m", 3, {2: "killed by SIGKILL"})]
    lab.debugger.stop(1)
    state = lab.body("mesh/state")
    assert state["driving"] is False
    ((mesh,),) = (state["meshes"],)
    assert mesh["name"] == "m"
    assert [rank["state"] for rank in mesh["ranks"]] == ["running", "stopped", "dead"]
    assert mesh["ranks"][1]["point"] == {"gpus": 1}
    (stop,) = mesh["ranks"][1]["stops"]
    assert (stop["name"], stop["line"], stop["reason"], stop["shown"]) == ("work", 3, "breakpoint", True)
    assert mesh["ranks"][2]["cause"] == "killed by SIGKILL"


def test_a_set_of_ranks_goes_on_together(lab: Desk) -> None:
    for rank in range(3):
        lab.debugger.stop(rank)
    assert lab.body("mesh/resume", how="next", ranks=[0, 2]) == {"ranks": [["m", 0], ["m", 2]]}
    lab.body("mesh/resume")
    assert lab.said("resume") == [("resume", [0, 2], "next"), ("resume", [1], "continue")]
    lab.body("mesh/pause", mesh="m", ranks=[1])
    assert lab.said("pause") == [("pause", "m", [1])]


# -- the kernel's own threads --------------------------------------------------------------------------


def kernel_stops(desk: Desk, thread: int = 1) -> None:
    body = {"reason": "breakpoint", "threadId": thread, "allThreadsStopped": True}
    desk.session.kernel_event({"type": "event", "event": "stopped", "body": body})


def kernel_goes_on(desk: Desk, thread: int = 1) -> None:
    body = {"threadId": thread, "allThreadsContinued": True}
    desk.session.kernel_event({"type": "event", "event": "continued", "body": body})


def test_the_kernel_and_ranks_are_in_one_queue(lab: Desk) -> None:
    lab.debugger.stop(0)
    kernel_stops(lab)
    ((_, thread),) = lab.events()
    assert thread >= BASE
    lab.body("continue", threadId=1)  # means the rank, since that is what is shown
    assert lab.events() == [("continued", thread), ("stopped", 1)]
    assert not lab.owns("continue", threadId=1)
    assert not lab.owns("stackTrace", threadId=1)
    assert not lab.owns("scopes", frameId=2)
    assert not lab.owns("evaluate", expression="x")
    lab.debugger.stop(1)
    assert lab.events() == []
    kernel_goes_on(lab)
    assert [event for event, _ in lab.events()] == ["continued", "stopped"]


def test_a_step_of_the_kernel_keeps_the_focus(lab: Desk) -> None:
    kernel_stops(lab)
    lab.debugger.stop(0)
    lab.events()
    lab.session.kernel_moves("next")
    kernel_goes_on(lab)
    assert lab.events() == []
    kernel_stops(lab)
    assert lab.events() == [("stopped", 1)]


def test_other_events_of_the_kernel_pass(lab: Desk) -> None:
    event = {"type": "event", "event": "initialized", "seq": 3}
    lab.session.kernel_event(event)
    assert lab.published == [event]


def test_jupyterlabs_pause_is_for_the_ranks_that_the_cell_waits_for(lab: Desk) -> None:
    assert not lab.owns("pause", threadId=1)
    lab.waited = {"m": [1, 2]}
    lab.body("pause", threadId=1)
    assert lab.said("pause") == [("pause", "m", [1, 2])]
    lab.debugger.stop(1)
    lab.debugger.stop(2)
    ((_, thread),) = lab.events()
    lab.body("pause", threadId=1)  # pressed just before the page heard of the stop
    assert lab.events() == [("stopped", thread)]
    assert len(lab.said("pause")) == 1


# -- VS Code -------------------------------------------------------------------------------------------


def test_ranks_are_threads(code: Desk) -> None:
    code.debugger.stop(1)
    code.debugger.stop(2)
    assert [event for event, _ in code.events()] == ["stopped", "stopped"]
    names = [thread["name"] for thread in code.session.threads()]
    assert names == ["rank 0 (gpus=0)", "rank 1 (gpus=1): work", "rank 2 (gpus=2): work", "rank 3 (gpus=3)"]
    number = code.session.threads()[2]["id"]
    assert code.body("stackTrace", threadId=number)["stackFrames"][0]["name"] == "work"
    assert code.session.stopped_threads == [code.session.threads()[1]["id"], number]


def test_each_thread_is_driven_by_its_own_number(code: Desk) -> None:
    code.debugger.stop(1)
    code.debugger.stop(2)
    ((_, first), (_, second)) = code.events()
    code.body("continue", threadId=second)
    assert code.events() == [("continued", second)]
    code.body("next", threadId=first)
    code.debugger.stop(1, 2, reason="step")
    assert code.events() == [("continued", first), ("stopped", first)]
    assert code.said("resume") == [("resume", [2], "continue"), ("resume", [1], "next")]
    assert not code.owns("continue", threadId=1)
    idle = code.session.threads()[0]["id"]
    code.body("pause", threadId=idle)
    assert code.said("pause") == [("pause", "m", [0])]
    assert not code.ask("continue", threadId=idle)["success"]


def test_concurrent_endpoints_are_threads_of_their_own(code: Desk) -> None:
    code.debugger.stop(0, 1, thread=7)
    code.debugger.stop(0, 2, thread=8)
    names = [thread["name"] for thread in code.session.threads()]
    assert names.count("rank 0 (gpus=0): work") == 2


def test_a_mesh_of_many_ranks_is_listed_by_its_stops(code: Desk) -> None:
    code.meshes = [Mesh("m", 1000)]
    code.debugger.stop(512)
    assert [thread["name"] for thread in code.session.threads()] == ["rank 512 (gpus=512): work"]


def test_a_dead_rank_is_over(code: Desk, lab: Desk) -> None:
    for desk in (code, lab):
        desk.debugger.stop(1)
        desk.debugger.stop(2)
        desk.events()
        desk.debugger.tell(RankGone("m", 1, "killed"))
    events = code.events()
    assert [event for event, _ in events] == ["continued", "thread"]
    assert [event for event, _ in lab.events()] == ["continued", "stopped"]


def test_an_error_is_an_exception(code: Desk) -> None:
    code.debugger.stop(1, reason="exception", text="ValueError: bad batch")
    (event,) = code.published
    assert (event["body"]["reason"], event["body"]["text"]) == ("exception", "ValueError: bad batch")
    body = code.body("exceptionInfo", threadId=event["body"]["threadId"])
    assert (body["exceptionId"], body["description"]) == ("ValueError", "bad batch")


# -- breakpoints ---------------------------------------------------------------------------------------


def test_breakpoints_are_those_of_the_kernel_and_of_ranks(lab: Desk) -> None:
    lab.debugger.binds = lambda spec: {("m", 0): Bound(spec.id, True, spec.line + 1, "tracing slows this down")}
    asked = {"source": {"path": CELL}, "breakpoints": [{"line": 3}, {"line": 8}]}
    kernel = [{"id": 1, "verified": True, "line": 3}, {"id": 2, "verified": False, "line": 8, "message": "no file"}]
    made = lab.session.set_breakpoints(asked, kernel)
    assert made == [
        {"id": 1, "verified": True, "line": 3, "message": "tracing slows this down"},
        {"id": 2, "verified": True, "line": 9, "message": "tracing slows this down"},
    ]
    assert lab.said("replace") == [("replace", CELL, "dap", [{"line": 3}, {"line": 8}])]


def test_conditions_hits_and_log_points_reach_the_ranks(code: Desk) -> None:
    wanted = [
        {"line": 1, "condition": "rank == 2"},
        {"line": 2, "hitCondition": "3"},
        {"line": 3, "hitCondition": "> 3"},
        {"line": 4, "logMessage": "x = {x}"},
        {"line": 5, "hitCondition": "% 2"},
    ]
    made = code.session.set_breakpoints({"source": {"path": CELL}, "breakpoints": wanted}, None)
    assert code.said("replace")[0][3] == [
        {"line": 1, "condition": "rank == 2"},
        {"line": 2, "hits": 3},
        {"line": 3, "hits": 4},
        {"line": 4, "log": "x = {x}"},
    ]
    assert made[4] == {"verified": False, "line": 5, "message": "ranks count hits by N, >= N or > N, not by '% 2'"}


def test_failures_are_one_filter_of_many(lab: Desk) -> None:
    assert lab.session.set_exception_filters(["raised", "mesh"]) == ["raised"]
    assert lab.session.set_exception_filters(["mesh"]) == []
    assert [each.spec.error for each in lab.debugger.breakpoints()] == ["*"]
    assert lab.session.set_exception_filters(["uncaught"]) == ["uncaught"]
    assert lab.debugger.breakpoints() == []


# -- life ----------------------------------------------------------------------------------------------


def test_earlier_stops_are_reported(lab: Desk) -> None:
    other = Desk("jupyterlab")
    other.session.close()
    at = lab.debugger.stop(1)
    session = RankSession(lab.debugger, lab.published.append, lambda *_: None, lambda: lab.meshes)  # type: ignore[arg-type]
    lab.events()
    session.initialize({"clientID": "jupyterlab"})
    session.attach()
    assert [event for event, _ in lab.events()] == ["stopped"]
    session.attach()  # the page was reloaded
    assert [event for event, _ in lab.events()] == ["stopped"]
    lab.debugger.go(at)
    assert session.stopped_threads == []


def test_ids_are_never_used_twice(lab: Desk) -> None:
    seen: set[int] = set()
    for number in range(1, 4):
        at = lab.debugger.stop(0, number)
        thread = lab.events()[-1][1]
        frames = lab.body("stackTrace", threadId=thread)["stackFrames"]
        ids = {frame["id"] for frame in frames}
        assert seen.isdisjoint(ids)
        seen |= ids
        lab.debugger.go(at)
