"""What the ``__main__`` of a rank has: what was sent of the script's, by name, for all that looks there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.actor.conftest import Script

Start = Callable[[str], Script]

HEAD = """
from __future__ import annotations
import concurrent.futures, dataclasses, enum, gc, inspect, json, multiprocessing, os, pickle, sys, typing
from typing import List, Optional
from monarch_kernel.actor import *

class Runner(Actor):
    @endpoint
    def run(self, function, *args):
        return function(self, *args)

def ask(function, *args):
    try:
        return runner.run.call_one(function, *args).get(60)
    except Exception as error:
        return str(error)

def report(**answers):
    print(json.dumps(answers))
"""


def test_what_looks_in_main_finds_what_was_sent(script: Start) -> None:
    code, out, err = script(
        HEAD
        + """
class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Optim:
    lr: float = 0.1

@dataclasses.dataclass
class Config:
    optim: Optional[Optim] = None
    parent: Optional["Config"] = None

    def halved(self, by: List[Color]) -> Optim:
        return Optim(0.05)  # the source says so

def pickled(self):
    return [type(pickle.loads(pickle.dumps(each))).__name__ for each in (Config(), Color.RED, pickled)]

def hinted(self):
    fields = typing.get_type_hints(Config)
    method = typing.get_type_hints(Config.halved)
    return [list(fields), fields["optim"] == Optional[Optim], method["by"] == List[Color], method["return"] is Optim]

def sources(self):
    return ["# the source says so" in inspect.getsource(each) for each in (Config.halved, Config)]

def written(self):
    vars(sys.modules["__main__"])["mine"] = 5
    import __main__
    return __main__.mine, "Config" in dir(__main__), "Config" in vars(__main__), hasattr(__main__, "no_such")

class Big:
    pass

def forget(self):
    import __main__
    names = ("Big", "make")
    return [hasattr(__main__, each) for each in names]

def make(self):
    import __main__
    return [hasattr(__main__, each) for each in ("Big", "make")], Big().__class__.__name__

def collect(self):
    gc.collect()

class Locked:
    never = (each for each in ())

DATA = b"x" * (1 << 20)

def annotated(self, locked: Locked = None, data: DATA = None, color: Color = None):
    return sorted(name for name in ("Locked", "DATA", "Color") if name in globals())

if __name__ == "__main__":
    runner = this_host().spawn_procs(per_host={"gpus": 1}).spawn("runner", Runner)
    report(pickled=ask(pickled), hinted=ask(hinted), sources=ask(sources), written=ask(written))
    made = ask(make)
    ask(collect)
    report(made=made, forgotten=ask(forget), annotated=[ask(annotated), ask(annotated)])
"""
    ).finish()
    assert code == 0, err
    first, second = map(json.loads, out.splitlines())
    assert first == {
        "pickled": ["Config", "Color", "function"],
        "hinted": [["optim", "parent"], True, True, True],
        "sources": [True, True],
        "written": [5, True, True, False],
    }
    assert second == {
        "made": [[True, True], "Big"],
        "forgotten": [False, False],
        "annotated": [["Color"], ["Color"]],
    }


def test_children_of_ranks_have_what_was_sent(script: Start) -> None:
    """Those that are spawned, and those that were forked before the function came."""
    code, out, err = script(
        HEAD
        + """
FACTOR = 2

class Sample:
    def __init__(self, n): self.n = n

def double(x):
    return Sample(FACTOR * x)

def late(x):
    return Sample(x + 100)

def pooled(self, how):
    with multiprocessing.get_context(how).Pool(1) as pool:
        return checked(pool.map(double, range(3)))

def checked(found):
    assert all(type(each) is Sample for each in found), found
    return [each.n for each in found]

def executed(self, how):
    context = multiprocessing.get_context(how)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return checked([pool.submit(double, 4).result(), *pool.map(late, [1])])

def opened(self):
    self.pool = multiprocessing.get_context("fork").Pool(1)
    return checked(self.pool.map(double, [1]))

def used(self, function):
    found = self.pool.map_async(function, [1]).get(30)
    self.pool.terminate()
    self.pool.join()
    return [each.n for each in found]

def kept(self, path):
    import atexit
    self.executor = concurrent.futures.ProcessPoolExecutor(1)
    atexit.register(lambda: open(path, "w").close())
    return self.executor.submit(pow, 2, 3).result()

def serve(queue, answers):
    for each in iter(queue.get, None):
        answers.put(each)

def queued(self):
    context = multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(queue, answers))
    process.start()
    queue.put(Sample(3))
    queue.put(Sample)
    found = answers.get(timeout=60), answers.get(timeout=60)
    queue.put(None)
    process.join()
    return type(found[0]) is Sample, found[1] is Sample

if __name__ == "__main__":
    procs = this_host().spawn_procs(per_host={"gpus": 1})
    runner = procs.spawn("runner", Runner)
    report(opened=ask(opened), used=ask(used, late))
    found = [ask(pooled, how) for how in ("fork", "spawn")]
    report(pooled=found, executed=ask(executed, "forkserver"), queued=ask(queued))
    # A pool that lives keeps no rank from its end, and from its exit handlers.
    answer = ask(kept, os.path.abspath("ended"))
    procs.stop().get(30)
    report(kept=answer, ended=os.path.exists("ended"))
"""
    ).finish()
    assert code == 0, err
    first, second, third = map(json.loads, out.splitlines())
    assert third == {"kept": 8, "ended": True}
    assert first == {"opened": [2], "used": [101]}
    assert second == {"pooled": [[0, 2, 4], [0, 2, 4]], "executed": [8, 101], "queued": [True, True]}


def test_misnamed_classes_go_by_the_module_that_has_them(script: Start, tmp_path: Path) -> None:
    """Compiled modules, such as those of PyO3, often name another as that of their classes."""
    (tmp_path / "misnaming.py").write_text("class Here: pass\n\nHere.__module__ = 'builtins'\n")
    code, out, err = script(
        HEAD
        + """
from misnaming import Here

import re
Hidden = type(re.compile("").scanner(""))

def named(self):
    import misnaming
    return Here is misnaming.Here

def hidden(self):
    return Hidden

if __name__ == "__main__":
    runner = this_host().spawn_procs(per_host={"gpus": 1}).spawn("runner", Runner)
    print(ask(named))
    print(ask(hidden))
"""
    ).finish()
    assert code == 0, err
    assert out.splitlines() == [
        "True",
        "an argument of runner.run cannot be pickled: cannot pickle the class _sre.SRE_Scanner: it is compiled, "
        "and no module has it by its name (Hidden, a global of hidden)",
    ]


def test_torch_and_joblib_find_what_was_sent(script: Start) -> None:
    code, out, err = script(
        HEAD
        + """
import io, os
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath("cache")
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = SCALE

    def forward(self, x):
        return torch.relu(x).sum() * self.scale

class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, at): return at * SCALE

SCALE = 3

def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2

def saved(self):
    file = io.BytesIO()
    torch.save(Net(), file)
    file.seek(0)
    return float(torch.load(file, weights_only=False)(torch.ones(2)))

def scripted(self):
    return [float(torch.jit.script(each)(torch.ones(1))) for each in (scaled, Net())]

def compiled(self):
    return float(torch.compile(Net(), backend="eager")(torch.ones(2)))

def loaded(self):
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn", collate_fn=collated)
    return [each for each in loader]

def collated(items):
    return [SCALE, *items]

def parallel(self):
    import joblib
    return joblib.Parallel(n_jobs=2)(joblib.delayed(collated)([n]) for n in range(2))

if __name__ == "__main__":
    runner = this_host().spawn_procs(per_host={"gpus": 1}).spawn("runner", Runner)
    for each in (saved, scripted, compiled, loaded, parallel):
        report(**{each.__name__: ask(each)})
"""
    ).finish()
    assert code == 0, err
    found = {key: value for line in out.splitlines() for key, value in json.loads(line).items()}
    assert found == {
        "saved": 6.0,
        "scripted": [2.0, 3.0],
        "compiled": 6.0,
        "loaded": [[3, 0], [3, 3]],
        "parallel": [[3, 0], [3, 1]],
    }
