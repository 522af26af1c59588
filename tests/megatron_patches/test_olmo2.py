"""OLMo-2's layers: norms behind attention and MLP, and on queries and keys over all heads,
whoever holds these.
"""

from __future__ import annotations

import pytest
import torch

from coat_dist.config import ActivationConfig
from megatron_patches import gpt_layer_spec, universal_checkpoint_info
from megatron_patches.layers.norm import AllHeadsNorm
from tests.support import run_ranks

from .tiny import FP32, OLMO2, tiny_config, tiny_gpt
from .training import train

AFTER = {
    f"decoder.layers.{i}.post_{n}_layernorm.weight" for i in range(2) for n in ("self_attn", "mlp")
}
HEADS = {f"decoder.layers.{i}.self_attention.{n}_layernorm.weight" for i in range(2) for n in "qk"}


def test_parameters_and_how_ranks_divide_them():
    model = tiny_gpt(**OLMO2)
    names = {n for n, _ in model.named_parameters() if "layernorm" in n}
    assert names == AFTER | HEADS | {"decoder.final_layernorm.weight"}
    replicated = universal_checkpoint_info(model)["tp_replicated_parameter_patterns"]
    plain = {pattern.strip("^$").replace("\\", "") for pattern in replicated}
    assert plain == AFTER | {"decoder.final_layernorm.weight"}


@pytest.mark.parametrize("exact", [False, True])
def test_norm_over_all_heads(exact):
    """Against the definition, with its gradients, in fp32."""
    norm = AllHeadsNorm(tiny_config(**FP32, num_query_groups=2), 8, heads=6, eps=1e-3)
    norm.exact = exact
    with torch.no_grad():
        norm.weight.normal_()
    x = torch.randn(5, 2, 6, 8).mul_(torch.logspace(-3, 3, 10).view(5, 2, 1, 1)).requires_grad_()
    flat, weight = (t.detach().double().requires_grad_() for t in (x.flatten(-2), norm.weight))
    expected = torch.nn.functional.rms_norm(flat, (48,), weight, eps=1e-3)
    y = norm(x)
    torch.testing.assert_close(y.flatten(-2).double(), expected, rtol=1e-5, atol=1e-6)
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.flatten(-2).double())
    assert x.grad is not None and norm.weight.grad is not None
    torch.testing.assert_close(x.grad.flatten(-2).double(), flat.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(norm.weight.grad.double(), weight.grad, rtol=1e-5, atol=1e-5)


def test_refusals():
    with pytest.raises(
        ValueError, match="qk_layernorm, qk_l2_norm: got True, accepted: False with norm_all_heads"
    ):
        gpt_layer_spec(tiny_config(qk_layernorm=True), norm_all_heads=True)
    with pytest.raises(ValueError, match="norm_placement: got 'after', accepted: 'pre', 'post'"):
        gpt_layer_spec(tiny_config(), norm_placement="after")


def _sizes(rank, world):
    changes = {**OLMO2, "num_query_groups": 2}
    runs = [
        train(tp, sp, 4, None, **FP32, **changes) for tp, sp in ((1, False), (2, False), (2, True))
    ]
    fp8 = [train(tp, sp, 4, ActivationConfig(), **changes) for tp, sp in ((1, False), (2, True))]
    *_, loose, _ = train(2, True, 3, None, hooks=False, **changes)
    state = tiny_gpt(tensor_model_parallel_size=2, **changes).sharded_state_dict()
    return (
        runs,
        fp8,
        loose,
        {name: (state[name].global_shape[1:], state[name].local_shape) for name in HEADS},
    )


def test_tensor_parallel_sizes_agree():
    """fp32 and unpatched: all but rounding. In FP8 too within 1 %. Ranks hold their heads' part
    of the head norms.
    """
    for runs, fp8, loose, shapes in run_ranks(2, _sizes):
        losses, first, *_ = runs[0]
        assert losses[-1] < losses[0] - 0.1
        for (other, start, _, replicas, hooked), norms in zip(
            runs[1:], (set(), AFTER), strict=True
        ):
            assert other == pytest.approx(losses, rel=1e-5)
            assert all(torch.equal(first[name], start[name]) for name in first)
            assert not HEADS & set(replicas) and not any(replicas.values())
            assert set(hooked) == (norms | {"decoder.final_layernorm.weight"} if norms else set())
        assert fp8[1][0] == pytest.approx(fp8[0][0], rel=1e-2) and not any(fp8[1][3].values())
        assert all(loose[name] > 0 for name in AFTER), "nothing was tested"
        for name in HEADS:  # in Megatron's distributed checkpoints
            width = 256 if "q_layernorm" in name else 128
            assert shapes[name] == ((width,), (width // 2,))
