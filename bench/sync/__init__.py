"""``python -m bench.sync``: how long it takes until a workspace is on all hosts, beside rsync and torchmonarch.

``trees`` makes the trees, ``hosts`` the places that receive them, ``peers`` what sends them; ``rows`` knows the bars,
``phases`` measures, and ``__main__`` prints.
"""
