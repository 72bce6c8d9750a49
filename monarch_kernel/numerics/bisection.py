"""Find the first commit of a repository at which a recorded training step computes something else.

Each commit is checked out into a worktree of its own in a private folder. There, a function of the commit builds the
model, and the recorded step runs in one process with the same weights, batch and random generators
(`monarch_kernel.numerics.reference`). The step of the good commit is compared with that of others, by bisection. The
user's own checkout is not touched.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from monarch_kernel import programs
from monarch_kernel.display.tables import AsReport, TableView, table_html, table_text
from monarch_kernel.numerics.alignment import Run
from monarch_kernel.numerics.comparison import AlignmentError, Comparison, compare_runs
from monarch_kernel.numerics.reference import (
    PERTURBED,
    Builder,
    Optimizers,
    ReferenceRunError,
    first_step,
    reference_of,
)

if TYPE_CHECKING:
    from monarch_kernel.numerics.recording import Recording

#: How long a command of git may take (seconds). Checking out a large repository takes the longest.
_GIT = 600.0


class BisectionError(RuntimeError):
    """A bisection cannot begin or end; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit.

    Attributes:
        id: its full name.
        subject: the first line of its message.
    """

    id: str
    subject: str

    def __str__(self) -> str:
        return f"{self.id[:10]} {self.subject}"


@dataclass(frozen=True, slots=True)
class Trial:
    """What the step of a commit did.

    Attributes:
        commit: the commit.
        comparison: with the step of the good commit; None if it could not run.
        problem: why it could not run; "" if it did.
    """

    commit: Commit
    comparison: Comparison | None
    problem: str = ""

    @property
    def equal(self) -> bool | None:
        """Whether the step is equal; None if it cannot be told."""
        return None if self.comparison is None else self.comparison.equal

    @property
    def verdict(self) -> str:
        """The verdict in a word or a sentence."""
        if self.comparison is None:
            return f"cannot run: {self.problem}"
        return {True: "equal", False: "different", None: "unsure"}[self.comparison.equal]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Bisection(AsReport):
    """The result of `bisect`. Displays itself as text and as HTML.

    Attributes:
        commit: the first commit whose step differs.
        comparison: how it differs from the good commit.
        others: commits before it that could not be judged, one of which may be the first.
        trials: the commits that ran, in the order of the history.
    """

    commit: Commit
    comparison: Comparison
    others: tuple[Commit, ...]
    trials: tuple[Trial, ...]

    @property
    def sentence(self) -> str:
        """The verdict."""
        if self.others:
            return (
                f"The step first differs at {self.commit}, or at one of {len(self.others)} commits before it that "
                f"could not be judged: {', '.join(each.id[:10] for each in self.others)}."
            )
        return f"The step first differs at {self.commit}."

    def _table(self) -> TableView:
        return TableView(
            ["commit", "subject", "step"],
            [[each.commit.id[:10], each.commit.subject, each.verdict] for each in self.trials],
        )

    def text(self) -> str:
        """Render the commit, how it differs, and the commits that ran as text."""
        return f"{self.sentence}\n\n{self.comparison.text()}\n\n{table_text(self._table())}"

    def html(self) -> str:
        """Render it as HTML."""
        return f"<div><b>{escape(self.sentence)}</b></div>{self.comparison.html()}{table_html(self._table())}"


def bisect(
    recording: Recording,
    builder: str,
    *,
    good: str,
    bad: str = "HEAD",
    optimizer: str = "",
    project: str | Path = ".",
    say: Callable[[str], object] = lambda text: None,
) -> Bisection:
    """Find the first commit between two whose step differs from the good one's.

    Args:
        recording: a recorded step with its tensors (`full=True`), of any of these commits.
        builder: `FILE:FUNCTION`; the file is relative to the project, and the function returns the model.
        good: a commit whose step is right.
        bad: a later commit whose step is wrong.
        optimizer: `FILE:FUNCTION` likewise; the function takes the model and returns its optimizer. By default, the
            recorded optimizer is built again, with its settings.
        project: a folder in the repository.
        say: called with a line for each commit that ran.

    Raises:
        BisectionError: there is no repository, the commits do not follow each other, or their steps do not differ.
        ReferenceRunError: the step of the good or of the bad commit cannot run.
        ValueError: `builder` names no function.
    """
    folder = Path(project).resolve()
    for text in (builder, *([optimizer] if optimizer else [])):
        file, colon, function = text.rpartition(":")
        if not colon or not function.isidentifier() or Path(file).is_absolute():
            raise ValueError(f"{text!r} is no function of a file of the project: write FILE:FUNCTION")
    top = Path(_git(folder, "rev-parse", "--show-toplevel"))
    inside = folder.relative_to(top.resolve())
    commits = _commits(folder, good, bad)
    with tempfile.TemporaryDirectory(prefix="monarch-bisect-") as work:
        runner = _Runner(recording, top, inside, (builder, optimizer), Path(work), say)
        runner.begin(commits[0])
        last = runner.trial(commits[-1])
        if last.comparison is None:
            raise ReferenceRunError(f"the step of {commits[-1]} cannot run: {last.problem}")
        if last.equal is not False:
            how = "is equal to" if last.equal else "cannot be told from"
            raise BisectionError(
                f"the step of {commits[-1]} {how} that of {commits[0]}: nothing to find. {last.comparison.sentence}"
            )
        low, high = 0, len(commits) - 1
        trials: dict[int, Trial] = {high: last}
        while (middle := _next(low, high, trials)) is not None:
            trials[middle] = runner.trial(commits[middle])
            if trials[middle].equal is True:
                low = middle
            elif trials[middle].equal is False:
                high = middle
    found = trials[high].comparison
    assert found is not None
    return Bisection(
        commits[high],
        found,
        tuple(commits[low + 1 : high]),
        tuple(trials[at] for at in sorted(trials)),
    )


def _next(low: int, high: int, trials: dict[int, Trial]) -> int | None:
    """Return the commit to run next: the one nearest to the middle that has not run; None at the end."""
    left = [at for at in range(low + 1, high) if at not in trials]
    return min(left, key=lambda at: abs(2 * at - low - high), default=None)


def _commits(folder: Path, good: str, bad: str) -> list[Commit]:
    """Return the commits from `good` to `bad` along first parents."""
    names = [
        _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{each}^{{commit}}")
        for each in (good, bad)
    ]
    listed = _git(folder, "rev-list", "--first-parent", "--reverse", "--format=%H%x09%s", names[1], f"^{names[0]}")
    lines = [line for line in listed.splitlines() if "\t" in line]
    commits = [Commit(*line.split("\t", 1)) for line in lines]
    first = Commit(names[0], _git(folder, "log", "-1", "--format=%s", names[0]))
    is_before = programs.run(
        ["git", "-C", str(folder), "merge-base", "--is-ancestor", *names],
        capture_output=True,
        check=False,
        timeout=_GIT,
    )
    if names[0] == names[1] or is_before.returncode or not commits:
        raise BisectionError(f"{good} is not a commit before {bad}: name an earlier commit whose step was right")
    return [first, *commits]


def _git(folder: Path, *words: str) -> str:
    try:
        done = programs.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False, timeout=_GIT
        )
    except FileNotFoundError:
        raise BisectionError("git is not installed here") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        what = reason[-1].removeprefix("fatal: ") if reason else f"there is no commit {words[-1].split('^')[0]}"
        raise BisectionError(f"{folder}: {what}")
    return done.stdout.strip()


class _Runner:
    """Runs the step of one commit after the other."""

    def __init__(
        self,
        recording: Recording,
        top: Path,
        inside: Path,
        functions: tuple[str, str],
        work: Path,
        say: Callable[[str], object],
    ) -> None:
        self._recording = recording
        self._top = top
        self._inside = inside
        self._functions = functions
        self._updates = Optimizers.of(recording)  # of the trial that ran last
        self._work = work
        self._say = say
        self._good: Run | None = None
        self._noises: list[Run] = []

    def begin(self, commit: Commit) -> None:
        """Run the good commit, also with perturbed inputs."""
        plain, *perturbed = self._run(commit, PERTURBED)
        self._good = first_step(plain, commit.id[:10], self._updates)
        self._noises = [first_step(each, "perturbed", self._updates) for each in perturbed]
        self._say(f"{commit}: the step to compare with")

    def trial(self, commit: Commit) -> Trial:
        """Run a commit, and compare its step."""
        assert self._good is not None
        try:
            (found,) = self._run(commit, 0)
            comparison = compare_runs(self._good, first_step(found, commit.id[:10], self._updates), self._noises)
        except (ReferenceRunError, AlignmentError) as error:
            trial = Trial(commit, None, str(error))
        else:
            trial = Trial(commit, comparison)
        self._say(f"{commit}: {trial.verdict}")
        return trial

    def _run(self, commit: Commit, perturbed: int) -> list[Recording]:
        from monarch_kernel.numerics.recording import Recording

        with self._worktree(commit) as tree:
            model, optimizer = (self._builder(tree, text) if text else None for text in self._functions)
            assert model is not None
            self._updates = Optimizers.of(self._recording, optimizer)
            beside = self._work / commit.id
            folders = reference_of(self._recording, model, self._updates, beside=beside, root=tree, perturbed=perturbed)
        return [Recording.open(folder) for folder in folders]

    def _builder(self, tree: Path, text: str) -> Builder:
        """Return a function of the commit that is checked out."""
        file, _, function = text.rpartition(":")
        path = tree / self._inside / file
        if not path.is_file():
            raise ReferenceRunError(f"it has no file {self._inside / file}")
        return Builder(path, function)

    @contextmanager
    def _worktree(self, commit: Commit) -> Generator[Path]:
        tree = self._work / f"tree-{commit.id[:10]}"
        # Hooks of the repository are the user's own work, and not for trees that last seconds.
        _git(
            self._top, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--quiet", str(tree), commit.id
        )
        try:
            yield tree
        finally:
            _git(self._top, "worktree", "remove", "--force", str(tree))
