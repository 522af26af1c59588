"""Launches without Triton's binding: keys at least as fine as Triton's own, and everything
unusual left to Triton.
"""

import functools
import importlib
import inspect
import itertools
import pkgutil
import re

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.compiler import CompiledKernel  # noqa: E402
from triton.runtime import JITFunction  # noqa: E402
from triton.runtime import jit as runtime  # noqa: E402

from coat_dist import kernels as package  # noqa: E402
from coat_dist.formats import E4M3, E5M2  # noqa: E402
from coat_dist.kernels import launch  # noqa: E402
from coat_dist.kernels.fp8 import constants  # noqa: E402
from coat_dist.kernels.launch import FastLaunch, Plan, fast_launch  # noqa: E402
from tests.support import run_ranks  # noqa: E402

if not launch.COMPARED or not triton.__version__.startswith(launch.COMPARED):
    pytest.skip(f"Triton {triton.__version__} launches by its own path", allow_module_level=True)


@fast_launch
@JITFunction  # as triton.jit makes it, also where that one makes interpreted functions
def _kernel(x, y, n, m, factor, C: tl.constexpr, FLAG: tl.constexpr):
    tl.store(y + n, tl.load(x + m) * factor)


@fast_launch
@functools.partial(JITFunction, do_not_specialize=["n"])
def _seeded(x, y, n, m, factor, C: tl.constexpr, FLAG: tl.constexpr):
    tl.store(y + n, tl.load(x + m) * factor)


NAMES = ("x", "y", "n", "m", "factor", "C", "FLAG")
_base = torch.zeros(4096, dtype=torch.uint8)
_base = _base[-_base.data_ptr() % 64 :]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]
TENSORS = [
    _base[at : at + 64].view(dtype)
    for dtype in DTYPES
    for at in (0, 8, 16, 24, 32, 48)
    if at % dtype.itemsize == 0
] + [torch.nn.Parameter(torch.zeros(4)), _base[1:9], _base[15:23], _base[:0]]
INTS = [
    *range(-33, 34),
    *(2**power + more for power in (31, 32, 62) for more in (-16, -1, 0, 1, 16)),
    *(-(2**power) + more for power in (31, 32, 62) for more in (-16, -1, 0, 1, 16)),
    *(2**63 - 16, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 16, 2**64 - 1, -(2**63), -(2**63) + 1),
]
CONSTANTS = [constants(f, torch.zeros(1)) for f in (E4M3, E5M2)] + [
    0,
    1,
    2,
    True,
    False,
    None,
    "silu",
    tl.bfloat16,
]


def _plan(kernel, values):
    return Plan(kernel.jit, tuple(map(type, values)), ())


def _of_triton(kernel, values):
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    binder = runtime.create_function_from_signature(
        kernel.jit.signature, kernel.jit.params, backend
    )
    _, specialization, _ = binder(*values)
    return tuple((kind, type(what), what) for kind, what in specialization)


def _calls():
    """Arguments that vary one or two at a time."""
    x, y = TENSORS[0], TENSORS[1]
    for tensor in TENSORS:
        yield tensor, y, 3, 4, 0.5, CONSTANTS[0], True
        yield x, tensor, 3, 4, 0.5, CONSTANTS[0], True
    for n, m in itertools.product(INTS, (1, 2, 16, 2**31, 2**63)):
        yield x, y, n, m, 0.5, CONSTANTS[0], True
    for c, flag in itertools.product(CONSTANTS, (True, False)):
        yield x, y, 3, 4, 0.5, c, flag
    for factor in (0.0, 1.0, -1.5, float("nan"), float("inf"), 1e300, 1, 2, 16, None):
        yield x, y, 3, 4, factor, CONSTANTS[0], True
    for n in (None, 1.0, 2.5):
        yield x, None, n, 4, 0.5, CONSTANTS[0], True


@pytest.mark.parametrize("kernel", [_kernel, _seeded], ids=["all", "do_not_specialize"])
def test_what_triton_tells_apart_has_another_key(kernel):
    theirs, ours = {}, {}
    for values in _calls():
        plan = _plan(kernel, values)
        assert plan.supported, values
        key = (tuple(map(type, values)), plan.key(values))
        specialization = _of_triton(kernel, values)
        assert theirs.setdefault(key, specialization) == specialization, values
        ours.setdefault(specialization, set()).add(key)
    assert len(ours) > 60


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "n", [True, (1, 2), "text", tl.constexpr(3), torch.zeros(1).as_subclass(_Subclass), 1j]
)
def test_other_types_are_left_to_triton(n):
    values = (TENSORS[0], TENSORS[1], n, 4, 0.5, CONSTANTS[0], True)
    assert not _plan(_kernel, values).supported


@pytest.fixture
def launched(monkeypatch):
    """A fresh wrapper, and what Triton's path and the compiled kernel were called with. Tensors
    lie on "device" -1.
    """
    calls = {"triton": [], "compiled": []}

    def run(*args, grid, warmup, **kwargs):
        calls["triton"].append((args, grid, warmup, kwargs))
        compiled = object.__new__(CompiledKernel)
        compiled.module = None
        compiled.function, compiled.packed_metadata = 1000 + len(calls["triton"]), "metadata"
        compiled._run = lambda *a: calls["compiled"].append(a)
        return compiled

    kernel = FastLaunch(runtime.JITFunction(_kernel.jit.fn))
    monkeypatch.setattr(kernel.jit, "run", run)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return kernel, calls


def test_the_second_call_goes_to_the_compiled_kernel(launched):
    kernel, calls = launched
    x, y = torch.zeros(64), torch.zeros(64)
    keywords = {"FLAG": True, "factor": 0.5, "num_warps": 8, "m": 6, "C": CONSTANTS[0], "n": 5}
    first = kernel[(3, 2)](x, None, **keywords)
    assert calls == {"triton": [((x, None), (3, 2, 1), False, keywords)], "compiled": []}
    # Keywords in another order.
    second = kernel[(4,)](y, None, 7, 8, 1.5, FLAG=True, C=CONSTANTS[0], num_warps=8)
    assert len(calls["triton"]) == 2
    third = kernel[(4, 5, 6)](y, None, **keywords | {"n": 7, "m": 9, "factor": 1.5})
    assert len(calls["triton"]) == 2 and third is first and second is not first
    passed = (y.data_ptr(), None, 7, 9, 1.5, CONSTANTS[0], True)
    assert calls["compiled"] == [(4, 5, 6, 7, 1001, "metadata", None, None, None, *passed)]


@pytest.mark.parametrize("changed", ["alignment", "warps", "type"])
def test_a_change_that_matters_asks_triton(launched, changed):
    kernel, calls = launched
    x = torch.zeros(64)
    usual = dict(x=x, y=x, n=3, m=4, factor=0.5, C=2, FLAG=True, num_warps=4)
    other = {
        "alignment": {"y": x[1:]},
        "warps": {"num_warps": 8},
        "type": {"FLAG": 1},
    }
    for _ in range(2):
        kernel[(1,)](**usual)
    assert len(calls["triton"]) == 1 and len(calls["compiled"]) == 1
    kernel[(1,)](**{**usual, **other[changed]})
    assert len(calls["triton"]) == 2 and len(calls["compiled"]) == 1


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [(torch._C, "_cuda_getDevice", lambda: 1), (triton, "__version__", "99.0.0")],
    ids=["another device", "another version"],
)
def test_launch_elsewhere_takes_tritons_path(launched, monkeypatch, where, name, value):
    kernel, calls = launched
    monkeypatch.setattr(where, name, value)
    x = torch.zeros(64)
    for _ in range(3):
        kernel[(1,)](x, x, 3, 4, 0.5, C=2, FLAG=True)
    assert len(calls["triton"]) == 3 and not calls["compiled"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_torch_compile_sees_tritons_kernel(monkeypatch, wrapped):
    """In its graph, as without the wrapper, so that Inductor compiles it in."""
    # Which a CPU is said not to have.
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    torch.compiler.reset()
    kernel, nodes = _kernel if wrapped else _kernel.jit, []

    def backend(graph, inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return lambda *args: (torch.zeros(4),)

    def call(x):
        y = torch.empty_like(x)
        kernel[(1,)](x, y, 0, 1, 0.5, C=0, FLAG=True)
        return y

    torch.compile(call, backend=backend, fullgraph=True)(torch.zeros(4))
    assert sum("triton_kernel_wrapper" in node for node in nodes) == 1, nodes


def all_wrapped(rank, world):
    found = []
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for name in set(re.findall(r"(\w+_kernel)\[", inspect.getsource(module))):
            assert isinstance(getattr(module, name), FastLaunch), f"{info.name}.{name}"
            found.append(name)
    assert len(found) >= 17


def test_every_kernel_that_is_launched_is_wrapped():
    run_ranks(1, all_wrapped)  # where kernels are not interpreted
