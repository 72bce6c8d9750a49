"""torch in forked ranks: preloaded once in a template, then trained with, over gloo, with DataLoader workers."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from monarch_kernel.runtime.host import cleanup
from tests.waiting import wait_until

from .conftest import Host

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_training_gloo_and_data_loaders_work_in_forks_of_a_torch_template(host: Host, tmp_path: object) -> None:
    names = host.spawn(2, preload=["torch"], env={"RENDEZVOUS": f"file://{tmp_path}/rendezvous"})
    template = psutil.Process(host.started[names[0]]).parent()
    assert template is not None
    assert template.name() == "monarch-templat"

    def train() -> None:
        import os
        import sys

        assert "torch" in sys.modules
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, TensorDataset

        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=2)
        try:
            total = torch.ones(1000) * (rank + 1)
            dist.all_reduce(total)
            assert total.sum() == 3000
            torch.manual_seed(0)
            x = torch.randn(512, 64)
            y = (x.sum(1) > 0).long()
            model = DistributedDataParallel(
                torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2))
            )
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            loader = DataLoader(TensorDataset(x, y), 64, num_workers=2, multiprocessing_context="fork")
            for _ in range(3):
                for bx, by in loader:
                    optimizer.zero_grad()
                    loss = torch.nn.functional.cross_entropy(model(bx), by)
                    loss.backward()
                    optimizer.step()
            assert (model(x).argmax(1) == y).float().mean() > 0.9
            # Large enough for the parallel paths of OpenMP, MKL and numpy's OpenBLAS.
            a = torch.randn(600, 600)
            assert torch.isfinite(a @ a).all()
            assert (a.numpy() @ a.numpy()).shape == (600, 600)
        finally:
            dist.destroy_process_group()
        print("trained")

    def set_rank(rank: int) -> None:
        def setter() -> None:
            import os

            os.environ["RANK"] = str(rank)

        host.call(names[rank], setter)

    for rank in range(2):
        set_rank(rank)
    answers = [host.run(name, train) for name in names]
    host.wait(lambda: all(answer.done for answer in answers), "both ranks train")
    for name, answer in zip(names, answers):
        assert answer.status == 0, (answer.body[-3000:], host.text(name))
        host.wait(lambda name=name: "trained\n" in host.text(name))


SHARING = """
import torch
import torch.multiprocessing
from monarch_kernel.actor import Actor, endpoint, shutdown_context, this_host

class Holder(Actor):
    @endpoint
    def share(self):
        torch.multiprocessing.set_sharing_strategy("file_system")
        self.kept = [torch.ones(1000), torch.ones(1000)]
        return [tensor.untyped_storage()._share_filename_cpu_() for tensor in self.kept]

holder = this_host().spawn_procs().spawn("holder", Holder)
handles = holder.share.call_one().get()
tensors = [
    torch.tensor([], dtype=torch.float32).set_(torch.UntypedStorage._new_shared_filename_cpu(*handle))
    for handle in handles
]
shutdown_context().get()
print(*(part.decode() for handle in handles for part in handle[:2]), flush=True)
assert tensors.pop().sum() == 1000  # and is freed: without its manager, this ends the process
print("freed", flush=True)
"""


def test_tensors_shared_by_a_manager_of_a_rank_outlive_the_mesh_and_leave_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", SHARING], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    manager, *files, freed = done.stdout.split()
    assert freed == "freed"
    for path in (os.path.dirname(manager), f"/dev/shm{files[0]}", f"/dev/shm{files[2]}"):
        wait_until(lambda path=path: not os.path.exists(path), f"the manager removes {path}", 30)


def test_a_manager_without_clients_is_killed_when_it_does_not_end(tmp_path: object) -> None:
    program = f"{tmp_path}/torch_shm_manager"
    os.symlink("/bin/sleep", program)
    env = {**os.environ, cleanup.MARKER: "stuck", "TMPDIR": str(tmp_path)}
    stuck = subprocess.Popen([program, "600"], env=env, start_new_session=True)
    try:
        wait_until(lambda: cleanup._is_manager(stuck.pid), "it has its name", 30)
        assert cleanup.kill_run("stuck") == 0
        assert stuck.poll() is None  # it has time to end by itself
        wait_until(lambda: stuck.poll() is not None, "it is killed within the limit", 60)
        assert stuck.returncode == -9
    finally:
        stuck.kill()
        stuck.wait()
