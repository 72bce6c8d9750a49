"""Run tools in the processes of another runtime, which only carries messages between them.

The controller (``controller.py``) and each rank (``attached_process.py``) hold the tools' actors (``tool_process.py``,
``tool_actor.py``) and exchange the messages of ``wire.py``. An engine starts an attached process in each rank and
carries its messages. Calls, errors and futures are those of this package's own runtime (``message_node.py``,
``meshes.py``).
"""
