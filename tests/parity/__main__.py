"""``python -m tests.parity --peer PYTHON``: compare what is stored in ``expected`` with the real Monarch.

PYTHON is an interpreter that has torchmonarch 0.7.0 and the package kubernetes; ``--write`` stores what it reports.
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys

from tests.parity.compare import HERE, SCRIPTS, expected, names, output, public_names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--peer", required=True, metavar="PYTHON", help="an interpreter with torchmonarch 0.7.0")
    parser.add_argument("--write", action="store_true", help="store its reports as what is expected")
    parser.add_argument("scripts", nargs="*", default=SCRIPTS, metavar="SCRIPT", help=f"of {', '.join(SCRIPTS)}")
    options = parser.parse_args()
    wrong = 0
    for script in options.scripts:
        got = output(options.peer, "peer", script)
        if options.write:
            (HERE / "expected").mkdir(exist_ok=True)
            (HERE / "expected" / f"{script}.txt").write_text(got)
        same = got == expected(script)
        wrong += not same
        print(f"{script}: {len(got.splitlines())} results, {'as stored' if same else 'DIFFERENT'}")
        if not same:
            sys.stdout.writelines(difflib.unified_diff(expected(script).splitlines(True), got.splitlines(True)))
    code = "import monarch.actor as a; print(*sorted(a.__all__), sep='\\n')"
    listed = subprocess.run([options.peer, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    if options.write:
        (HERE / "names.txt").write_text("\n".join(listed) + "\n")
    same = listed == names()
    print(f"names: {len(listed)}, {'as stored' if same else 'DIFFERENT'}")
    there = public_names(options.peer)
    if options.write:
        (HERE / "modules.txt").write_text(there)
    wrong += there != (HERE / "modules.txt").read_text()
    print(f"modules: {len(there.splitlines())}, {'DIFFERENT' if wrong else 'as stored'}")
    return int(bool(wrong) or not same)


if __name__ == "__main__":
    sys.exit(main())
