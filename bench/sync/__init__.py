"""``python -m bench.sync``: the time until a workspace is on all hosts, compared with rsync and torchmonarch.

``trees`` creates the trees, ``hosts`` the hosts that receive them, ``peers`` the tools that send them; ``rows`` has the
bars, ``phases`` measures, and ``__main__`` prints.
"""
