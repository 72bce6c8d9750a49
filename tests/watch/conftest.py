"""Fixtures for tests of the watch: meshes of real processes, as the tests of the actor API have them."""

from tests.actor.conftest import faults as faults
from tests.actor.conftest import no_faults as no_faults
from tests.actor.conftest import procs as procs
from tests.workers import workers as workers
