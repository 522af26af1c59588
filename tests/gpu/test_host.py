"""States in pinned host memory, streamed past a GPU: the bits of states that stay there."""

import copy
import gc
import pickle

import pytest
import torch

from tests.support.devices import CONVERTS_FP8

if not CONVERTS_FP8:
    pytest.skip("needs a GPU that converts FP8", allow_module_level=True)

from coat_dist.optim import CoatAdamW, host
from tests.coat_dist.deepspeed.offload_runs import CASES, assert_same, moved, trajectory
from tests.coat_dist.optim.common import equal_bytes
from tests.coat_dist.optim.test_host import BOTH as REMAINDER
from tests.coat_dist.optim.test_host import assert_equal, read_and_write, train
from tests.support import run_ranks

SHAPES = ((1000, 4097), (3, 77), (2048, 1024), (513,))


@pytest.fixture(autouse=True)
def fresh_lanes():
    yield
    host.release()


def pair(shapes=SHAPES, **options):
    """Equal parameters with states on the GPU, and in host memory; the vector has fp32 moments
    in both.
    """
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    first = [torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in shapes]
    return [
        kept(params, place, **options)
        for params, place in ((first, "parameter"), (copy.deepcopy(first), "cpu"))
    ]


def kept(params, place, **options):
    groups = [{"params": [p], "moments": "fp32" if p.dim() == 1 else "fp8"} for p in params]
    return params, CoatAdamW(groups, **{"lr": 0.01, **options}, state_device=place)


def on_host(optimizer):
    codes = [s["coat_m_q"] for s in optimizer.state.values() if "coat_m_q" in s]
    return [q.device.type == "cpu" and q.is_pinned() for q in codes]


@pytest.mark.parametrize("chunk", [1 << 14, 3 << 16, 1 << 24])
@pytest.mark.parametrize(
    "options",
    [REMAINDER, {}, {**REMAINDER, "group_size": 64, "stochastic_rounding": True}],
    ids=str,
)
def test_twenty_steps_give_equal_bits(monkeypatch, chunk, options):
    monkeypatch.setattr(host, "CHUNK", chunk)
    resident, hosted = pair(**options)
    train(resident, hosted, steps=20)
    assert_equal(resident, hosted)
    assert on_host(hosted[1]) == [True] * 3 and on_host(resident[1]) == [False] * 3
    assert all(map(equal_bytes, *train(resident, hosted, steps=1, copies=True)))
    assert_equal(resident, hosted)


@pytest.mark.parametrize("slow", ["loads", "kernels", "stores", "nothing"])
@pytest.mark.parametrize("stream", ["current", "another"])
def test_no_stream_overtakes_another_one(monkeypatch, slow, stream):
    """Each kind of work in turn is late by a millisecond; weights and states are read as soon as
    a step returns.
    """
    monkeypatch.setattr(host, "CHUNK", 1 << 19)
    moved, kernels = host._copy, host.adamw_steps

    def late_copy(to, given):
        if slow == ("loads" if to[0].is_cuda else "stores"):
            torch.cuda._sleep(2_000_000)
        moved(to, given)

    def late_kernels(*args):
        if slow == "kernels":
            torch.cuda._sleep(2_000_000)
        kernels(*args)

    resident, hosted = pair(**REMAINDER)
    train(resident, hosted, steps=1)  # states are made, buffers too
    monkeypatch.setattr(host, "_copy", late_copy)
    monkeypatch.setattr(host, "adamw_steps", late_kernels)
    aside = torch.cuda.Stream() if stream == "another" else torch.cuda.current_stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            train(resident, hosted, steps=2)
            assert all(equal_bytes(a, b) for a, b in zip(resident[0], hosted[0], strict=True))
        assert_equal(resident, hosted)
        saved = [pickle.loads(pickle.dumps(x[1].state_dict())) for x in (resident, hosted)]
    for mine, theirs in zip(*(s["state"].values() for s in saved), strict=True):
        assert all(
            equal_bytes(v.cpu(), theirs[k].cpu()) for k, v in mine.items() if torch.is_tensor(v)
        )


def test_a_state_that_is_freed_while_it_travels(monkeypatch):
    def late(to, given, moved=host._copy):
        torch.cuda._sleep(20_000_000)
        moved(to, given)

    for _ in range(3):
        resident, hosted = pair()
        train(resident, hosted, steps=1)
        monkeypatch.setattr(host, "_copy", late)
        train(resident, hosted, steps=1)
        del hosted
        gc.collect()
        monkeypatch.undo()
        # An error of a copy into memory that is not pinned any more shows here.
        torch.cuda.synchronize()


def test_restarts_copies_and_other_places():
    resident, hosted = pair(**REMAINDER)
    train(resident, hosted)
    saved = [copy.deepcopy(x[1].state_dict()) for x in (resident, hosted)]
    others = [kept(copy.deepcopy(hosted[0]), place, **REMAINDER) for place in ("cpu", "parameter")]
    for (_, optimizer), one in zip(others, saved, strict=True):
        optimizer.load_state_dict(one)
    again = [copy.deepcopy(hosted), pickle.loads(pickle.dumps(hosted))]
    assert on_host(others[0][1]) == [True] * 3 and on_host(others[1][1]) == [False] * 3
    train(resident, hosted, *others, *again)
    for one in (hosted, *others, *again):
        assert_equal(resident, one)
    assert all(on_host(one[1]) == [True] * 3 for one in again)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_states_that_somebody_moved_come_home(device):
    """As verl does between steps: all tensors of all states, to the CPU and to the GPU."""
    resident, hosted = pair(**REMAINDER)
    for _ in range(3):
        train(resident, hosted, steps=2)
        for _, optimizer in (resident, hosted):
            for state in optimizer.state.values():
                state.update(
                    {
                        k: t.to(device, non_blocking=True)
                        for k, t in state.items()
                        if torch.is_tensor(t)
                    }
                )
        torch.cuda.synchronize()
    train(resident, hosted, steps=2)
    assert_equal(resident, hosted)
    assert on_host(hosted[1]) == [True] * 3 and on_host(resident[1]) == [False] * 3


def test_moments_and_master_weights_read_and_write_alike():
    read_and_write(*pair(**REMAINDER))


def test_the_gpu_holds_three_chunks_instead_of_the_states():
    held = []
    for place in ("parameter", "cpu"):
        host.release()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        p = torch.nn.Parameter(torch.zeros(1 << 27, device="cuda", dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        optimizer = CoatAdamW([p], **REMAINDER, state_device=place)
        for _ in range(2):
            optimizer.step()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        bytes_of_states = sum(t.nbytes for t in optimizer.state[p].values() if torch.is_tensor(t))
        del p, optimizer
    chunks = 3 * bytes_of_states * host.CHUNK // (1 << 27)
    assert held[1] == pytest.approx(held[0] - bytes_of_states + chunks, rel=0.02)


def test_memory_that_cannot_be_pinned_is_named(monkeypatch):
    class Runtime:
        cudaHostRegister = staticmethod(lambda *_: 2)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    p = torch.nn.Parameter(torch.ones(256, 128, device="cuda"))
    p.grad = torch.ones_like(p)
    with pytest.raises(
        RuntimeError,
        match=r"state_device: got 'cpu', and 0.00 GiB .* cannot be pinned \(CUDA error 2\)",
    ):
        CoatAdamW([p], state_device="cpu").step()


@pytest.mark.parametrize("case", CASES)
def test_deepspeeds_key_changes_no_bit(case, tmp_path):
    resident, hosted = (
        run_ranks(1, trajectory, CASES[case], on, str(tmp_path / str(on)), backend="nccl")[0]
        for on in (False, True)
    )
    assert_same(resident[0], hosted[0])
    assert_same(resident[0][5:], resident[1])
    assert_same(resident[0][5:], hosted[1])


@pytest.mark.parametrize("include", ["all", "optim_states", "lp_params"])
@pytest.mark.parametrize("case", ["zero-2", "zero-3"])
@pytest.mark.parametrize("offloaded, remainder", [(True, True), (False, True), (False, False)])
def test_engines_states_go_and_come_back(case, offloaded, remainder, include):
    still, away = (
        run_ranks(1, moved, CASES[case], offloaded, remainder, x, backend="nccl")[0]
        for x in ("", include)
    )
    assert_same(still, away)
