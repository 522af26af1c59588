"""The micro-batch "auto", and runs that are out of memory."""

import json
from pathlib import Path

import pytest
import torch

from coat_dist.checkpoint.manifest import read_manifest
from launch import pretrain
from launch.memory.fit import GPU, need
from launch.train import exhausted
from tests.launch.memory.auto_runs import limited
from tests.launch.memory.engines import planned
from tests.launch.pretrain_runs import command, configuration, losses
from tests.support import run_ranks

SMALL = {"stage": 2, "reduce_bucket_size": 100000}


def memory_for(work, config, micro, ranks=1):
    """Bytes with which ``micro`` is the planner's largest micro-batch."""
    settings = json.loads(Path(config).read_text()) | {"train_micro_batch_size_per_gpu": micro}
    model = json.loads((work / "model.json").read_text()) | {"vocab_size": 250}
    return need(planned(model, settings, ranks), GPU("", 0, 0))


def auto(tmp_path, **more):
    return configuration(
        tmp_path, 2, zero_optimization=SMALL, train_micro_batch_size_per_gpu="auto", **more
    )


def test_it_trains_as_with_the_number_and_continues_with_it(work, tmp_path) -> None:
    given = configuration(tmp_path, 2, zero_optimization=SMALL, train_micro_batch_size_per_gpu=4)
    found, save = auto(tmp_path), tmp_path / "save"
    memory = memory_for(work, found, 4)
    run_ranks(1, limited, command(work, tmp_path / "given", given, steps=4))
    kept = ["--save", save, "--load", "auto", "--gpu-memory", memory]
    argv = command(work, tmp_path / "found", found, *kept, steps=4)
    ended = run_ranks(1, limited, [*argv, "--stop-at-step", "2"])[0]
    assert "stopped by --stop-at-step after step 2" in ended
    batch = {"micro": 4, "accumulation": 2, "total": 8, "found": "auto"}
    assert read_manifest(save / "step00000002")["run"]["batch"] == batch
    # The second start has memory for one sample, and does not look again.
    argv[argv.index(str(memory))] = str(memory_for(work, found, 1))
    assert "finished 4 steps" in run_ranks(1, limited, argv)[0]
    assert losses(tmp_path / "given") == losses(tmp_path / "found")


def test_all_ranks_take_a_divisor_of_the_samples_of_a_step(work, tmp_path) -> None:
    sums = {"grad_accum_dtype": "fp32"}  # need no more memory with accumulation
    found = auto(tmp_path, train_batch_size=24, gradient_accumulation_steps=None, data_types=sums)
    memory = memory_for(work, found, 5, ranks=2)
    save = tmp_path / "save"
    argv = command(work, tmp_path / "run", found, "--save", save, "--gpu-memory", memory, steps=2)
    assert all("finished 2 steps" in end for end in run_ranks(2, limited, argv))
    batch = read_manifest(save / "step00000002")["run"]["batch"]
    # 5 divides nothing.
    assert batch == {"micro": 4, "accumulation": 3, "total": 24, "found": "auto"}


@pytest.mark.parametrize(
    ("more", "options", "said"),
    [
        ({}, [], 'train_micro_batch_size_per_gpu: got "auto" without a GPU, accepted: '),
        ({}, ["--gpu-memory", "50MiB"], "1 sample needs"),
        (
            {"train_batch_size": 8},
            ["--gpu-memory", "1GiB"],
            'accepted: "auto" with at most one of them',
        ),
        (
            {"gradient_accumulation_steps": "auto"},
            ["--gpu-memory", "1GiB"],
            'gradient_accumulation_steps: got "auto"',
        ),
    ],
)
def test_what_leaves_no_choice_is_refused(work, tmp_path, more, options, said) -> None:
    argv = command(work, tmp_path / "run", auto(tmp_path, **more), *options, steps=2)
    end = run_ranks(1, limited, argv)[0]
    assert end.startswith("CoatConfigError: ") and said in end


def test_out_of_memory_says_what_other_choices_need(work, tmp_path) -> None:
    config = configuration(tmp_path, 2, zero_optimization=SMALL)
    for at, doing, *more in (
        ("build_engine", "while the engine was built"),
        (1, "in step 1"),
        (6, "in step 3"),
        (5, "in the evaluation after step 2", "--eval-interval", "2", "--eval-steps", "1"),
        (
            "save",
            "while the checkpoint of step 2 was written",
            "--save",
            tmp_path / "save",
            "--save-interval",
            "2",
        ),
    ):
        argv = command(work, tmp_path / f"run-{at}", config, *more, steps=4)
        end = run_ranks(1, limited, argv, at)[0]
        assert end.startswith(
            f"OutOfMemory: out of memory {doing}, with micro-batch 2: CUDA out of memory. Tried to "
        )
        assert end.endswith("what takes how much, and which settings fit")
        assert ("as measured in the first step:" in end) == (at not in ("build_engine", 1))


def test_the_program_ends_with_status_5(work, tmp_path, capfd, monkeypatch):
    config = configuration(tmp_path, 2, zero_optimization=SMALL)

    def train(*args):
        raise exhausted.OutOfMemory("out of memory in step 7\n  and a table")

    monkeypatch.setattr(pretrain, "train", train)
    monkeypatch.setattr(pretrain.runtime, "start", lambda *args: None)
    assert pretrain.main(command(work, tmp_path / "run", config)) == 5
    assert capfd.readouterr().err.endswith("error: out of memory in step 7\n  and a table\n")


@pytest.mark.parametrize(
    ("problem", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory: you "
                "tried"
            ),
            True,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("Connection closed by peer"), False),
        (MemoryError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(problem, is_one) -> None:
    assert exhausted.is_out_of_memory(problem) is is_one
