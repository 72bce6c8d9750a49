"""Remote functions that answer to a port."""

from monarch import remote
from monarch.actor import Channel, send, this_host
from report import check


@remote
def add(x, y=0):
    return x + y


@remote
def fail():
    raise ValueError("fails")


procs = this_host().spawn_procs({"hosts": 2, "gpus": 2})
port, receiver = Channel.open()
ranked, ranks = Channel.open_ranked()
with procs.activate():
    send(add, args=(1,), kwargs={"y": 1}, port=port)
    check("all", lambda: [receiver.recv().get(timeout=60) for _ in range(4)])
    send(add, args=(3,), kwargs={}, port=ranked)
    check("ranked", lambda: sorted(ranks.recv().get(timeout=60) for _ in range(4)))
    send(add, (4,), {}, port, selection="choose")
    check("chosen", lambda: receiver.recv().get(timeout=60))
    check("called", lambda: add.call(5).get().values())
    port, failures = Channel.open()
    send(fail, (), {}, port)
    check("failing", lambda: failures.recv().get(timeout=60), Exception)
