"""One file at another prefix, by what a manifest says of it. Needs the standard library only (see ``conda_unpack``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workspace_sync.environment import binary, compiled, hashes, text


def rewritten(
    how: tuple[str, bytes, int, Sequence[bytes], Sequence[tuple[bytes, bytes]]],
    data: bytes,
    target: bytes,
    tree: bytes,
    path: bytes,
    read: Callable[[bytes], bytes] | None,
) -> bytes:
    """The content of a file at another prefix.

    Args:
        how: kind, prefix, space, files and places, as of ``Rewrite``.
        data: its content at the prefix that ``how`` has.
        target: the new prefix.
        tree: the folder that places are in.
        path: of the file in the environment.
        read: gives the new content of other files by their paths. Without it, an index keeps its hashes.

    Raises:
        PrefixTooLongError: a binary has no space for the prefix.
        CompiledError: a compiled module cannot be changed.
        ValueError: the kind is unknown.
    """
    kind, prefix, space, files, places = how
    if kind == "binary":
        return binary.replace_padded(data, prefix, target, space)
    if kind == "runpath":
        return binary.replace_runpaths(data, prefix, path, places[0][1] if places else b"")
    if kind == "pyc":
        return compiled.replace_compiled(data, prefix, target)
    if kind == "script":
        return text.replace_pip(data, prefix, target)
    if kind == "uv":
        return text.replace_uv(data, prefix, target)
    if kind == "env":
        return text.replace_conda_env(data, prefix, target)
    if kind == "home" or (kind == "text" and places):
        root = target if kind == "home" else tree
        return text.replace_paths(data, {**{p: (root + b"/" + to).rstrip(b"/") for p, to in places}, prefix: target})
    if kind == "text":
        return text.replace_conda(data, prefix, target)
    if kind in ("record", "conda", "rattler"):
        made = {} if read is None else {each: read(each) for each in files}
        if kind == "record":
            return hashes.replace_record(data, path, prefix, target, made)
        return hashes.replace_conda_record(data, prefix, target, made, sizes=kind == "rattler")
    raise ValueError(f"{path.decode(errors='backslashreplace')} is to be rewritten as {kind!r}, which is unknown here")
