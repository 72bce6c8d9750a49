"""The data plane: registered memory that other processes read and write without its owner taking part.

``memory`` says where the bytes of an object lie, and ``registration_table`` which memory is registered. ``engine``
holds a process's part of it all, and chooses a backend per pair of processes: one of ``backends`` within a host,
``verbs`` or ``tcp`` between hosts. ``owner_service`` is what owners do when asked, ``device`` moves bytes that may be a
GPU's. ``buffer`` and ``action`` are what users hold.
"""
