"""Moments out to fp32 and back."""

import pytest
import torch

from coat_dist.optim import CoatAdamW, export_moments, import_moments
from coat_dist.optim.state import codecs, moment
from coat_dist.reference.moments import decode, encode


def trained(**group):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(7, 43))
    optimizer = CoatAdamW([{"params": [p], **group}])
    for _ in range(3):
        p.grad = torch.randn(7, 43)
        optimizer.step()
    return p, optimizer.state[p], optimizer.param_groups[0]


@pytest.mark.parametrize(
    "group", [{}, {"first_moment": "e5m2", "group_size": 64}, {"moments": "fp32"}]
)
def test_export_decodes_in_the_shape_of_the_parameter(group):
    p, state, options = trained(**group)
    m, v = export_moments(p, state, options)
    assert m.shape == v.shape == p.shape and m.dtype == v.dtype == torch.float32
    assert (v >= 0).all() and m.any()
    held = {t.data_ptr() for t in state.values() if isinstance(t, torch.Tensor)}
    assert not {m.data_ptr(), v.data_ptr()} & held


def test_import_of_an_export_is_exact_where_nothing_is_encoded():
    p, state, options = trained(moments="fp32")
    again = import_moments(p, options, *export_moments(p, state, options), step=state["step"])
    assert again.keys() == state.keys() and again["step"] == state["step"]
    assert all(torch.equal(again[key], state[key]) for key in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("normalize", [False, True])
def test_import_encodes_to_nearest(normalize):
    p, state, options = trained(normalize=normalize)
    m = torch.randn(7, 43)
    new = import_moments(p, options, m, m.square(), 4)
    codec_m, codec_v = codecs(options)
    assert new["step"] == 4
    second = decode(moment(new, "second"), codec_v, p.numel())
    assert torch.equal(moment(new, "second").q, encode(m.square(), codec_v).q)
    assert torch.equal(
        moment(new, "first").q, encode(m, codec_m, second=second if normalize else None).q
    )
    exported = export_moments(p, new, options)
    assert torch.equal(exported[1].view(-1), second)
    ratio = decode(moment(new, "first"), codec_m, p.numel())
    assert torch.equal(exported[0].view(-1), ratio * second.sqrt() if normalize else ratio)


def test_errors():
    p, state, options = trained()
    with pytest.raises(ValueError, match="coat_m_q"):
        export_moments(torch.empty(1000), state, options)
    with pytest.raises(RuntimeError, match="invalid for input of size 300"):
        import_moments(p, options, torch.zeros(301), torch.zeros(300), 1)
