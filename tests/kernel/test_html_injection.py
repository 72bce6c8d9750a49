"""Names, output, values and errors of ranks are text in the HTML of cells, of reports and of a saved page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter

from monarch_kernel.debug import ReportError, load
from tests.conftest import wait_until
from tests.debugger.test_report_files import plain
from tests.kernel.harness import Kernel, Outcome
from tests.workers import Worker

ROOT = Path(__file__).parents[2]
WIDGET = "monarch_kernel/widgets/static/mesh.js"
#: What would run if it were markup. ``N`` is replaced by a number, so that it is seen whose it is.
MARK = "alert(N)"
HOSTILE = (
    f"<script>{MARK}</script>",
    f"<img src=x onerror={MARK}>",
    f"\"'><svg/onload={MARK}>",
    f"</pre></td></table></div><script>{MARK}</script>",
    f"</style><style>*{{x:{MARK}}}</style><iframe srcdoc='<script>{MARK}</script>'>",
    f"<!--><img src=x onerror={MARK}>-->",
    f"<a href=javascript:{MARK}>x</a>",
    f"javascript:{MARK}",
    f'" onmouseover="{MARK}',
    f"' onfocus='{MARK}' autofocus='",
    f"&lt;img src=x onerror={MARK}&gt;",
    f"&#60;script&#62;{MARK}&#60;/script&#62;",
    f"\x1b[31m<b onclick={MARK}>\x1b[0m",
    f"\x1b]8;;javascript:{MARK}\x07x\x1b]8;;\x07",
    f"\x00<\x00script>{MARK}",
    f"]]><script>{MARK}</script>",
    f"${{{MARK}}} {{{{constructor.constructor('{MARK}')()}}}}",
    f"$$\\href{{javascript:{MARK}}}{{x}}$$",
    f"[x](javascript:{MARK})",
    f"<math><mtext><img src=x onerror={MARK}></mtext></math>",
    f"<base href='javascript:{MARK}//'><form action=javascript:{MARK}><input type=submit>",
    f"<meta http-equiv=refresh content='0;url=javascript:{MARK}'>",
    f"＜script＞{MARK}＜/script＞",
    f"<scr\u0000ipt>{MARK}</scr\u0000ipt>",
    f"%3Cscript%3E{MARK}%3C/script%3E",
    f"\u202e<img src=x onerror={MARK}>",
)
#: Elements that this project never writes: those of documents, and those that run, load or send something.
FOREIGN = {
    *("script", "iframe", "frame", "object", "embed", "applet", "base", "link", "form", "input", "button", "textarea"),
    *("a", "img", "audio", "video", "source", "image", "math", "mtext", "foreignobject", "animate", "set", "template"),
}
#: Attributes that may hold text of others; in all others, a mark would be markup.
TEXTS = {"title", "aria-label", "alt", "data-title", "value"}


class Markup(HTMLParser):
    """Finds in HTML what is not of this project: elements, attributes, and marks where they are no text."""

    def __init__(self, html: str, pages: bool = False) -> None:
        super().__init__(convert_charrefs=True)
        self._within: list[str] = []
        self._pages = pages  # with what nbconvert adds
        self.found: list[str] = []
        self.texts = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._within.append(tag)
        if not self._pages and tag in FOREIGN:
            self.found.append(f"<{tag}>")
        for name, value in attrs:
            marked = "alert(" in (value or "")
            if (name.startswith("on") and (marked or not self._pages)) or (marked and name not in TEXTS):
                self.found.append(f"<{tag} {name}={value}>")
            if (
                name in ("href", "src", "action", "srcdoc")
                and not self._pages
                and not (value or "").startswith(("#", "data:image/"))
            ):
                self.found.append(f"<{tag} {name}={value}>")

    def handle_endtag(self, tag: str) -> None:
        while self._within and self._within.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "alert(" in data and {"script", "style"} & set(self._within[-1:]):
            self.found.append(f"{self._within[-1]}: {data[:80]}")
        self.texts += data

    def handle_comment(self, data: str) -> None:
        if "alert(" in data:
            self.found.append(f"<!--{data[:80]}")


def test_markup_is_seen() -> None:
    for text in HOSTILE[:6]:
        assert Markup(f"<div>{text}</div>").found, text
    assert Markup(f'<div title="{HOSTILE[8]}">').found
    assert not Markup("<div title='alert(1)'>alert(1)</div>").found


PREPARE = """
import json
from monarch_kernel import get_mesh
from monarch_kernel.actor import Actor, attach_to_workers, endpoint
H = [text.replace("N", str(number)) for number, text in enumerate(json.loads({hostile!r}))]
class Odd(Actor):
    @endpoint
    def fail(self, text): raise ValueError(text)
%mesh up odd --procs 2
m = get_mesh("odd")
"""
RANKS = """%%mesh
import json, threading
H = [text.replace("N", str(number)) for number, text in enumerate(json.loads({hostile!r}))]
class Odd:
    def __init__(self, text): self.text = text
    def __repr__(self): return self.text
Odd.__name__ = Odd.__qualname__ = H[1]
def named(text):
    "A function of this name, in a file of this name."
    filled = text.replace(chr(0), "0")
    scope = {{}}
    exec(compile("def f(wait=None):\\n    if wait: wait()\\n    raise kind(text)\\n", filled, "exec"), scope)
    scope["f"].__code__ = scope["f"].__code__.replace(co_name=filled, co_qualname=filled)
    scope["text"] = text
    scope["kind"] = type(filled, (Exception,), {{"__module__": filled}})
    return scope["f"]
"""
#: Functions and threads of such names wait.
WAITS = """%%mesh --no-wait
event = threading.Event()
others = [threading.Thread(target=event.wait, name=text, daemon=True) for text in H]
for each in others: each.start()
named(H[rank])(event.wait)"""
CELLS = (
    "%%mesh\nfor text in H: print(text)",
    "%%mesh\nimport sys\nfor text in H: print(rank, text, file=sys.stderr)",
    "%%mesh --raw\nfor text in H: print(text)",
    "%%mesh\nOdd(H[rank])",
    "%%mesh\n[Odd(text) for text in H]",
    "%%mesh\n{text: Odd(text) for text in H}",
    "_",
    "%%mesh\nfrom IPython.display import display\nfor text in H: display(Odd(text))",
    "%%mesh\nnamed(H[rank])()",
    "%%mesh\nif rank: raise ExceptionGroup(H[0], [ValueError(H[2]), KeyError(H[8])])",
    "%%mesh\nerror = ValueError(H[0]); error.add_note(H[1]); raise error",
    "%%mesh\nvalues = {text: rank for text in H}\nvariable = H[rank]",
    "%mesh diff variable",
    "%mesh diff values",
    "%mesh status",
    "m",
    "m.show()",
    "%mesh stacks",
    "%mesh logs",
    "odd = m.spawn(H[1], type(H[3], (Odd,), {'__module__': H[4]}))\nodd",
    "odd.fail.call(H[1]).get()",
    "%mesh status",
    "%mesh history on",
    "%mesh history \"SELECT '<script>alert(1)</script>' AS '<img src=x onerror=alert(2)>'\"",
    "%mesh history off",
    "raise type(H[0], (Exception,), {})(H[1])",
    "for text in H: print(text)",
    "%mesh nothing" + HOSTILE[1],
    "%mesh use " + HOSTILE[1].replace(" ", ""),
    "%%mesh --where gpus=" + HOSTILE[0] + "\n1",
)


@pytest.fixture(scope="module")
def shown(kernel: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[str, Outcome]]]:
    """What cells with hostile names, values, output and errors have shown."""
    hostile = json.dumps(HOSTILE)
    made: list[tuple[str, Outcome]] = []
    for code in (PREPARE.format(hostile=hostile), RANKS.format(hostile=hostile)):
        kernel.ok(code)
    for code in CELLS:
        made.append((code, kernel.run(code)))
    made.append((WAITS, kernel.run(WAITS)))
    wait_until(lambda: "alert(" in kernel.ok("%mesh stacks").text, "they wait")
    made += [(code, kernel.ok(code)) for code in ("%mesh stacks", "%mesh stacks --all", "m")]
    made.append(("%mesh interrupt", kernel.ok("%mesh interrupt odd")))
    worker = Worker(
        "ipc://" + str(tmp_path_factory.mktemp("w") / "s"),
        "<img src=x onerror=alert(1)>",
        tmp_path_factory.mktemp("log"),
    )
    try:
        attach = f"far = attach_to_workers(workers=[{worker.url!r}]).spawn_procs(name=H[2])\nfar"
        made += [(code, kernel.run(code)) for code in (attach, "far.spawn('odd', Odd)", "%mesh ls", "far.stop().get()")]
    finally:
        worker.end()
    yield made
    kernel.ok("%mesh down odd")


def bundles(out: Outcome) -> Iterator[dict[str, Any]]:
    yield from out.displays
    yield from out.updates
    if out.result is not None:
        yield out.result


def test_cells_show_it_as_text(shown: list[tuple[str, Outcome]]) -> None:
    pages = [(code, bundle["text/html"]) for code, out in shown for bundle in bundles(out) if "text/html" in bundle]
    wrong = [(code, found) for code, html in pages if (found := Markup(html).found)]
    assert not wrong
    texts = "".join(Markup(html).texts for _, html in pages)
    assert len(pages) >= 10 and texts.count("alert(") > 100
    kinds = {kind for _, out in shown for bundle in bundles(out) for kind in bundle}
    assert not kinds & {"application/javascript", "text/markdown", "image/svg+xml"}, kinds


def test_a_saved_page_shows_it_as_text(shown: list[tuple[str, Outcome]]) -> None:
    cells = []
    for code, out in shown:
        outputs = [
            nbformat.v4.output_from_msg(message)
            for message in out.messages
            if message["msg_type"] in ("stream", "display_data", "execute_result", "error")
        ]
        cells.append(nbformat.v4.new_code_cell(code, outputs=outputs))
    exporter = HTMLExporter()
    page, _ = exporter.from_notebook_node(nbformat.v4.new_notebook(cells=cells))
    assert not Markup(page, pages=True).found
    assert page.count("alert(") > 100


def places(whole: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each text in plain data."""
    if isinstance(whole, str):
        yield way
    elif isinstance(whole, dict | list):
        for key, value in whole.items() if isinstance(whole, dict) else enumerate(whole):
            yield from places(value, (*way, key))


def test_the_panel_and_the_widget_write_no_markup() -> None:
    """What they show is text of elements (``labextension/src/hostile.test.ts`` shows it)."""
    sinks = re.compile(
        r"(inner|outer)HTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|ContextualFragment|setHTML"
    )
    found = [path for path in (ROOT / "labextension" / "src").rglob("*.ts") if not path.name.endswith(".test.ts")]
    assert len(found) > 30
    assert not [path for path in [*found, ROOT / WIDGET] if sinks.search(path.read_text())]


def test_pages_of_reports_show_it_as_text(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    taken = 0
    for way in places(plain()):
        for text in HOSTILE:
            whole = plain()
            place = whole
            for key in way[:-1]:
                place = place[key]
            place[way[-1]] = text
            path.write_text(json.dumps(whole))
            try:
                report = load(path)
            except ReportError:
                break
            taken += 1
            assert not Markup(report.page()).found, (way, text)
    assert taken > 100
