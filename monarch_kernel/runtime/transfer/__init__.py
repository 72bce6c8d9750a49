"""The data plane: registered memory that other processes read and write without the owner's participation.

``memory`` locates the bytes of an object, and ``registration_table`` lists the registered memory. ``engine`` runs a
process's transfers, and chooses a backend per pair of processes: one of ``backends`` within a host, ``verbs`` or
``tcp`` between hosts. ``engine.OwnerService`` serves requests to owners, ``device`` moves bytes of CPU or GPU memory.
``buffer`` and ``action`` are the users' objects.
"""
