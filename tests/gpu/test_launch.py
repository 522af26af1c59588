"""Launches through the wrapper on a GPU: the same bits as Triton's path, for every alignment and
size.
"""

import threading

import pytest
import torch

from tests.support.devices import CONVERTS_FP8, two_gpus

if not CONVERTS_FP8:
    pytest.skip("needs a GPU that converts FP8", allow_module_level=True)

import triton
import triton.language as tl

from coat_dist.formats import E4M3
from coat_dist.kernels import launch, quantize
from coat_dist.kernels.launch import FastLaunch, fast_launch
from coat_dist.reference import quantize as reference


@fast_launch
@triton.jit
def _mix(x, y, n, stride, shift, factor, FLAG: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at.to(tl.int64) * stride, mask=at < n, other=0.0).to(tl.float32) * factor
    if FLAG:
        # A shift of 1 is a constant.
        value += ((tl.zeros((), tl.int64) + shift) % 1000).to(tl.float32)
    if y is not None:
        tl.store(y + at, value.to(y.dtype.element_ty), mask=at < n)


def _both(monkeypatch, kernel, call):
    """Bytes that ``call(kernel, out)`` writes: by Triton's path, then twice by the wrapper, the
    second time a hit.
    """
    out = [torch.full((4096,), 0xA5, dtype=torch.uint8, device="cuda") for _ in range(3)]
    call(kernel.jit, out[0])
    call(kernel, out[1])
    with monkeypatch.context() as patch:
        patch.setattr(FastLaunch, "_launch_by_triton", lambda *_: pytest.fail("no hit"))
        call(kernel, out[2])
    return out


@pytest.mark.skipif(
    not triton.__version__.startswith(launch.COMPARED), reason="Triton's own path is taken"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_every_alignment_and_size_gives_tritons_bits(monkeypatch, dtype):
    base = torch.randn(4096, device="cuda").to(dtype)
    # Elements of base, words of the output.
    starts = [(0, 0), (1, 0), (0, 4), (3, 8), (16, 16), (8, 1)]
    sizes = [(1, 1), (15, 1), (16, 16), (17, 2), (160, 3), (161, 16)]
    shifts = [0, 1, 7, 16, 2**31, 2**31 + 7, -5, -(2**33)]
    cases = [(s, n, shifts[(i + j) % 8]) for i, s in enumerate(starts) for j, n in enumerate(sizes)]
    cases += [(starts[0], sizes[3], shift) for shift in shifts]
    for (x_at, y_at), (n, stride), shift in cases:

        def call(kernel, out, x=base[x_at:], at=4 * y_at, n=n, stride=stride, shift=shift):
            grid = (triton.cdiv(n, 64),)
            kernel[grid](
                x, out[at:].view(torch.float32), n, stride, shift, 0.37, FLAG=True, BLOCK=64
            )

        plain, first, hit = _both(monkeypatch, _mix, call)
        assert torch.equal(plain, first) and torch.equal(plain, hit), (x_at, y_at, n, stride, shift)
        assert not torch.equal(plain, torch.full_like(plain, 0xA5))


def test_none_and_options(monkeypatch):
    x = torch.randn(512, device="cuda")
    for warps in (1, 4):
        for flag in (False, True, 1):
            for shift in (3, 0.5):

                def call(kernel, out, warps=warps, flag=flag, shift=shift):
                    if isinstance(shift, int):
                        kernel[(8, 1, 1)](
                            x,
                            out.view(torch.float32),
                            500,
                            1,
                            shift,
                            2,
                            flag,
                            BLOCK=64,
                            num_warps=warps,
                        )
                    else:
                        kernel[(8, 1)](x, None, 500, 1, 3, shift, flag, BLOCK=64, num_warps=warps)

                outs = _both(monkeypatch, _mix, call)
                assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_a_cpu_tensor_is_refused_as_before():
    x, out = torch.zeros(64, device="cuda"), torch.zeros(64)
    for _ in range(2):
        with pytest.raises(ValueError, match="cpu tensor"):
            _mix[(1,)](x, out, 64, 1, 0, 1.0, FLAG=False, BLOCK=64)


def test_profilers_hooks_see_launches():
    seen = []
    x, y = torch.zeros(64, device="cuda"), torch.zeros(64, device="cuda")

    def call():
        _mix[(1,)](x, y, 64, 1, 0, 1.0, FLAG=False, BLOCK=64)

    call()
    call()
    chain = triton.knobs.runtime.launch_enter_hook
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    chain.add(hook)
    try:
        call()
    finally:
        chain.remove(hook)
    call()
    assert len(seen) == 1


def test_streams_and_threads():
    """Each launch on its thread's current stream; each thread its own words for amaxes."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [torch.randn(1000 + 16 * i, device="cuda") for i in range(4)]
    for x in inputs:
        quantize.amax(x)  # compiled by one thread
    torch.cuda.synchronize()
    found, errors = [[] for _ in streams], []

    def work(i):
        try:
            with torch.cuda.stream(streams[i]):
                for j in range(300):
                    found[i].append((j, quantize.amax(inputs[i] * (j + 1))))
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not errors
    for i, x in enumerate(inputs):
        assert all(torch.equal(top, (x * (j + 1)).abs().max()) for j, top in found[i])


def test_replays_of_a_graph_start_from_zero():
    x = torch.full((4096,), 5.0, device="cuda")
    quantize.tensor_scale(quantize.amax(x), E4M3)  # compiled before the capture
    quantize.quantize_rows(x.view(4, 1024), E4M3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        top = quantize.amax(x)
        scale = quantize.tensor_scale(top, E4M3)
        rows = quantize.quantize_rows(x.view(4, 1024), E4M3)
    for value in (5.0, 3.0, 7.0):
        x.fill_(value)
        graph.replay()
        assert top.item() == value and torch.equal(
            scale.cpu(), reference.tensor_scale(torch.tensor(value), E4M3)
        )
        assert torch.equal(rows.top, scale)


@two_gpus
def test_tensors_of_another_device_than_the_current_one():
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x = torch.randn(1000, device=device)
        for _ in range(2):
            assert torch.equal(quantize.amax(x), x.abs().max())
    assert torch.cuda.current_device() == 0
