"""How ranks are started and what they find: commands, bindings, logging."""

import asyncio
import logging
import os
import sys
import threading

from monarch.actor import Actor, default_bootstrap_cmd, endpoint, this_host
from report import show


class Shows(Actor):
    @endpoint
    def variable(self):
        return os.environ.get("COLOUR")

    @endpoint
    def cpus(self):
        return sorted(os.sched_getaffinity(0))

    @endpoint
    def logged(self):
        seen = []
        handler = logging.Handler()
        handler.emit = lambda record: seen.append(record.getMessage())
        logging.getLogger().addHandler(handler)
        logging.getLogger("mine").warning("hello %s", "you")
        logging.getLogger("mine").info("100 %")
        logging.getLogger("mine").debug("not shown")
        thread = threading.Thread(target=lambda: logging.getLogger("mine").info("of a thread"))
        thread.start()
        thread.join()
        logging.getLogger().removeHandler(handler)
        # Monarch may write the name twice.
        return [
            (line.startswith("[actor="), "Shows shows{'n': 0/2}" in line, line.rpartition("] ")[2]) for line in seen
        ]

    @endpoint
    def level(self):
        return logging.getLevelName(logging.getLogger().level), logging.getLogger("mine").isEnabledFor(logging.INFO)


procs = this_host().spawn_procs({"n": 2}, proc_bind=[{"physcpubind": "0"}, {}])
shows = procs.spawn("shows", Shows)
show("bound", shows.slice(n=0).cpus.call_one().get())
show("level", *shows.slice(n=0).level.call_one().get())
for line in shows.slice(n=0).logged.call_one().get():
    show("logged", *line)
show("option", asyncio.run(procs.logging_option(level=logging.WARNING)))


async def awaited():
    return await procs.logging_option(level=logging.INFO)


show("awaited", asyncio.run(awaited()))
command = type(default_bootstrap_cmd())(
    program=sys.executable, arg0=None, args=["-m", "monarch._src.actor.bootstrap_main"], env={"COLOUR": "green"}
)
others = this_host().spawn_procs({"n": 1}, bootstrap_command=command).spawn("others", Shows)
show("by a command", others.variable.call_one().get(timeout=60), others.level.call_one().get(timeout=60))
