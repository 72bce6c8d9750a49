"""The committed list of torchmonarch's public names is that of the installed package."""

from __future__ import annotations

from tests.engines.conftest import python_of
from tests.parity.compare import HERE, public_names


def test_the_listed_public_names_are_those_of_the_installed_package() -> None:
    there = {line.split()[0]: line for line in public_names(python_of("torchmonarch")).splitlines()}
    listed = {line.split()[0]: line for line in (HERE / "modules.txt").read_text().splitlines()}
    # Some modules need packages that this environment may lack.
    assert there.keys() <= listed.keys()
    assert {name: listed[name] for name in there} == there
