"""What each GPU can do, and what is said, once, about one that cannot do all."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from coat_dist import devices


@pytest.fixture
def machine(monkeypatch):
    """Says which compute capabilities the GPUs of a machine have; what is known of the real one
    is forgotten.
    """
    capabilities = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: capabilities[device])
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device=0: f"kind {capabilities[device]}"
    )
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", None)
    for name in ("COAT_FP8_ARITHMETIC", "RANK"):
        monkeypatch.delenv(name, raising=False)
    caches = devices._runs_kernels, devices._has_fp8, devices._say

    def forget():
        for cache in caches:
            cache.cache_clear()

    def build(*new):
        capabilities[:] = new
        forget()

    yield build
    forget()


def on(device):
    """A tensor of a GPU, as far as it is asked."""
    return SimpleNamespace(is_cuda=True, get_device=lambda: device)


def asked(*gpus):
    """For each GPU whether it runs kernels and whether it has FP8, asked three times; and what
    was said.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            found = [(devices.runs_kernels(on(i)), devices.has_fp8(on(i))) for i in gpus]
    return found, [str(one.message) for one in said]


@pytest.mark.parametrize(
    ("capability", "kernels", "fp8"),
    [
        ((7, 5), False, False),
        ((8, 0), True, False),
        ((8, 6), True, False),
        ((8, 9), True, True),
        ((9, 0), True, True),
        ((10, 0), True, True),
    ],
)
def test_devices_by_compute_capability(machine, capability, kernels, fp8):
    machine(capability)
    found, said = asked(0)
    assert found == [(kernels, fp8)] and len(said) == (0 if fp8 else 1)
    for text in said:
        assert f"kind {capability}" in text and f"{capability[0]}.{capability[1]}, below" in text
        assert "docs/support.md" in text and ("arithmetic" in text) == kernels


def test_devices_of_two_kinds_in_one_machine(machine):
    machine((9, 0), (8, 0), (8, 0))
    found, said = asked(0, 1, 2)
    assert found == [(True, True), (True, False), (True, False)]
    assert [text.partition(" (")[0] for text in said] == ["coat_dist: GPU 1", "coat_dist: GPU 2"]


def test_coat_fp8_arithmetic_takes_a_gpu_for_an_older_one(machine, monkeypatch):
    machine((9, 0))
    assert asked(0) == ([(True, True)], [])
    monkeypatch.setenv("COAT_FP8_ARITHMETIC", "1")
    found, said = asked(0)
    assert found == [(True, False)] and len(said) == 1
    assert "COAT_FP8_ARITHMETIC=1: FP8 by integer arithmetic" in said[0]
    monkeypatch.setenv("COAT_FP8_ARITHMETIC", "0")
    assert asked(0) == ([(True, True)], [])


def test_devices_on_a_cpu_warns_of_nothing():
    x = torch.zeros(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not devices.runs_kernels(x) and not devices.has_fp8(x)
