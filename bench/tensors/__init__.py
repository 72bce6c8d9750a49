"""``python -m bench.tensors``: tensors sharded over a mesh, compared with torchmonarch and plain SPMD on the same work.

``engine`` runs on torchmonarch and on this project, ``dtensors`` and ``spmd`` do the same work driven from a controller
and under torchrun, ``failures`` kills ranks; ``rows`` has the bars, and ``__main__`` runs all of them in turn and
prints.
"""
