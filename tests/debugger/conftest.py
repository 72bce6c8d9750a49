"""Meshes of real processes, as in the tests of the actor API."""

from tests.actor.conftest import faults as faults
from tests.actor.conftest import no_leaks as no_leaks
from tests.actor.conftest import procs as procs
from tests.actor.conftest import runtime as runtime
