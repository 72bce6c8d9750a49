"""Gradients one by one, their order, and functions with gradients of their own: there with torch 2.14.1 alone."""

import warnings

import torch
from monarch import Stream, grad_function, grad_generator, inspect
from monarch.actor import this_host
from monarch.config import configure
from monarch.gradient import GradientGenerator
from monarch.gradient_generator import gradient_execution_order
from report import raises, show

warnings.simplefilter("ignore")
configure(host_spawn_ready_timeout="2m", mesh_proc_spawn_max_idle="2m", actor_spawn_max_idle="2m")


def values():
    return [torch.full((2,), float(k), requires_grad=True) for k in (1, 2, 3)]


def gradients(*args):
    return [None if g is None else fetched(g) for g in grad_generator(*args)]


def each_way():
    a, b, c = values()
    show("three", gradients(((a * b) * c).sum(), [a, b, c]))
    show("in the order of the request", gradients([((a * b) * c).sum()], [c, b, a]))
    show("roots of several", gradients([(a * b).sum(), (b * c).sum()], [a, b, c]))
    show("given gradients", gradients([a * b * c], [a], [torch.full((2,), 2.0)]))
    show("roots that are no numbers", gradients([a * b], [a]))
    show("some roots given", gradients([(a * b).sum(), a * c], [a], [None, torch.ones(2)]))
    show("not used", gradients([(a * b).sum()], [a, c]))
    x = a * b
    show("within", gradients([(x * c).sum()], [x, a]))
    show("broadcasts", gradients((a.expand(3, 2) * b).sum() + c.sum(), [a, b, c]))
    show("none", gradients())
    show("left alone", a.grad, isinstance(grad_generator([x.sum()], [a]), GradientGenerator))
    ended = grad_generator([(a * b).sum()], [a])
    next(ended)
    raises("the end", StopIteration, lambda: next(ended))
    show("order", gradient_execution_order([((a * b) * c).sum()], [a, b, c]))
    y = x + c
    root = (y * a).sum()
    show("order of what is used twice", gradient_execution_order([root], [a, b, c, x, y]))
    show("order with one not used", gradient_execution_order([(a * b).sum()], [a, c]))
    layers = [torch.full((2, 2), float(k), requires_grad=True) for k in range(1, 5)]
    h = torch.ones(2, 2)
    for layer in layers:
        h = (h @ layer).relu()
    order = gradient_execution_order([h.sum()], layers)
    found = grad_generator([h.sum()], [layers[k] for k in order])
    show("a chain", order, {k: fetched(g) for k, g in zip(order, found)})

    @grad_function
    def two(x, y):
        return (x + y, x * y), lambda first, second: (first * 3, second * 7)

    @grad_function
    def scaled(x, factor):
        return (x * factor, None, factor), lambda grad, *_: (grad * factor, None)

    @grad_function
    def spread(x):
        return x.expand(3, 2), lambda grad: grad.sum(0)

    @grad_function
    def half(x, y):
        return x * y, lambda grad: (None, grad)

    a, b, c = values()
    plus, times = two(a, b)
    (plus + times).sum().backward()
    show("two results", fetched(plus.detach()), fetched(a.grad), fetched(b.grad))
    a, b, c = values()
    result = scaled(a, 3)
    result[0].sum().backward()
    spread(b).mul(2).sum().backward()
    show("what is no tensor", result[1:], fetched(a.grad), fetched(b.grad))
    show("in a generator", gradients([(scaled(c, 2)[0] * 5).sum()], [c]))
    half(a, c).sum().backward()
    show("None", fetched(a.grad), fetched(c.grad), half(a.detach(), c.detach()).requires_grad)

    @grad_function
    def unlike(x):
        return x * 2, lambda grad: torch.ones(5)

    @grad_function
    def too_many(x):
        return x * 2, lambda grad: (grad, grad, grad)

    raises("another shape", RuntimeError, lambda: unlike(a).sum().backward())
    raises("too many", RuntimeError, lambda: too_many(a).sum().backward())


fetched = torch.Tensor.tolist
each_way()
procs = this_host().spawn_procs({"gpus": 2})
with procs.activate():
    fetched = lambda t: inspect(t).tolist()  # noqa: E731
    each_way()
    stages = [Stream("first"), Stream("second")]

    @grad_function
    def into_second(t):
        lent, borrow = stages[1].borrow(t)
        with stages[1].activate():
            moved = lent.clone()
        borrow.drop()

        def back(grad):
            lent, borrow = stages[0].borrow(grad)
            with stages[0].activate():
                moved = lent.clone()
            borrow.drop()
            return moved

        return moved, back

    with stages[0].activate():
        w, x = torch.full((2, 2), 2.0, requires_grad=True), torch.ones(2, 2)
        h = into_second(x @ w)
    with stages[1].activate():
        v = torch.full((2, 2), 3.0, requires_grad=True)
        steps = grad_generator([(h @ v).sum()], [v, w])
        show("second stage", inspect(next(steps)).tolist())
