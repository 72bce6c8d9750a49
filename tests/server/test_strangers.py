"""Pages of other origins or hosts, or without XSRF's token, and requests of noise, at the extension of the server."""

from __future__ import annotations

import http.client
import json
import random
import re
import urllib.parse
from collections.abc import Mapping
from http.cookies import SimpleCookie
from typing import Any

from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.ioloop import IOLoop
from tornado.websocket import websocket_connect

from tests.conftest import alive, wait_until
from tests.kept.conftest import kept_folder as kept_folder
from tests.server.conftest import JupyterServer
from tests.server.test_kept import make

API = "/user/ann/monarch-kernel/api/"
READ = ("kept", "kept/t", "kept/t/logs", "openapi.json")
EVIL = "http://evil.example"


def ask(
    server: JupyterServer, path: str, method: str = "GET", headers: Mapping[str, str] | None = None, body: Any = None
) -> tuple[int, bytes, SimpleCookie]:
    """A request with these headers and no others."""
    address = urllib.parse.urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    try:
        sent = dict(headers or {})
        connection.putrequest(method, path, skip_host="Host" in sent, skip_accept_encoding=True)
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        for name, value in {**sent, "Content-Length": str(len(data))}.items():
            connection.putheader(name, value.encode("latin-1"))
        connection.endheaders(data)
        answer = connection.getresponse()
        cookies = SimpleCookie()
        for line in answer.headers.get_all("Set-Cookie") or []:
            cookies.load(line)
        return answer.status, answer.read(), cookies
    finally:
        connection.close()


def signed_in(server: JupyterServer) -> tuple[dict[str, str], str]:
    """The headers of a browser whose user has signed in, and the token of XSRF that pages of the server know."""
    have: dict[str, str] = {}
    for page in ("login", f"login?token={server.token}"):
        _, _, cookies = ask(server, f"/user/ann/{page}", headers={"Cookie": cookie(have)})
        have |= {name: each.value for name, each in cookies.items()}
    return {"Cookie": cookie(have)}, have["_xsrf"]


def cookie(values: Mapping[str, str]) -> str:
    return "; ".join(f"{name}={value}" for name, value in values.items())


def test_pages_of_others_read_and_end_nothing(jupyter_server: JupyterServer, kept_folder: str) -> None:
    host = make()
    host.detach()
    wait_until(lambda: jupyter_server.ask("kept/t")[0] == 200, "it is described")
    pids = [rank["pid"] for rank in jupyter_server.ask("kept/t")[1]["ranks"]]
    browser, xsrf = signed_in(jupyter_server)
    token = {"Authorization": f"token {jupyter_server.token}"}
    own = jupyter_server.url.removesuffix("/user/ann")
    for path in READ:
        # The user's own pages may.
        assert ask(jupyter_server, API + path, headers={**browser, "Origin": own, "Referer": f"{own}/"})[0] == 200
        # Those of another origin may not.
        for foreign in (EVIL, "null"):
            status, body, _ = ask(jupyter_server, API + path, headers={**browser, "Origin": foreign})
            assert status in (403, 404) and b"ranks" not in body, (path, foreign, status)
        # Nor another name of this address (DNS rebinding), whoever asks.
        for known in (browser, token):
            status, body, _ = ask(jupyter_server, API + path, headers={**known, "Host": "evil.example"})
            assert status == 403 and b"ranks" not in body, (path, status)
    stop = f"{API}kept/t/stop"
    for headers in (
        {},
        browser,  # a form of another page: it has the cookies, and does not know the token of XSRF
        {**browser, "Origin": EVIL, "X-XSRFToken": xsrf},
        {**browser, "Origin": own, "X-XSRFToken": "2|0|0|0"},
        {**token, "Host": "evil.example"},
    ):
        status, _, _ = ask(jupyter_server, stop, "POST", headers, {"force": True})
        assert status in (403, 404), (headers, status)
    address = jupyter_server.url.replace("http", "ws") + "/monarch-kernel/api/kept/events"

    async def connected(headers: dict[str, str]) -> int:
        try:
            page = await websocket_connect(HTTPRequest(address, headers=headers))
        except HTTPClientError as error:
            return error.code
        page.close()
        return 101

    async def pages() -> list[int]:
        return [await connected({**browser, "Origin": origin}) for origin in (own, EVIL)]

    loop = IOLoop()
    try:
        assert loop.run_sync(pages, timeout=60) == [101, 403]
    finally:
        loop.close()
    assert all(map(alive, pids))
    assert ask(jupyter_server, stop, "POST", {**browser, "Origin": own, "X-XSRFToken": xsrf})[0] == 200
    assert not any(map(alive, pids))


def test_requests_of_noise_harm_nothing(jupyter_server: JupyterServer, kept_folder: str) -> None:
    host = make()
    wait_until(lambda: jupyter_server.ask("kept/t")[0] == 200, "it is described")
    about = jupyter_server.ask("kept/t")[1]
    chance = random.Random(7)
    statuses: dict[int, int] = {}
    for _ in range(300):
        method, path, headers, body = noise(chance)
        known = {"Authorization": f"token {jupyter_server.token}"} if chance.random() < 0.8 else {}
        status, answer, _ = ask(jupyter_server, path, method, {**known, **headers}, body)
        statuses[status] = statuses.get(status, 0) + 1
        assert status < 500, (method, path, headers, body, answer)
        told = method == "OPTIONS" and not answer  # browsers ask that before they ask
        assert known or told or status in (400, 403, 404, 405), (method, path, headers, body, answer)
    assert {200, 400, 403, 404, 405} <= statuses.keys(), statuses
    # That of write_error is the server's own: for methods that it does not know, such as TRACE.
    assert not re.search("Uncaught exception (?!in write_error)", jupyter_server.log.read_text())
    status, after = jupyter_server.ask("kept/t")
    assert status == 200
    assert [each["pid"] for each in after["ranks"]] == [each["pid"] for each in about["ranks"]]
    host.down()


def noise(chance: random.Random) -> tuple[str, str, dict[str, str], bytes]:
    """A request: a method, an address of the extension or beside one, odd headers, and any body."""
    strange = chance.choice(
        [
            *(
                "",
                "t",
                "no",
                "..",
                ".",
                "%2e%2e",
                "%00",
                "%ff%fe",
                "t%2f..%2ft",
                "t/../../..",
                "x" * 5_000,
                "t;rm",
                "t%0d%0aX:1",
            ),
            *("%F0%9F%98%80", "$(id)", "<script>", "t?", "t#", "*", "-rf", "t/logs/", "t/stop/t", "//t", "~", "{name}"),
        ]
    )
    path = API + chance.choice(
        [
            *("kept", "kept/", "kept/t/logs", "kept/t/stop", "openapi.json", "kept/events", "openapi.json/../kept"),
            *(f"kept/{strange}", f"kept/{strange}/logs", f"kept/{strange}/stop", strange),
        ]
    )
    values = ["", "-1", "0", "1", "9" * 5_000, "1e9", "NaN", "٣", "%ff", "%00", "t", "true", "[]", "0x1", "1;2", "²"]
    names = ["tail", "rank", "mesh", "force", "token", "_xsrf", "rank[]", "%ff"]
    query = "&".join(f"{chance.choice(names)}={chance.choice(values)}" for _ in range(chance.randrange(4)))
    if query and "?" not in path:
        path += "?" + urllib.parse.quote(query, safe="%=&;[]")
    path = path.replace("<", "%3C").replace("#", "%23")
    bodies = [
        *(b"", b"{}", b"[]", b"null", b"1", b'"x"', b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"\0" * 10),
        *(b'{"force": "yes"}', b'{"force": 1}', b'{"force": null}', b'{"force": [true]}', b'{"force": NaN}'),
        chance.randbytes(chance.randrange(2_000)),
    ]
    headers = chance.choice(
        [
            *({}, {"Content-Type": "application/json"}, {"Content-Type": "multipart/form-data; boundary=x"}),
            *(
                {"Content-Type": "application/x-www-form-urlencoded"},
                {"Cookie": "\xff=; _xsrf=2|x"},
                {"Range": "bytes=9-"},
            ),
            *({"X-HTTP-Method-Override": "DELETE"}, {"Accept": "*/*;q=x"}, {"Accept-Language": "\xff" * 100}),
            *({"If-None-Match": '"' * 99}, {"Upgrade": "websocket"}, {"X-Forwarded-For": "127.0.0.1"}),
        ]
    )
    method = chance.choice(["GET", "GET", "GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE"])
    return method, path, headers, chance.choice(bodies) if method != "GET" else b""
