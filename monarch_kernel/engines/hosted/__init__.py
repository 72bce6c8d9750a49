"""Tools in the processes of another runtime, which only has to carry messages between them.

The controller (``controller.py``) and each rank (``attached_process.py``) hold the tools' actors (``tool_process.py``,
``tool_actor.py``) and send each other the messages of ``wire.py``. An engine starts a guest in each rank and carries
its messages; calls, errors and futures are those of this package's own runtime (``message_node.py``, ``meshes.py``).
"""
