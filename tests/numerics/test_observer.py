"""What the observer reports of training steps in one process, and that it leaves nothing behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.modules import module as installed  # noqa: E402
from torch.optim import SGD, Optimizer  # noqa: E402
from torch.optim import optimizer as optimizers  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from monarch_kernel.numerics.observer import (  # noqa: E402
    ModuleCall,
    ModuleGradient,
    NamedParameter,
    ParameterGradient,
    StopRun,
    Subscriber,
    named_parameters,
    observer,
)

pytestmark = pytest.mark.torch


class Block(nn.Module):
    """Two layers with an activation in place, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.down(self.act(self.up(x)))
        return x + (y if scale is None else y * scale)


class Net(nn.Module):
    """Two blocks; `around` wraps their calls."""

    def __init__(self, around: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=torch.ones(1)) if self.around is None else self.around(layer, x)
        return x


class Log(Subscriber):
    """Lists the events."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def step_begins(self, step: int) -> None:
        self.events.append(("begins", step))

    def forward(self, event: ModuleCall) -> None:
        place = event.place
        self.events.append(("forward", place.name, place.micro, place.call))

    def backward(self, event: ModuleGradient) -> None:
        self.events.append((event.kind, event.place.name, event.place.micro, event.tensor))

    def gradient(self, event: ParameterGradient) -> None:
        self.events.append(("gradient", event.place.name, event.place.micro))

    def optimizer_begins(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> None:
        self.events.append(("optimizer", *(each.name for each in parameters if each.in_model)))

    def step_ends(self, step: int) -> None:
        self.events.append(("ends", step))

    def of(self, kind: str) -> list[tuple[object, ...]]:
        return [each[1:] for each in self.events if each[0] == kind]


def traces() -> list[object]:
    """Everything that torch could call, and its filter of warnings."""
    return [
        *(str(getattr(installed, name)) for name in dir(installed) if name.startswith("_global_")),
        dict(optimizers._global_optimizer_pre_hooks),
        dict(optimizers._global_optimizer_post_hooks),
        list(warnings.filters),
    ]


def train(net: nn.Module, steps: int = 1, micros: int = 1) -> None:
    optimizer = SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        for _ in range(micros):
            net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


NAMES = [f"layers.{index}.{name}" for index in (0, 1) for name in ("up", "act", "down")]


def test_steps_micro_batches_and_names() -> None:
    log = Log()
    with observer().subscribe(log):
        train(Net(), steps=2, micros=2)
    assert [each for each in log.events if each[0] in ("begins", "ends")] == [
        ("begins", 0),
        ("ends", 0),
        ("begins", 1),
        ("ends", 1),
    ]
    forwards = log.of("forward")
    expected = [*NAMES[:3], "layers.0", *NAMES[3:], "layers.1", ""]
    assert forwards == [(name, micro, 0) for _ in range(2) for micro in range(2) for name in expected]
    names = [name for name, _ in named_parameters(Net())]
    assert sorted(log.of("gradient")) == sorted((name, micro) for name in names for micro in range(2) for _ in range(2))
    assert log.of("optimizer") == [tuple(names)] * 2
    assert ("layers.1.down", 1, "") in log.of("grad_output")
    assert ("layers.1", 0, "0") in log.of("grad_input")


def test_gradients_are_those_of_autograd() -> None:
    net, found = Net(), dict[tuple[str, str], torch.Tensor]()

    class Keep(Subscriber):
        def backward(self, event: ModuleGradient) -> None:
            found[event.kind, event.place.name] = event.gradient.clone()

        def gradient(self, event: ParameterGradient) -> None:
            found["gradient", event.place.name] = event.gradient.clone()

    with observer().subscribe(Keep()):
        x = torch.randn(3, 4)
        net(x).pow(2).sum().backward()
    for name, parameter in net.named_parameters():
        assert torch.equal(found["gradient", name], parameter.grad)
    middle = net.layers[0](x).detach().requires_grad_()
    net.layers[1](middle).pow(2).sum().backward()
    assert torch.allclose(found["grad_input", "layers.1"], middle.grad)
    assert torch.equal(found["grad_output", "layers.0"], found["grad_input", "layers.1"])


def test_nothing_is_left_in_torch() -> None:
    net = Net()
    before = traces()
    with observer().subscribe(Log()):
        assert traces() != before
        with observer().subscribe(Log()):
            train(net)
        assert observer().is_installed
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(torch.ones(2, 5))
        train(net)
    assert traces() == before
    assert not observer().is_installed
    for module in net.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    for parameter in net.parameters():
        assert not parameter._backward_hooks


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_is_no_second_call(reentrant: bool) -> None:
    logs = []
    for around in (None, lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)):
        net = Net(around)
        log = Log()
        with observer().subscribe(log):
            optimizer = SGD(net.parameters(), lr=0.1)
            for _ in range(2):
                net(torch.ones(2, 4, requires_grad=True)).sum().backward()
            optimizer.step()
        logs.append(log)
    plain, recomputed = logs
    for kind in ("forward", "grad_output", "gradient"):
        # The plain program also passes `scale`, which has no gradient.
        assert sorted(map(str, recomputed.of(kind))) == sorted(map(str, plain.of(kind))), kind


@pytest.mark.parametrize("how", ["whole", "before", "part", "in place"])
def test_a_compiled_graph_is_observed_at_its_edges(how: str, recwarn: pytest.WarningsRecorder) -> None:
    net = Net()
    model: nn.Module = net
    if how == "part":
        net.layers[1].compile(backend="aot_eager")
    elif how == "in place":
        net.compile(backend="aot_eager")
    else:
        model = torch.compile(net, backend="aot_eager")
    if how == "before":
        train(model)
    log = Log()
    with observer().subscribe(log):
        train(model, steps=2)
    assert not [each for each in recwarn if "global hooks" in str(each.message)]
    once = [(name, 0, 0) for name in ([*NAMES[:3], "layers.0", "layers.1", ""] if how == "part" else [""])]
    assert log.of("forward") == once * 2
    assert sorted(log.of("gradient")) == sorted((name, 0) for name, _ in net.named_parameters() for _ in range(2))
    assert log.of("optimizer") == [tuple(name for name, _ in net.named_parameters())] * 2
    assert not observer().is_installed
    assert not hasattr(net.layers[1]._compiled_call_impl, "observes")


def test_validation_and_losses_are_no_micro_batches() -> None:
    net, loss, log = Net(), nn.MSELoss(), Log()
    with observer().subscribe(log):
        optimizer = SGD(net.parameters(), lr=0.1)
        with torch.no_grad():
            net(torch.ones(2, 4))
        loss(net(torch.ones(2, 4)), torch.zeros(2, 4)).backward()
        optimizer.step()
    assert [each for each in log.of("forward") if each[0] in ("", "loss")] == [("", 0, 0), ("loss", 0, 0)]


def test_parts_that_a_program_calls_itself_have_the_names_of_the_model() -> None:
    net, log = Net(), Log()
    with observer().subscribe(log):
        x = net.layers[0](torch.ones(2, 4))
        net.layers[1](x).sum().backward()
    assert [name for name, *_ in log.of("forward")] == [*NAMES[:3], "layers.0", *NAMES[3:], "layers.1"]


def test_a_step_of_two_optimizers() -> None:
    net, log = Net(), Log()
    with observer().subscribe(log):
        optimizers = [SGD(layer.parameters(), lr=0.1) for layer in net.layers]
        for _ in range(2):
            net(torch.ones(2, 4)).sum().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
    assert [each for each in log.events if each[0] in ("begins", "ends")] == [
        ("begins", 0),
        ("ends", 0),
        ("begins", 1),
        ("ends", 1),
    ]
    assert len(log.of("optimizer")) == 4


def test_a_subscriber_that_fails_ends_itself_alone() -> None:
    class Fails(Subscriber):
        def forward(self, event: ModuleCall) -> None:
            raise ValueError("no")

    log = Log()
    said = "Fails failed and has ended; training continues: ValueError: no"
    with observer().subscribe(Fails()), observer().subscribe(log), pytest.warns(RuntimeWarning, match=said):
        train(Net())
    assert len(log.of("forward")) == 9


def test_a_subscriber_may_stop_the_program() -> None:
    class Stops(Subscriber):
        def optimizer_begins(self, optimizer: Optimizer, parameters: Sequence[NamedParameter]) -> None:
            raise StopRun("here")

    with observer().subscribe(Stops()), pytest.raises(StopRun, match="here"):
        train(Net())
    assert not observer().is_installed


def test_a_forward_that_was_interrupted_is_forgotten() -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.raises = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            if self.raises:
                raise KeyboardInterrupt
            return x

    net, log = Interrupted(), Log()
    with observer().subscribe(log):
        with pytest.raises(KeyboardInterrupt):
            net(torch.ones(2, 4))
        net.raises = False
        train(net)
    assert log.of("forward") == [("inner", 0, 0), ("inner", 1, 0), ("", 1, 0)]
