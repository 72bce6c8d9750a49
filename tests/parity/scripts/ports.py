"""Channels, ports, and explicit responses."""

from monarch.actor import Actor, Channel, Port, current_rank, endpoint, this_host
from report import raises, show


class Worker(Actor):
    def __init__(self):
        self.kept = []

    @endpoint(explicit_response_port=True)
    def answer(self, port: "Port[int]", x):
        port.send(x + current_rank().rank)

    @endpoint(explicit_response_port=True)
    def politely(self, port: "Port[int]"):
        port.exception(KeyError("politely"))

    @endpoint(explicit_response_port=True)
    def later(self, port: "Port[int]"):
        self.kept.append(port)

    @endpoint
    def release(self, value):
        for port in self.kept:
            port.send(value)
        self.kept.clear()

    @endpoint
    def tell(self, port, values):
        for value in values:
            port.send(value)

    @endpoint
    def fail(self, port):
        port.exception(ValueError("sent"))

    @endpoint(explicit_response_port=True)
    def hand_over(self, port: "Port[int]", other):
        other.forward.broadcast(port, "from the other")


class Other(Actor):
    @endpoint
    def echo(self, value):
        return value

    @endpoint
    def forward(self, port, value):
        port.send(value)


procs = this_host().spawn_procs(per_host={"gpus": 2})
mesh = procs.spawn("worker", Worker)
other = procs.slice(gpus=0).spawn("other", Other)
one = mesh.slice(gpus=1)
show("explicit", list(mesh.answer.call(5).get().values()))
try:
    one.politely.call_one().get()
except KeyError as e:
    show("exception", "politely" in str(e))
call = one.later.call_one()
one.release.call_one("now").get()
show("later", call.get())
show("handed over", list(mesh.hand_over.call(other).get().values()))
port, receiver = Channel.open()
one.tell.call_one(port, [1, "two", {"three": 3}]).get()
show("channel", [receiver.recv().get() for _ in range(3)])
one.fail.call_one(port).get()
raises("recv", ValueError, lambda: receiver.recv().get())
again = other.echo.call_one({"port": port}).get()["port"]
again.send("travelled")
show("port", receiver.recv().get())
raises("sending a receiver", TypeError, lambda: other.echo.call_one(receiver))
once, once_receiver = Channel.open(once=True)
once.send(1)
show("once", once_receiver.recv().get())
