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


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """What came of four ranks: the rules that broke on each, the comparison of recorded steps, and a replayed one."""
    answer: dict[str, Any] = json.loads(run(folder, [str(PROGRAM), str(folder)]).splitlines()[-1])
    return answer


def test_right_steps_equal_one_process(found: dict[str, Any]) -> None:
    comparison = found["right"]
    assert comparison["equal"] is True, comparison["text"]
    assert comparison["compared"] > 100, comparison["text"]


def test_a_wrong_rank_of_tensor_parallelism_is_named_where_it_is_wrong(found: dict[str, Any]) -> None:
    comparison = found["wrong"]
    assert comparison["equal"] is False, comparison["text"]
    assert comparison["first"] == ["forward", "layers.1.feed_forward.w2", "output"], comparison["text"]


def test_rules_are_silent_on_right_steps(found: dict[str, Any]) -> None:
    assert found["broken"] == [[], [], [], []]


def test_a_captured_step_replays_bit_for_bit(found: dict[str, Any]) -> None:
    replay = found["replay"]
    assert replay["equal"], replay["text"]
    assert replay["gradients"] == replay["updated"] > 10 and replay["collectives"] > 10, replay["text"]
