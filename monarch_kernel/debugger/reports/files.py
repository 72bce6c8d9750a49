"""Write and read the files of a report: text, HTML and JSON, which only this user can read."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Sequence

import msgspec

from monarch_kernel.debugger.reports.job_report import FORM, FORM_NAME, JobReport
from monarch_kernel.debugger.reports.plain import PlainReport
from monarch_kernel.private_files import write_own_file

_FORM = re.compile(rf"{FORM_NAME}-(\d{{1,6}})")


class ReportError(ValueError):
    """A report cannot be written or read. The message contains its name and the reason."""


class _Head(msgspec.Struct):
    """The fields that identify a report of any version."""

    form: str
    version: str = ""


def default_folder(job: str) -> str:
    """Return the default folder of reports on a job: beside the output of the job."""
    return f"{job}-reports"


def save(report: JobReport, folder: str) -> list[str]:
    """Write a report. The folder is created if it is missing.

    Returns:
        The paths of the text, the HTML and the JSON.

    Raises:
        ReportError: other users could write to the folder.
        OSError: the files cannot be written.
    """
    os.makedirs(folder, 0o700, exist_ok=True)
    about = os.stat(folder)
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o022:
        raise ReportError(
            f"other users may write to {folder}, so no report is written there: name a folder of your own"
        )
    made = time.strftime("%Y%m%d-%H%M%S", time.gmtime(report.job.made))
    stem = first = os.path.join(os.path.abspath(folder), f"{report.job.name}-{made}")
    again = 1
    while os.path.lexists(f"{stem}.json"):
        again += 1
        stem = f"{first}-{again}"
    paths = [f"{stem}.{kind}" for kind in ("txt", "html", "json")]
    write(report, paths)
    return paths


def write(report: JobReport, paths: Sequence[str]) -> None:
    """Write the text, the HTML and the JSON. Existing files are replaced.

    Raises:
        OSError: the files cannot be written.
    """
    contents = (f"{report.text()}\n".encode(), report.page().encode(), encoded(report))
    for path, data in zip(paths, contents, strict=True):
        write_own_file(path, data)


def encoded(report: JobReport) -> bytes:
    """Encode a report as JSON."""
    return msgspec.json.encode(report.plain())


def load(report: str | os.PathLike[str]) -> JobReport:
    """Open a report that was written by `monarch-kernel report`, or by a job that hung. The job is not needed.

    The file is read as plain data, so it may come from an untrusted source.

    Args:
        report: the path of its JSON.

    Raises:
        ReportError: the file is not a report, is damaged, or was written by a later version.
        OSError: it cannot be read.
    """
    path = os.fspath(report)
    with open(path, "rb") as file:
        data = file.read()
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} is no report, or is damaged: {error}") from None
    form = _FORM.fullmatch(head.form)
    if form is None:
        raise ReportError(f"{path} is no report: it says that it is {head.form[:80]!r}")
    if int(form[1]) > FORM:
        raise ReportError(
            f"{path} was written by a later version, monarch_kernel {head.version[:40]}, which can open it; "
            f"this one reads reports up to form {FORM}"
        )
    try:
        return JobReport.of_plain(msgspec.json.decode(data, type=PlainReport))
    except (msgspec.DecodeError, ValueError, LookupError, RecursionError) as error:
        raise ReportError(f"{path} is damaged: {error}") from None
