"""A notebook on workers: its ranks end with the kernel, however that ends, and the workers stay."""

from __future__ import annotations

import pytest

from tests.kernel.harness import start_kernel, stop_kernel
from tests.kernel.screen import lines
from tests.workers import team


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("end", ["shutdown", "restart", "kill"])
def test_ranks_on_workers_end_with_the_kernel(end: str, transport: str) -> None:
    with team(transport) as made:
        worker = made.start()
        kernel = start_kernel()
        try:
            kernel.ok(
                f"""
                from monarch.actor import Actor, attach_to_workers, endpoint
                import os

                class Here(Actor):
                    @endpoint
                    def pid(self):
                        print("hello from a worker")
                        return os.getpid()

                hosts = attach_to_workers(workers={made.urls!r}, key_file={made.key_file!r})
                here = hosts.spawn_procs(per_host={{"gpus": 2}}).spawn("here", Here)
                """
            )
            told = kernel.ok("sorted((await here.pid.call()).values())")
            assert "hello from a worker" in str([*told.displays, *told.updates])
            looped = kernel.ok("for n in range(3):\n    print('---', n)\n    await here.pid.call()\nprint('end')")
            assert lines(looped) == [line for n in range(3) for line in (f"--- {n}", "[0-1] hello from a worker")] + [
                "end"
            ]
            assert told.text == str(sorted(worker.ranks()))
            if end == "restart":
                kernel.manager.restart_kernel()
            elif end == "kill":
                kernel.manager.shutdown_kernel(now=True)
            else:
                stop_kernel(kernel)
            worker.wait_idle()
        finally:
            stop_kernel(kernel)
        assert worker.process.poll() is None
