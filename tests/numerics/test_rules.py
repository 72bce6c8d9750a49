"""Rules of training steps: verdicts on claims, their exchange, and the rules themselves in one process."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from monarch_kernel.numerics import rule  # noqa: E402
from monarch_kernel.numerics import rules as module  # noqa: E402
from monarch_kernel.numerics.claims import CONSTANT, BrokenRule, Claim, Exchange, Judge  # noqa: E402
from monarch_kernel.numerics.observer import StopRun, observer  # noqa: E402
from monarch_kernel.numerics.rules import CheckedStep, check_rules, rules  # noqa: E402

pytestmark = pytest.mark.torch

ALL = (0, 1, 2, 3)


def equal(*values: str, name: str = "w", ranks: Any = ALL, **more: Any) -> dict[int, list[Claim]]:
    """One claim of each rank: that its value equals those of the others."""
    return {rank: [Claim("replicas", name, value, "equal", ranks, **more)] for rank, value in enumerate(values)}


def gradients(claims: dict[int, list[Claim]], **named: str) -> dict[int, list[Claim]]:
    """Add final gradients: of each name, one letter for each rank."""
    for name, letters in named.items():
        for rank, letter in enumerate(letters):
            if letter != " ":
                claims[rank].append(Claim("", name, letter, "gradient", family="LayerNorm" if "norm" in name else ""))
    return claims


# -- verdicts ------------------------------------------------------------------------------------------


def test_the_rank_that_differs_from_most_is_named_and_reported_once() -> None:
    judge = Judge()
    assert judge.judge(0, equal("a", "a", "a", "a")) == []
    (broken,) = judge.judge(1, equal("b", "b", "c", "b", line="train.py:7", why="DDP replicates it"))
    assert (broken.ranks, broken.names, broken.step, broken.sure) == ((2,), ("w",), 1, True)
    assert str(broken) == (
        "Rule replicas broken at step 1, rank 2 (train.py:7): values of w differ from those of ranks 0, 1, 3; "
        "DDP replicates it"
    )
    assert judge.judge(2, equal("b", "b", "c", "b")) == []


def test_groups_of_ranks_are_compared_apart_and_missing_ranks_not_at_all() -> None:
    claims = equal("a", "a", "b", "b", ranks=(0, 1))
    claims[2] = [replace(claims[2][0], ranks=(2, 3))]
    claims[3] = [replace(claims[3][0], ranks=(2, 3))]
    assert Judge().judge(0, claims) == []
    del claims[3]
    claims[2] = [replace(claims[2][0], value="c")]
    assert Judge().judge(0, claims) == []


def test_names_that_break_alike_are_one_verdict() -> None:
    claims = equal("a", "b")
    for name in ("x", "y", "z"):
        for rank, more in equal("a", "b", name=name).items():
            claims[rank] += more
    (broken,) = Judge().judge(0, claims)
    assert broken.names == ("w", "x", "y", "z") and "values of w, x, y and 1 more differ" in broken.message


def test_equal_batches_count_if_they_are_equal_twice_in_succession() -> None:
    def read(*values: str) -> dict[int, list[Claim]]:
        return {
            rank: [Claim("data", "the model", value, "different", ALL, what="inputs", twice=True)]
            for rank, value in enumerate(values)
        }

    judge = Judge()
    assert judge.judge(0, read("a", "b", "a", "c")) == []
    assert judge.judge(1, read("d", "e", "f", "g")) == []
    assert judge.judge(2, read("h", "i", "i", "k")) == []
    (broken,) = judge.judge(3, read("h", "i", "i", "k"))
    assert broken.ranks == (1, 2) and broken.message == "inputs of the model are equal on these ranks"


def test_masks_follow_the_activations() -> None:
    def drawn(kind: Any, masks: str, inputs: str) -> list[BrokenRule]:
        return Judge().judge(
            0,
            {
                rank: [Claim("random", "drop", mask, kind, (0, 1), given=given)]
                for rank, (mask, given) in enumerate(zip(masks, inputs))
            },
        )

    assert drawn("equal", "ab", "xy") == [] and drawn("equal", "aa", "xx") == []
    assert drawn("equal", "ab", "xx")[0].ranks == (1,)
    assert drawn("different", "aa", "xx") == [] and drawn("different", "ab", "xy") == []
    assert drawn("different", "aa", "xy")[0].ranks == (0, 1)


def test_ranks_with_equal_final_gradients_hold_the_same_parameter() -> None:
    assert Judge().judge(0, gradients(equal("a", "a", "b", "c", ranks="replicas"), w="ggxy")) == []
    (broken,) = Judge().judge(0, gradients(equal("a", "b", "b", "c", ranks="replicas"), w="ggxy"))
    assert broken.sure and broken.ranks == (1,) and "as if reduced over these ranks" in broken.message


def test_data_parallel_ranks_are_those_whose_gradients_are_all_equal() -> None:
    claims = gradients(equal("1", "2", "1", "1", name="lr", ranks="data"), v="gggg", w="hhhh")
    assert Judge().judge(0, claims)[0].ranks == (1,)
    # Ranks that share some gradients only hold parts of one model.
    claims = gradients(equal("1", "2", "1", "1", name="lr", ranks="data"), v="gggg", w="hijk")
    assert Judge().judge(0, claims) == []
    claims = gradients(equal("1", "2", "1", "1", name="lr", ranks="model"), v="gggg", w="hijk")
    assert Judge().judge(0, claims)[0].ranks == (1,)


def test_values_that_stayed_equal_while_they_were_trained_have_to_stay_equal() -> None:
    judge = Judge()
    for step, value in enumerate("abc"):
        assert judge.judge(step, equal(value, value, ranks="replicas", before="x")) == []
    (broken,) = judge.judge(3, equal("d", "e", ranks="replicas", before="x"))
    assert broken.sure and "it was equal on these ranks at earlier steps, while it was trained" in broken.message


def test_values_that_did_not_move_or_had_no_gradients_prove_nothing() -> None:
    judge = Judge()
    judge.judge(0, equal("a", "b", ranks="replicas"))
    for step, value in enumerate("ccc", 1):
        assert judge.judge(step, equal(value, value, ranks="replicas", before="x")) == []
    judge = Judge()
    for step, value in enumerate("abc"):
        assert judge.judge(step, equal(value, value, ranks="replicas", before="")) == []
    assert judge.judge(3, equal("d", "e", ranks="replicas")) == []


def test_equal_random_weights_that_part_in_the_first_step_are_possibly_broken() -> None:
    (broken,) = Judge().judge(0, equal("a", "b", ranks="replicas", before="x"))
    assert not broken.sure and "possibly broken" in str(broken) and "placements" in broken.message
    assert Judge().judge(0, equal("a", "b", ranks="replicas", before="x", given=CONSTANT)) == []
    judge = Judge()
    judge.judge(0, {})
    assert judge.judge(1, equal("a", "b", ranks="replicas", before="x")) == []


def test_a_norm_that_is_left_out_of_the_reduction_of_its_kin_is_possibly_broken() -> None:
    claims = equal("a", "b", name="norm.weight", ranks="replicas", family="LayerNorm", before="1", given=CONSTANT)
    claims = gradients(claims, **{"norm1.weight": "gg", "norm2.weight": "hh", "norm.weight": "ij", "head": "kl"})
    (broken,) = Judge().judge(0, claims)
    assert broken.ranks == (1,) and broken.names == ("norm.weight",) and not broken.sure
    assert "the gradients of 2 other parameters of LayerNorm modules are reduced over these ranks" in broken.message


# -- exchange -------------------------------------------------------------------------------------------


def exchanges(size: int, deadline: float = 20.0) -> tuple[list[Exchange], list[BrokenRule], threading.Event]:
    """Ranks with a store in common; what is reported; and an event of the first report."""
    import torch.distributed as dist

    store = dist.HashStore()
    reported: list[BrokenRule] = []
    is_reported = threading.Event()

    def report(broken: BrokenRule) -> None:
        reported.append(broken)
        is_reported.set()

    return [Exchange(store, rank, size, "test", report, deadline) for rank in range(size)], reported, is_reported


def test_rank_0_reports_what_ranks_claim_and_what_they_see_themselves() -> None:
    ranks, reported, is_reported = exchanges(3)
    for rank, each in enumerate(ranks):
        each.keep([BrokenRule("updates", 4, (rank,), ("v",), "v did not move")])
        each.send("step 4", 4, [Claim("replicas", "w", "a" if rank else "b", "equal", (0, 1, 2))])
    assert is_reported.wait(20)
    assert ranks[2].verdicts("step 4", 20) == ranks[0].verdicts("step 4", 20) == reported
    assert [(each.rule, each.ranks) for each in reported] == [("updates", (0, 1, 2)), ("replicas", (0,))]
    for each in reversed(ranks):
        each.end()
    assert len(reported) == 2 and not ranks[0].missing


def test_a_silent_rank_delays_one_step_and_is_named() -> None:
    ranks, reported, is_reported = exchanges(3, deadline=0.2)
    for step in range(2):
        for rank in (0, 2):
            claim = Claim("replicas", "w", str(rank * step), "equal", (0, 1, 2))
            ranks[rank].send(f"step {step}", step, [claim])
    assert is_reported.wait(20)
    assert reported[0].ranks == (2,) and reported[0].step == 1
    assert ranks[0].missing[0] == "step 0: rank 1 did not report within 0.2 s"
    for each in ranks:
        each.end()


def test_a_rank_that_begins_later_is_not_waited_for() -> None:
    ranks, _, _ = exchanges(2, deadline=60)
    ranks[0].send("collective 10", 0, [])
    assert not ranks[1].is_joint
    ranks[0].send("collective 20", 1, [])
    ranks[1].send("collective 20", 0, [])
    assert ranks[0].verdicts("collective 20", 20) == []
    assert ranks[1].is_joint and not ranks[0].is_joint and not ranks[0].missing and ranks[0].compared == 1
    # Rank 0 waits one step later, when the others surely do: whoever stops alone would block the others.
    ranks[0].send("collective 30", 2, [], waits=False)
    ranks[1].send("collective 30", 1, [])
    assert ranks[0].is_joint and ranks[1].verdicts("collective 30", 20) == []
    for each in reversed(ranks):
        each.end()


# -- rules in one process ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """End checks that a failed test has left."""
    yield
    for each in observer()._subscriptions:
        each.end()


class Training:
    """A small model, its optimizer, and what rules report."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.found: list[BrokenRule] = []
        self.check = check_rules(**{"every": 1, "report": self.found.append, **options})

    def step(self, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        (self.model(torch.randn(3, 4)).pow(2).mean() * scale).backward()
        self.optimizer.step()

    def said(self) -> str:
        """End the check and return all that was reported."""
        self.check.end()
        assert not observer().is_installed
        return "\n".join(map(str, self.found))


def test_a_right_training_breaks_no_rule_and_leaves_nothing_behind() -> None:
    training = Training()
    for _ in range(60):
        training.step()
    assert training.said() == ""
    assert training.check.checked == 60 and "rules across ranks need a process group" in training.check.summary


def test_every_nth_step_is_checked() -> None:
    training = Training(every=5)
    for _ in range(11):
        training.step()
    training.check.end()
    assert training.check.checked == 3


def test_a_parameter_that_does_not_move_is_named_after_two_steps() -> None:
    training = Training()

    class Partly(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            kept = training.model[2].weight.detach().clone()
            super().step(closure)
            training.model[2].weight.data = kept

    training.optimizer = Partly(training.model.parameters(), lr=0.1)
    training.step()
    assert not training.found
    training.step()
    training.step()
    said = training.said()
    assert "Rule updates broken at step 1, rank 0" in said and "2.weight did not move in 2 checked steps" in said
    assert said.count("\n") == 0


def test_a_learning_rate_of_0_and_frozen_parameters_are_right() -> None:
    training = Training()
    training.optimizer.param_groups[0]["lr"] = 0.0
    training.model[0].requires_grad_(False)
    for _ in range(6):
        training.step()
    assert training.said() == ""


def test_a_gradient_that_no_optimizer_has_is_possibly_wrong() -> None:
    training = Training()
    training.optimizer = torch.optim.SGD(training.model[2].parameters(), lr=0.1)
    for _ in range(3):
        training.step()
    said = training.said()
    assert "updates possibly broken at step 1" in said and "0.weight, 0.bias get gradients, but no optimizer" in said


def test_a_parameter_that_stops_moving_later_is_named_once_its_whole_value_was_compared() -> None:
    training = Training()
    for _ in range(3):
        training.step()
    weight = training.model[2].weight
    held = weight.detach().clone()
    training.optimizer.register_step_post_hook(lambda *_: weight.data.copy_(held))
    training.step()  # a sample does not move: reason enough to look closer at the next steps, and no more
    assert training.found == []
    for _ in range(2):
        training.step()
    said = training.said()
    assert "Rule updates broken at step 5, rank 0" in said and "2.weight did not move in 2 checked steps" in said


def test_a_parameter_moves_if_elements_outside_of_its_sample_do(own_rule: list[CheckedStep]) -> None:
    training = Training()
    training.model[0] = torch.nn.Embedding.from_pretrained(torch.rand(4096, 8), freeze=False)
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    for word in (0, 0, 3, 3, 3, 3):  # every fourth word has a part in the sample
        training.optimizer.zero_grad()
        training.model(torch.tensor([word])).mean().backward()
        training.optimizer.step()
    assert training.said() == ""
    found = [next(each for each in step.parameters if each.name == "0.weight") for step in own_rule]
    assert [bool(each.update) for each in found] == [True, True, False, False, False, False]
    assert [each.is_doubtful for each in found] == [False, False, True, False, False, False]
    assert all(each.has_moved for each in found)


def called(model: torch.nn.Module, every: int, step: int) -> Counter[str]:
    """Count the calls of our functions, hooks of tensors and system calls for files in one step of a model."""
    counts: Counter[str] = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "monarch_kernel" in frame.f_code.co_filename:
            counts[frame.f_code.co_name] += 1
        elif event == "c_call" and argument.__module__ == "posix":
            counts["system"] += 1
        elif event == "call" and frame.f_code.co_name == "register_hook":
            counts["register_hook"] += 1

    with rules(every=every, report=None):
        for number in range(step + 1):
            optimizer.zero_grad()
            sys.setprofile(profile if number == step else None)
            try:
                model(torch.randn(3, 4)).mean().backward()
                optimizer.step()
            finally:
                sys.setprofile(None)
    return counts


def test_an_unchecked_step_costs_two_hooks_a_module_that_look_at_nothing() -> None:
    """What rules cost between two checks: no line is looked up, no tensor read or hooked, no file asked for."""
    few, many = (
        called(torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(count)), torch.nn.Linear(4, 4)), 10, 3)
        for count in (10, 30)
    )
    more = many - few
    named = {
        "_is_wrapper": 40,
        "walk": more["walk"],
        "<genexpr>": more["<genexpr>"],
    }  # modules and parameters are named
    hooks = {"_before_module": 20, "_after_module": 20, "_drop_left_calls": 20}
    assert {name: count for name, count in more.items() if count >= 20} == hooks | named
    assert not {"hash_of", "_line", "user_frame", "_hook_tensors", "register_hook", "system"} & set(many)


def test_a_checked_step_hashes_a_parameter_once_and_hooks_only_the_whole_model() -> None:
    layers = [torch.nn.Linear(4, 4) for _ in range(10)]
    counts = called(torch.nn.Sequential(*layers), 2, 4)
    assert counts["hash_of"] == 2 * len(layers) + 1  # weights and biases after the step, and the input
    assert counts["register_hook"] <= 2  # of the model's input and output


def test_two_models_with_an_optimizer_each_are_right() -> None:
    training = Training()
    other = torch.nn.Linear(4, 4)
    generates = torch.optim.Adam(other.parameters(), lr=0.01)
    for _ in range(6):
        training.optimizer.zero_grad()
        training.model(other(torch.randn(3, 4)).detach()).mean().backward()
        training.optimizer.step()
        generates.zero_grad()
        training.model(other(torch.randn(3, 4))).pow(2).mean().backward()
        generates.step()  # leaves gradients in both
    assert training.said() == ""


def test_nan_in_gradients_is_named_unless_a_scaler_skips_the_step() -> None:
    training = Training()
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, fused=True)
    training.optimizer.grad_scale = None  # type: ignore[attr-defined]
    training.optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]  # as GradScaler sets it
    training.step(float("nan"))
    assert training.said() == ""
    training = Training()
    training.step(float("inf"))
    assert "Rule grads broken at step 0, rank 0 (test_rules.py:" in (said := training.said()), said
    assert "NaN or Inf in the gradients of 0.weight, 0.bias, 2.weight and 1 more" in said


def test_a_gradient_far_above_its_history_is_possibly_wrong() -> None:
    training = Training(names="grads")
    for _ in range(15):
        training.step()
    training.step(1e6)
    assert "grads possibly broken at step 15" in training.said()


def test_a_repeated_micro_batch_is_named_and_a_second_pass_over_all_is_not_certain() -> None:
    def train(inputs: list[Any]) -> list[BrokenRule]:
        training = Training(names=["data"])
        training.optimizer.zero_grad()
        for each in inputs:
            training.model(each).mean().backward()
        training.optimizer.step()
        training.said()
        return training.found

    a, b, c = torch.randn(3, 3, 4)
    assert train([a, b, c]) == []
    (broken,) = train([a, b, b, c])
    assert broken.sure and "micro-batch 2 equals that of micro-batch 1" in broken.message
    (broken,) = train([a, b, a, b])
    assert not broken.sure and "SAM" in broken.message
    assert train([torch.zeros(3, 4)] * 3) == []


def test_memory_that_grows_at_each_check_is_possibly_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter(range(1 << 30, 1 << 40, 1 << 25))
    monkeypatch.setattr(module, "memory_in_use", lambda: (next(used), "allocated GPU memory"))
    training = Training(names="memory")
    for _ in range(30):
        training.step()
    assert "allocated GPU memory grew at each of 20 checks, from 1.00 GiB to 1.6" in training.said()


@pytest.fixture
def own_rule() -> Iterator[list[CheckedStep]]:
    """A rule of the user's, and the steps that it saw."""
    seen: list[CheckedStep] = []

    @rule
    def small_weights(step: CheckedStep) -> Iterator[BrokenRule]:
        seen.append(step)
        for each in step.parameters:
            if float(each.parameter.detach().abs().max()) > 3:
                yield step.broken(each.name, "a weight exceeds 3")

    yield seen
    del module._RULES["small_weights"]


def test_users_add_rules(own_rule: list[CheckedStep]) -> None:
    training = Training()
    training.step()
    with torch.no_grad():
        training.model[0].bias.fill_(5.0)
    training.step()
    said = training.said()
    assert "Rule small_weights broken at step 1, rank 0" in said and "a weight exceeds 3" in said
    first = own_rule[0]
    assert [each.name for each in first.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(each.has_moved and each.norm and each.lr == 0.1 for each in first.parameters)
    assert first.line.startswith("test_rules.py:")


def test_a_rule_that_fails_ends_alone_and_training_continues(own_rule: list[CheckedStep]) -> None:
    @rule
    def small_weights(step: CheckedStep) -> Iterator[BrokenRule]:
        raise ValueError("no")

    training = Training(names=["small_weights", "grads"])
    with pytest.warns(RuntimeWarning, match="rule small_weights failed and is checked no more: ValueError: no"):
        training.step()
    training.step()
    training.check.end()
    assert training.check.names == ("grads",) and training.check.checked == 2


def test_a_certain_break_stops_the_program_on_request() -> None:
    with pytest.raises(StopRun, match="Rule grads broken at step 1"), rules("grads", every=1, stop=True) as check:
        training = Training(names="lr")
        training.step()
        training.step(float("nan"))
    training.check.end()
    assert check.checked == 2 and not observer().is_installed


def test_wrong_arguments_say_what_is_possible() -> None:
    with pytest.raises(ValueError, match="no rule replica; there are replicas, updates, data, random"):
        check_rules("replica")
    with pytest.raises(ValueError, match="every is 0"):
        check_rules(every=0)
    with pytest.raises(TypeError, match="@rule takes a function"):
        rule("replicas")  # type: ignore[type-var]
