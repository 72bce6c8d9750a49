"""`%mesh sync` in a real kernel: what it says, and where ranks run afterwards."""

from __future__ import annotations

import re
from pathlib import Path

from tests.kernel.harness import Kernel
from tests.kernel.screen import text
from tests.sync.kernel.project import Project

SEE = "%%mesh\nimport model, os\nmodel.VERSION, model.__file__, os.environ['WORKSPACE_DIR']"


def seen(kernel: Kernel) -> str:
    """What ranks see, without the breaks of long lines."""
    return re.sub(r",\s+", ", ", text(kernel.ok(SEE)))


def test_ranks_that_start_later_run_in_the_tree(kernel: Kernel, project: Project) -> None:
    out = kernel.ok("receipt = %mesh sync\nreceipt")
    assert out.result is not None
    assert re.match(r"tree [0-9a-f]{8}: 3 files, \d+ bytes, \d+ bytes read; \d+ bytes sent to 1 host in ", out.text)
    assert re.search(r"^host +tree +files +received +reused +time$", out.text, re.MULTILINE), out.text
    assert re.search(r"^\S+ +[0-9a-f]{8} +new +3 ", out.text, re.MULTILINE), out.text
    assert "<table>" in out.result["text/html"]
    assert kernel.ok("receipt.hosts[0].switched, receipt.files").text == "(True, 3)"
    kernel.ok("%mesh up --procs 2")
    tree = str(project.tree)
    assert seen(kernel) == f"[0-1] ('first', '{tree}/model.py', '{tree}')"
    assert not (project.tree / "notes" / "junk.tmp").exists()

    project.write("model.py", "VERSION = 'second'\n")
    # The other slot gets one file; all three, if it was not yet filled behind the first sync.
    assert re.search(r"new +[13] ", kernel.ok("%mesh sync").text)
    assert "'first'" in seen(kernel)  # they have imported it already
    kernel.ok("%mesh restart")
    assert "'second'" in seen(kernel)

    assert "up to date" in kernel.ok("%mesh sync").text
    kernel.ok("%mesh sync --rollback")
    kernel.ok("%mesh restart")
    assert "'first'" in seen(kernel)


def test_a_dry_run_changes_nothing(kernel: Kernel, project: Project) -> None:
    said = kernel.ok("%mesh sync --dry-run").text
    assert "nothing was changed" in said and "would change" in said
    assert not (project.store / "w").exists() or not list((project.store / "w").glob("*/current"))
    kernel.ok("%mesh sync")
    (project.folder / "data" / "load.py").unlink()
    said = kernel.ok("%mesh sync -n").text
    assert "would delete: data" in said
    assert (project.tree / "data" / "load.py").exists()


def test_folders_are_named_once(kernel: Kernel, project: Project, tmp_path: Path) -> None:
    """Later lines mean the folders of the last sync."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "lib.py").write_text("")
    assert ": 4 files," in kernel.ok(f"%mesh sync . {library}").text
    assert sorted(each.name for each in project.tree.iterdir()) == ["library", "project"]
    (library / "more.py").write_text("")
    assert ": 5 files," in kernel.ok("%mesh sync").text


def test_verify_finds_and_mends_damage(kernel: Kernel, project: Project) -> None:
    kernel.ok("%mesh sync")
    file = project.tree / "model.py"
    file.chmod(0o644)
    file.write_text("VERSION = 'evil!'\n")
    assert "up to date" in kernel.ok("%mesh sync").text
    said = kernel.ok("%mesh sync --verify --dry-run").text
    assert "model.py" in said
    kernel.ok("%mesh sync --verify")
    assert file.read_text() == "VERSION = 'first'\n"


def test_a_workspace_is_forgotten_once_no_rank_uses_it(kernel: Kernel, project: Project) -> None:
    kernel.ok("%mesh up --procs 1 --sync")
    kernel.ok("%%mesh\nopen('said', 'w').write('by a rank')")
    out = kernel.run("%mesh sync --forget")
    assert out.ename == "UsageError"
    assert re.search(r"nothing was removed, as processes use the workspace:\n .*process \d+ \(", out.evalue), out.evalue
    assert "'first'" in seen(kernel)
    kernel.ok("%mesh down")
    assert "would be removed" in kernel.ok("%mesh sync --forget --dry-run").stdout
    said = kernel.ok("%mesh sync --forget").stdout
    assert re.search(r"removed .* 1 file of ranks, 9 bytes", said) and "%mesh sync --forget --kept removes them" in said
    [left] = [path for path in (project.store / "w").rglob("*") if path.is_file()]
    assert left.name == "said" and left.read_text() == "by a rank"
    kernel.ok("%mesh up --procs 1")
    where = text(kernel.ok("%%mesh\nimport os\nos.getcwd(), os.environ.get('WORKSPACE_DIR')"))
    assert re.search(rf"'{project.folder}',\s+None", where), "ranks start in the host's own folder again"
    assert "removed" in kernel.ok("%mesh sync --forget --kept").stdout
    assert not list((project.store / "w").iterdir())
    assert re.search(r" new +3 ", kernel.ok("%mesh sync").text)


MISTAKES = [
    ("nowhere", "there is no folder .*/nowhere"),
    ("model.py", "model.py is a file: name its folder"),
    (". data", "data is within"),
    ("--on other", "there is no mesh 'other'; no mesh is up"),
    ("--rollback 0", "--rollback takes a number of trees of at least 1, not 0"),
    ("--dry-run --rollback", "give either --dry-run or --rollback, not both"),
    ("--verify --rollback", "give either --rollback or --verify, not both"),
    ("--with-python", "--with-python is about the Python of the environment: give --env, too"),
    ("--forget --verify", "give either --forget or --verify, not both"),
    ("--kept", "--kept is about files of ranks in a workspace that goes: give --forget, too"),
    ("--links maybe", "invalid choice: 'maybe'"),
    ("--no-such", "there is no option --no-such"),
    ("--rollback", "has no generation to go back to"),
]


def test_mistakes_are_sentences(kernel: Kernel) -> None:
    for line, said in MISTAKES:
        out = kernel.run(f"%mesh sync {line}")
        assert out.ename == "UsageError", line
        assert re.search(said, out.evalue), out.evalue
        assert out.evalue.startswith("%mesh sync: ")


def test_a_link_out_of_the_folder(kernel: Kernel, project: Project, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("x")
    (project.folder / "link").symlink_to(tmp_path / "outside")
    out = kernel.run("%mesh sync")
    assert out.ename == "UsageError" and "link" in out.evalue
    kernel.ok("%mesh sync --links follow")
    assert (project.tree / "link").read_text() == "x"
    kernel.ok("%mesh sync")  # it remembers that, too
