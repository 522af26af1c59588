"""States in pinned host memory, streamed past a GPU: the bits of states that stay there."""

import copy
import gc
import pickle

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs compute capability 8.9: FP8 conversion", allow_module_level=True)

from coat_dist.optim import CoatAdamW, export_master, export_moments, fp32_state_dict, host
from coat_dist.optim.moments import write_moment
from tests.coat_dist.deepspeed.offload_runs import CASES, assert_same, moved, trajectory
from tests.coat_dist.optim.common import equal_bytes
from tests.support import run_ranks

SHAPES = ((1000, 4097), (3, 77), (2048, 1024), (513,))
REMAINDER = {"master_weights": "bf16_remainder"}


@pytest.fixture(autouse=True)
def fresh_lanes():
    yield
    host.release()


def pair(shapes=SHAPES, **options):
    """Equal parameters with states on the GPU, and in host memory; the vector has fp32 moments in both."""
    dtype = torch.bfloat16 if "master_weights" in options else torch.float32
    first = [torch.nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in shapes]
    found = []
    for params, place in ((first, "parameter"), (copy.deepcopy(first), "cpu")):
        groups = [{"params": [p], "moments": "fp32" if p.dim() == 1 else "fp8"} for p in params]
        found.append((params, CoatAdamW(groups, **{"lr": 0.01, **options}, state_device=place)))
    return found


def train(*both, steps=4, clip=True):
    """Equal steps for all. In the third the gradients are NaN, and the step is left out."""
    for step in range(steps):
        grads = [torch.randn(p.shape, device="cuda") * 10 ** torch.empty_like(p).uniform_(-4, 0) for p in both[0][0]]
        norm = torch.stack(torch._foreach_norm(grads)).norm() * (torch.nan if step == 2 else 1.0)
        if not norm.isfinite():
            continue
        for params, optimizer in both:
            optimizer.grad_factor = (1.0 / norm.clamp(min=1.0)).float() if clip else None
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.to(p.dtype)
            optimizer.step()


def assert_equal(one, other):
    """The state in host memory is read first, right after its step."""
    later = {k: {n: t.clone() if torch.is_tensor(t) else t for n, t in s.items()} for k, s in other[1].state.items()}
    for mine, theirs in zip(one[1].state.values(), later.values(), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            same = equal_bytes(value.cpu(), theirs[key].cpu()) if torch.is_tensor(value) else value == theirs[key]
            assert same, key
    assert all(equal_bytes(a, b) for a, b in zip(one[0], other[0], strict=True))


def on_host(optimizer):
    return [
        s["coat_m_q"].device.type == "cpu" and s["coat_m_q"].is_pinned()
        for s in optimizer.state.values()
        if "coat_m_q" in s
    ]


@pytest.mark.parametrize("chunk", [1 << 14, 3 << 16, 1 << 24])
@pytest.mark.parametrize(
    "options", [REMAINDER, {}, {**REMAINDER, "group_size": 64, "stochastic_rounding": True}], ids=str
)
def test_twenty_steps_give_equal_bits(monkeypatch, chunk, options):
    monkeypatch.setattr(host, "CHUNK", chunk)
    resident, hosted = pair(**options)
    train(resident, hosted, steps=20)
    assert_equal(resident, hosted)
    assert on_host(hosted[1]) == [True] * 3 and on_host(resident[1]) == [False] * 3
    copies = [{p: torch.zeros_like(p, dtype=torch.float16) for p in params} for params, _ in (resident, hosted)]
    resident[1].copies, hosted[1].copies = copies
    train(resident, hosted, steps=1)
    assert all(map(equal_bytes, *(c.values() for c in copies)))
    assert_equal(resident, hosted)


@pytest.mark.parametrize("slow", ["loads", "kernels", "stores", "nothing"])
@pytest.mark.parametrize("stream", ["current", "another"])
def test_no_stream_overtakes_another_one(monkeypatch, slow, stream):
    """Each kind of work in turn is late by a millisecond; weights and states are read as soon as a step returns."""
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
        assert all(equal_bytes(v.cpu(), theirs[k].cpu()) for k, v in mine.items() if torch.is_tensor(v))


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
        torch.cuda.synchronize()  # an error of a copy into memory that is not pinned any more shows here


def test_restarts_copies_and_other_places():
    resident, hosted = pair(**REMAINDER)
    train(resident, hosted)
    saved = [copy.deepcopy(x[1].state_dict()) for x in (resident, hosted)]
    others = [(copy.deepcopy(hosted[0]), None) for _ in range(2)]
    for i, (params, _) in enumerate(others):
        groups = [{"params": [p], "moments": "fp32" if p.dim() == 1 else "fp8"} for p in params]
        others[i] = params, CoatAdamW(groups, lr=0.01, **REMAINDER, state_device=("cpu", "parameter")[i])
        others[i][1].load_state_dict(saved[i])
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
                for key, value in state.items():
                    if torch.is_tensor(value):
                        state[key] = value.to(device, non_blocking=True)
        torch.cuda.synchronize()
    train(resident, hosted, steps=2)
    assert_equal(resident, hosted)
    assert on_host(hosted[1]) == [True] * 3 and on_host(resident[1]) == [False] * 3


def test_moments_and_master_weights_read_and_write_alike():
    resident, hosted = pair(**REMAINDER)
    train(resident, hosted)
    found = []
    for params, optimizer in (resident, hosted):
        p, group = params[0], optimizer.param_groups[0]
        write_moment(optimizer.state[p], group, "second", 130, torch.full((700,), 2.0, device="cuda"))
        found.append([*export_moments(p, optimizer.state[p], group), export_master(p, optimizer.state[p])])
        with fp32_state_dict(optimizer):
            optimizer.load_state_dict(optimizer.state_dict())
    assert all(equal_bytes(a.cpu(), b.cpu()) for a, b in zip(*found, strict=True))
    train(resident, hosted)
    assert_equal(resident, hosted)


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
        RuntimeError, match=r"state_device: got 'cpu', and 0.00 GiB .* cannot be pinned \(CUDA error 2\)"
    ):
        CoatAdamW([p], state_device="cpu").step()


@pytest.mark.parametrize("case", CASES)
def test_deepspeeds_key_changes_no_bit(case, tmp_path):
    resident, hosted = (
        run_ranks(1, trajectory, CASES[case], on, str(tmp_path / str(on)), backend="nccl")[0] for on in (False, True)
    )
    assert_same(resident[0], hosted[0])
    assert_same(resident[0][5:], resident[1])
    assert_same(resident[0][5:], hosted[1])


@pytest.mark.parametrize("include", ["all", "optim_states", "lp_params"])
@pytest.mark.parametrize("case", ["zero-2", "zero-3"])
@pytest.mark.parametrize("offloaded, remainder", [(True, True), (False, True), (False, False)])
def test_engines_states_go_and_come_back(case, offloaded, remainder, include):
    still, away = (run_ranks(1, moved, CASES[case], offloaded, remainder, x, backend="nccl")[0] for x in ("", include))
    assert_same(still, away)
