"""Run tools in the processes of another runtime, or program, which only carries messages between them.

In the controller (``controller.py``), each rank is a proc of this process's own node, reached over a link that the
other runtime carries. In each rank (``attached_process.py``), the tools' actors (``tool_actor.py``) answer the messages
of this package's runtime and those of ``wire.py``. ``meshes.py`` has the handles of these meshes.
"""
