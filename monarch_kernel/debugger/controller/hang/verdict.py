"""The verdict on ranks that make no progress. Plain values that display themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from monarch_kernel.debugger.source_locations import SourceLocation
from monarch_kernel.display import tables
from monarch_kernel.display.tables import Printer, TableView, table_text
from monarch_kernel.meshes import format_ranks

#: Kinds of verdict.
SKIPPED = "skipped"  # a rank skipped a collective
EXTRA = "extra"  # a rank called a collective that the other ranks did not
ORDER = "order"  # a rank called a different collective from the other ranks
SHAPE = "shape"  # a rank called it with other sizes or types
ROOT = "root"  # a rank named another source or destination
FAILED = "failed"  # an exception ended the rank's code
LOADER = "loader"  # a rank is in a data loader
RUNNING = "running"  # a rank is in code that makes progress
STANDING = "standing"  # a rank is in code that makes no progress
PAUSED = "paused"  # a debugger has stopped a rank
SILENT = "silent"  # a rank's process does not run: stopped by a signal, for instance
DEAD = "dead"  # a rank's process has ended
CYCLE = "cycle"  # ranks wait for each other in different operations
UNDECIDED = "undecided"
NOTHING = "nothing"  # no rank waits for another


@dataclass(frozen=True, slots=True)
class Culprit:
    """A rank that other ranks wait for.

    Attributes:
        rank: the rank in its mesh.
        place: the line to blame, or where the rank is instead; None if unknown.
        why: what it did, as a verb phrase about the rank.
        instead: the line where the other ranks are, if this rank made a different call.
    """

    rank: int
    place: SourceLocation | None
    why: str
    instead: SourceLocation | None = None


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """Ranks that are doing the same."""

    ranks: tuple[int, ...]
    doing: str
    place: SourceLocation | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """An explanation why ranks wait, and for which ranks.

    Attributes:
        kind: one of the kinds above.
        culprits: the ranks to blame; if undecided, all candidates.
        sentence: the verdict in words.
        rows: what all ranks are doing, those to blame first.
        likely: whether it is uncertain, although nothing contradicts it.
        notes: further information, each a sentence.
        mesh: the name of the mesh.
        alternatives: if undecided, the possible verdicts in words.
    """

    kind: str
    culprits: tuple[Culprit, ...]
    sentence: str
    rows: tuple[VerdictRow, ...] = ()
    likely: bool = False
    notes: tuple[str, ...] = ()
    mesh: str = ""
    alternatives: tuple[str, ...] = ()

    @property
    def decided(self) -> bool:
        """Whether it names the ranks to blame."""
        return self.kind not in (UNDECIDED, NOTHING, CYCLE)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks to blame, sorted; if undecided, the candidates."""
        return tuple(sorted({culprit.rank for culprit in self.culprits}))

    def __str__(self) -> str:
        lines = [self.sentence, *self.notes]
        if self.rows:
            table = table_text(TableView([], [(listed(row.ranks), row.doing) for row in self.rows]))
            lines += [f"  {line}" for line in table.split("\n")]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        blamed = set(self.ranks) if self.decided else set[int]()
        body = "".join(
            f'<tr><td style="{tables.NAME}{f";{tables.BAD}" if blamed.intersection(row.ranks) else ""}">'
            f'<b>{escape(listed(row.ranks))}</b></td><td style="{tables.LEFT}">{escape(row.doing)}</td></tr>'
            for row in self.rows
        )
        notes = "".join(f'<div style="{tables.DIM}">{escape(note)}</div>' for note in self.notes)
        head = f'<thead><tr><th style="{tables.LEFT}">ranks</th><th style="{tables.LEFT}">doing</th></tr></thead>'
        rows = f"<table>{head}<tbody>{body}</tbody></table>" if body else ""
        news = tables.NEWS if self.kind != NOTHING else ""
        sentence = f'<div style="{tables.HEADLINE};{news}">{escape(self.sentence)}</div>'
        return f'<div style="{tables.VIEW}">{sentence}{notes}{rows}</div>'

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        printer.text(str(self))


def listed(ranks: Sequence[int]) -> str:
    """A set of ranks in a sentence: `0-2, 5`."""
    return format_ranks(ranks, limit=8).replace(",", ", ")
