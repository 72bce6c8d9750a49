"""Meshes of real processes, as in the tests of the actor API."""

from tests.actor.conftest import faults as faults
from tests.actor.conftest import no_faults as no_faults
from tests.actor.conftest import procs as procs
