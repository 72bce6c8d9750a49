"""TorchTitan's Llama model, with tensor parallelism of 2 under FSDP2 of 2: recorded, compared, watched, replayed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.environments import EnvironmentFailed, python_above

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("titan.py")
pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what TorchTitan needs, as the cells of the notebook on TorchTitan make it."""
    folder = tmp_path_factory.mktemp("titan")
    cells = [
        "".join(each["source"]) for each in json.loads((ROOT / "notebooks" / "11_titan.ipynb").read_text())["cells"]
    ]
    for cell in cells:
        first, _, rest = cell.partition("\n")
        if first in ("%%writefile accelerator.py", "%%writefile debug.toml"):
            (folder / first.split()[1]).write_text(rest)
        if cell.startswith("from tokenizers import"):
            (folder / "text.py").write_text(f"import json, random\nfrom pathlib import Path\n{cell}\n")
    assert len(list(folder.iterdir())) == 3
    run(folder, [str(folder / "text.py")])
    return folder


def run(folder: Path, command: list[str]) -> str:
    """Run Python with TorchTitan in the folder; what it printed."""
    try:
        python = python_above("titan")
    except EnvironmentFailed as error:
        pytest.skip(str(error))
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [str(python), *command], cwd=folder, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def on_ranks(folder: Path, *command: str) -> list[str]:
    """Run the program on four ranks; the lines of JSON that they printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(PROGRAM)]
    return [line for line in run(folder, [*torchrun, *command]).splitlines() if line.startswith("[")]


def alone(folder: Path, *command: str) -> dict[str, Any]:
    """Run the program in one process; what it found."""
    found: dict[str, Any] = json.loads(run(folder, [str(PROGRAM), *command]).splitlines()[-1])
    return found


def test_right_steps_equal_one_process(folder: Path) -> None:
    on_ranks(folder, "record", str(folder), "right")
    found = alone(folder, "compare", str(folder), "right")
    assert found["equal"] is True, found["text"]
    assert found["compared"] > 100, found["text"]


def test_rules_are_silent_on_right_steps(folder: Path) -> None:
    (broken,) = on_ranks(folder, "rules", str(folder), "rules")
    assert json.loads(broken) == []


def test_a_captured_step_replays_bit_for_bit(folder: Path) -> None:
    on_ranks(folder, "capture", str(folder), "step")
    found = alone(folder, "replay", str(folder), "step", "--rank", "3")
    assert found["equal"], found["text"]
    assert found["gradients"] == found["updated"] > 10 and found["collectives"] > 10, found["text"]
