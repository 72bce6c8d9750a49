"""Show handles in notebooks and debuggers: short forms, pictures of the parts, and addresses of values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]  # torch has no public name for it
)

from monarch_kernel.display import tables
from monarch_kernel.display.quantities import text_size
from monarch_kernel.display.tables import AsTable, TableView
from monarch_kernel.runtime.tensor.rank.held import TensorPart, part_here

if TYPE_CHECKING:
    from monarch_kernel.runtime.tensor.controller.handle import Tensor

#: The maximum size of a drawing of a tensor, and the minimum length of a side (pixels).
_LONGEST, _LEAST = 84, 12
#: The maximum number of ranks with drawings; with more ranks, only the text is shown.
_MOST_DRAWINGS = 256


def short_form(handle: Tensor) -> str:
    """Return `Tensor([4, 2], float32, sharded, mesh=m(dp=2, mp=2))` for a handle. No rank is queried."""
    mesh = handle._spec.mesh
    shape = ", ".join(f"{label}={size}" for label, size in zip(mesh.labels, mesh.sizes))
    layout = getattr(handle._owner, "layout", None)
    how = "" if not mesh.sharded else f", [{', '.join(layout)}]" if layout else ", sharded"
    grad = ", requires_grad=True" if handle.requires_grad else ""
    value = "" if handle._constant is None else f", value={handle._constant.item():g}"
    dtype = str(handle.dtype).removeprefix("torch.")
    return f"{type(handle).__name__}({list(handle.shape)}, {dtype}{how}, mesh={mesh.name}({shape}){value}{grad})"


def handle_html(handle: Tensor) -> str:
    """Return HTML with the short form, and with the methods that show more."""
    hint = "its values: inspect(t), t.tolist(); its parts: t.visualize()"
    return f'<div style="{tables.BOX}">{escape(short_form(handle))}</div><div style="{tables.DIM}">{escape(hint)}</div>'


def picture_of(handle: Tensor) -> TensorPicture:
    """Query the ranks for their parts of a tensor, in one round trip."""
    mesh = handle._spec.mesh
    mesh.engine.plan.synchronised("visualize()")
    parts: list[TensorPart] = mesh.engine.ask(mesh, part_here, handle)
    if mesh.sharded:
        handle._owner.layout = parts[0].placements
    return TensorPicture(
        tuple(handle.shape), str(handle.dtype).removeprefix("torch."), mesh.name, mesh.labels, mesh.sizes, tuple(parts)
    )


class TensorPicture(AsTable):
    """Which rank has which part of a tensor: a drawing for each rank in notebooks, index ranges as text elsewhere.

    Attributes:
        shape, dtype: the metadata of the whole tensor.
        mesh: the name of its mesh.
        labels, sizes: the dimensions of the mesh.
        parts: the part of each rank, in rank order.
    """

    __slots__ = ("dtype", "labels", "mesh", "parts", "shape", "sizes")

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str,
        mesh: str,
        labels: tuple[str, ...],
        sizes: tuple[int, ...],
        parts: tuple[TensorPart, ...],
    ) -> None:
        self.shape, self.dtype, self.mesh = shape, dtype, mesh
        self.labels, self.sizes, self.parts = labels, sizes, parts

    @property
    def placements(self) -> tuple[str, ...]:
        """The placement for each dimension of the mesh; empty if every rank has a separate tensor."""
        return self.parts[0].placements

    def table(self) -> TableView:
        """Return the index ranges by rank, with the last dimension of the mesh from left to right."""
        cells = [self._ranges(part) for part in self.parts]
        return TableView(self._headings(), self._rows(cells), self._caption())

    def _repr_html_(self) -> str:
        if len(self.parts) > _MOST_DRAWINGS:
            return super()._repr_html_()
        colours = _colours([(part.offsets, part.shape) for part in self.parts], own=not self.placements)
        cells = [
            f"{self._drawing(part, colour)}<div>{escape(self._ranges(part))}</div>"
            for part, colour in zip(self.parts, colours, strict=True)
        ]
        head = "".join(f'<th style="{tables.LEFT}">{escape(text)}</th>' for text in self._headings())
        body = "".join(
            f'<tr><th style="{tables.NAME}">{escape(name)}</th>'
            + "".join(f'<td style="{tables.NAME};{tables.FONT};font-size:11px">{cell}</td>' for cell in row)
            + "</tr>"
            for name, *row in self._rows(cells)
        )
        return (
            f'<div style="{tables.CAPTION}">{escape(self._caption())}</div>'
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    # -- text ---------------------------------------------------------------------------------------

    def _caption(self) -> str:
        how = f"[{', '.join(self.placements)}]" if self.placements else "a separate tensor on every rank"
        shape = ", ".join(f"{label}={size}" for label, size in zip(self.labels, self.sizes))
        most = max(part.nbytes for part in self.parts)
        devices = sorted({part.device.partition(":")[0] for part in self.parts})
        size = (
            f"{text_size(most)} on a rank" if len({p.nbytes for p in self.parts}) == 1 else f"up to {text_size(most)}"
        )
        return f"{list(self.shape)} {self.dtype} on {self.mesh} ({shape}), {how}: {size}, {' and '.join(devices)}"

    def _headings(self) -> list[str]:
        if len(self.sizes) < 2:
            return ["", ""]
        return ["", *(f"{self.labels[-1]}={at}" for at in range(self.sizes[-1]))]

    def _rows(self, cells: Sequence[str]) -> list[list[str]]:
        if len(self.sizes) < 2:
            label = self.labels[0] if self.labels else "rank"
            return [[f"{label}={at}", cell] for at, cell in enumerate(cells)]
        width = self.sizes[-1]
        names = [
            ", ".join(f"{label}={at}" for label, at in zip(self.labels, place))
            for place in itertools.product(*map(range, self.sizes[:-1]))
        ]
        return [[name, *cells[at * width : (at + 1) * width]] for at, name in enumerate(names)]

    @staticmethod
    def _ranges(part: TensorPart) -> str:
        if 0 in part.shape:
            return "nothing"
        inside = ", ".join(f"{first}:{first + size}" for first, size in zip(part.offsets, part.shape))
        return f"[{inside}]{' (a term)' if part.partial else ''}"

    # -- drawing ------------------------------------------------------------------------------------

    def _drawing(self, part: TensorPart, colour: str) -> str:
        """Draw the whole tensor as an outline, with this part filled.

        It shows two dimensions; split dimensions come first.
        """
        down, across = self._axes()
        rows = self.shape[down] if down is not None else 1
        columns = self.shape[across] if across is not None else 1
        scale = _LONGEST / max(rows, columns, 1)
        width, height = max(_LEAST, columns * scale), max(_LEAST, rows * scale)

        def extent(axis: int | None, whole: int, length: float) -> tuple[float, float]:
            if axis is None or not whole:
                return 0.0, length
            return part.offsets[axis] / whole * length, part.shape[axis] / whole * length

        y, h = extent(down, rows, height)
        x, w = extent(across, columns, width)
        filled = (
            ""
            if 0 in part.shape
            else (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(w, 1):.1f}" height="{max(h, 1):.1f}" fill="{colour}" '
                f'fill-opacity="{0.35 if part.partial else 0.75}"'
                f"{' stroke-dasharray=' + chr(34) + '3 2' + chr(34) if part.partial else ''} "
                f'stroke="{colour}"/>'
            )
        )
        return (
            f'<svg width="{width + 2:.0f}" height="{height + 2:.0f}" viewBox="-1 -1 {width + 2:.1f} {height + 2:.1f}" '
            f'role="img" aria-label="{escape(self._ranges(part), quote=True)}">'
            f'<rect width="{width:.1f}" height="{height:.1f}" fill="none" stroke="currentColor" stroke-opacity=".45"/>'
            f"{filled}</svg>"
        )

    def _axes(self) -> tuple[int | None, int | None]:
        """Return the dimensions that are drawn downwards and across."""
        if len(self.shape) < 2:
            return (None, 0) if self.shape else (None, None)
        cut = [d for d, size in enumerate(self.shape) if any(part.shape[d] != size for part in self.parts)]
        rest = [d for d in reversed(range(len(self.shape))) if d not in cut]
        down, across = sorted([*cut, *rest][:2])
        return down, across


def _colours(parts: Sequence[object], own: bool) -> list[str]:
    """Return a colour for each rank. Ranks with the same part have the same colour."""
    keys = list(range(len(parts))) if own else list(parts)
    distinct = {key: at for at, key in enumerate(dict.fromkeys(keys))}
    return [f"hsl({distinct[key] * 360 // max(len(distinct), 1)},60%,50%)" for key in keys]


class ValueAddress(NamedTuple):
    """The address of a value on ranks, for `tensor_value`.

    Attributes:
        engine: the key of its engine.
        number: the number of the value.
    """

    engine: str
    number: int


def address_of(handle: Tensor, timeout: float) -> ValueAddress:
    """Return the address of a handle's value on its ranks, after they have run the operations issued so far.

    Args:
        timeout: how long to wait for the operations (seconds); ranks that are late may not have the value.

    Raises:
        DeviceMeshError: a rank has died.
    """
    mesh = handle._spec.mesh
    engine = mesh.engine
    with engine.lock, _disable_current_modes():
        mesh.check_alive()
        engine.turn_to(mesh)
        engine.flush()
        call = mesh.workers.done.call()
    try:
        engine.answer(mesh, call, timeout)
    except TimeoutError:
        pass
    return ValueAddress(engine._key, handle._owner.id)
