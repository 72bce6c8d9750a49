"""Post reports to the webhook that a user has configured. Its URL is like a password: it is never displayed."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import IO

import msgspec

from monarch_kernel import environment
from monarch_kernel.debugger.reports.files import encoded
from monarch_kernel.debugger.reports.job_report import JobReport
from monarch_kernel.private_files import read_own_file

#: The time limit for the receiver (seconds), and the largest report that is posted completely (bytes).
TIMEOUT, LARGEST = 10.0, 1 << 20
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NAME = environment.JOIN_WEBHOOK.name


class WebhookError(RuntimeError):
    """A report cannot be posted; the message gives the reason, without the URL."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Prevents redirects: a report is sent only to the configured URL."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> None:
        """See ``HTTPRedirectHandler``."""


def webhook() -> str:
    """Return the URL that the user has configured; "" if none.

    Raises:
        WebhookError: the URL is invalid, or its file cannot be read.
    """
    named = environment.JOIN_WEBHOOK.get()
    if named and "://" not in named:
        try:
            named = read_own_file(named).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise WebhookError(f"the file that {_NAME} names cannot be read: {why}") from None
    if not named:
        return ""
    try:
        parts = urllib.parse.urlsplit(named)
        host = parts.hostname
    except ValueError:
        host, parts = None, urllib.parse.urlsplit("")
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK)):
        raise WebhookError(f"{_NAME} must name an https URL, or an http one of this machine")
    return named


def post(url: str, report: JobReport, paths: Sequence[str]) -> None:
    """Post a report as JSON: ``text`` in words, for chat programs, and ``report`` as in the file.

    Args:
        url: the URL of the receiver, as `webhook` has checked it.
        report: the report to post.
        paths: the paths of its files.

    Raises:
        WebhookError: the receiver has not accepted it.
    """
    said = [report.headline, report.verdict.sentence, f"on {report.job.host}: {paths[0]}" if paths else ""]
    whole = encoded(report)
    if len(whole) > LARGEST:
        said.append(f"The report itself ({len(whole)} bytes) is too large to be posted.")
        whole = b"null"
    body = msgspec.json.encode({"text": "\n".join(filter(None, said)), "report": msgspec.Raw(whole)})
    near = urllib.parse.urlsplit(url).scheme == "http"  # no proxy is used to reach this machine
    opener = urllib.request.build_opener(_NoRedirects, *([urllib.request.ProxyHandler({})] if near else []))
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    try:
        with opener.open(request, timeout=TIMEOUT) as answer:
            answer.read(1)
    except urllib.error.HTTPError as error:
        error.close()
        raise WebhookError(f"the webhook has answered with status {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError is an OSError
        reason = getattr(error, "reason", None)
        raise WebhookError(
            f"the webhook cannot be reached: {getattr(reason, 'strerror', None) or type(error).__name__}"
        ) from None


def posted(report: JobReport, paths: Sequence[str]) -> str:
    """Post a report to the webhook that the user has configured, if any.

    Returns:
        A sentence about the error; "" if there was none.
    """
    try:
        url = webhook()
        if url:
            post(url, report, paths)
    except WebhookError as error:
        return f"It was not posted: {error}."
    return ""
