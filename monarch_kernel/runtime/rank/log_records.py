"""Logging in a rank, as programs written for Monarch find it.

The root logger is at INFO, and a record of an actor begins with its name, as in ``[actor=<root>.<train.Trainer
trainer{'gpus': 0/2}>] step 3``. A program that configures logging itself changes this as it changes any default.
Programs and cells that an actor of this package runs log as they do elsewhere.
"""

from __future__ import annotations

import logging
from typing import Any

from monarch_kernel.runtime.actor.context import current
from monarch_kernel.runtime.actor.definition import class_label


def install() -> None:
    """Set the defaults of this process."""
    logging.getLogger().setLevel(logging.INFO)
    for name, level in (("monarch_kernel", logging.WARNING), ("monarch_kernel.actors", logging.INFO)):
        logging.getLogger(name).setLevel(level)  # what this package itself notes is not for users; ``Actor.logger`` is
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    logging.lastResort = shown  # used while the program has set no handler
    make = logging.getLogRecordFactory()

    def with_actor(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        name = _actor()
        if name:
            record.msg = f"[actor={name.replace('%', '%%') if record.args else name}] {record.msg}"
        return record

    logging.setLogRecordFactory(with_actor)


def _actor() -> str:
    """The running actor, if it is the user's; "" otherwise."""
    here = current.get()
    if here is None or not here.actor_instance.creator:
        return ""
    instance: Any = here.actor_instance
    spec = instance._spec
    if spec.tool or spec.cls.__module__.startswith("monarch_kernel."):
        return ""
    owner = instance.creator if instance.creator != "root" else "<root>"
    return f"{owner}.<{class_label(spec.cls)} {instance.name}{instance.rank!r}>"
