"""Functions of tensors on a mesh that are recorded once and replayed by one record.

``compiled`` has `compile`; ``reachable`` is what a function reaches beside its arguments; ``recorder`` takes down a
run, and ``numbers`` follows floats through its arithmetic; ``segments`` are what ranks run of it (by
``rank/recorded.py``), and a ``recording`` repeats it.
"""
