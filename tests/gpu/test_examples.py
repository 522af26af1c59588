"""The examples started by torchrun and deepspeed on one and two GPUs: no device is chosen before
they run.
"""

import json

import pytest
import torch

from tests.examples.run import CHECKED, STEPS, start

LAUNCHERS = {"torchrun": "torchrun --nproc_per_node", "deepspeed": "deepspeed --num_gpus"}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", CHECKED)
def test_example(name, launcher, world, tmp_path):
    """Each rank asserts that it reserved memory on its own GPU and on no other."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, got {torch.cuda.device_count()}")
    start(f"{LAUNCHERS[launcher]} {world} --module tests.examples.run {name} {tmp_path}")
    losses = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    assert all(len(own) == STEPS for own in losses)


@pytest.mark.parametrize("options", ["--zero 2", "--zero 3 --attention fp8 --vision frozen"])
def test_vision_language(options, tmp_path):
    output = tmp_path / "results.json"
    start(f"python examples/vision_language.py --size tiny {options} --output {output}")
    for block, result in json.loads(output.read_text())["results"].items():
        assert len(result["losses"]) == 30 and result["losses"][-1] < 0.8 * result["losses"][0]
        assert block == "bf16" or (len(result["patched"]) == 8 and not result["left"])


@pytest.mark.slow
def test_vision_language_describes_pictures(tmp_path):
    output = tmp_path / "results.json"
    start(f"python examples/vision_language.py --size large --output {output}", limit=900)
    found = {
        block: r["held_out"]["captions"]
        for block, r in json.loads(output.read_text())["results"].items()
    }
    assert min(found.values()) > 0.9 and abs(found["bf16"] - found["coat"]) < 0.05, found
