"""Record functions of tensors on a mesh once, and replay each with one record.

``compiled`` has `compile`, and replays a run. ``reachable`` finds the objects that a function reaches besides its
arguments. ``recorder`` records a run, and ``numbers`` follows floats through its arithmetic. ``segments`` has the
operations that ranks run (with ``rank/tensor_executor.py``).
"""
