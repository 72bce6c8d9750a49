"""Write constraints/pyX.Y.txt for the Python that runs this: exact versions, and nothing else.

The resolver is pip's own, in a dry run.  Only names and versions are kept, so that the
file says nothing about where the packages came from and holds on every platform.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "bench,demo,dev,docs,engines,lab,test,titan"
# Held back: the torch that the bench's main peer, torchmonarch 0.7.0, was built for; what later versions need a newer
# Python than the one of Debian 12 (3.11.2) for; what makes a grammar of IRIs as it is loaded: all that loads
# notebooks, Jupyter's server or Ray would compute 1.5 s longer.
HELD = ["torch==2.13.0", "soupsieve<3", "jsonschema<4.25", "pymdown-extensions<13"]
#: The oldest Pythons that the files must hold for.
OLDEST = {(3, 11): "3.11.2", (3, 12): "3.12.0", (3, 13): "3.13.0"}
# torch pins these itself, to the builds it was linked with; whether it wants them depends on the platform.
OF_TORCH = re.compile(r"nvidia-|cuda-|triton$|nvshmem")


def resolve(requirements: list[str]) -> dict[str, str]:
    """Normalised name -> version of everything that installing the requirements would bring."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*command, "--report", report.name, *requirements], check=True)
        installs = json.load(report)["install"]
    versions: dict[str, str] = {}
    for item in installs:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        wanted, oldest = item["metadata"].get("requires_python", ""), OLDEST[sys.version_info[:2]]
        if not SpecifierSet(wanted).contains(oldest):
            sys.exit(f"{name} {item['metadata']['version']} needs Python {wanted}, not {oldest}: hold it back in HELD")
        # "+cpu" and the like name one index's build; the plain version matches them all.
        versions[name] = item["metadata"]["version"].split("+")[0]
    return versions


def main() -> None:
    """Resolve, and replace the file."""
    versions = resolve([f"{ROOT}[{EXTRAS}]", *HELD])
    del versions["monarch-kernel"]
    target = ROOT / "constraints" / "py{}.{}.txt".format(*sys.version_info[:2])
    lines = [f"{name}=={version}\n" for name, version in sorted(versions.items()) if not OF_TORCH.match(name)]
    target.write_text("".join(lines))
    print(f"{target.relative_to(ROOT)}: {len(lines)} packages")


if __name__ == "__main__":
    main()
