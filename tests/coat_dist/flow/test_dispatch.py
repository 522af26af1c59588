"""Tokens to experts of other ranks in FP8: the bits that quantizing afterwards gives, and bytes
on the wire.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from coat_dist.config import ActivationConfig
from coat_dist.flow import dispatch_rows
from coat_dist.formats import FORMATS
from coat_dist.ops import dequantize, quantize_rows
from tests.support import run_ranks

H = 96


def exchanged(rows, received, sent):
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows, received, sent)
    return out


def one_rank(rank, world):
    """Everything that is compared; rows with values far apart, one of zeros, one not finite."""
    torch.manual_seed(rank)
    # Rank 0 sends 5 rows to itself; rank 1 sends 7 to rank 0 and 4 to itself.
    counts = [[5, 0], [7, 4]]
    sent, received = counts[rank], [counts[r][rank] for r in range(world)]
    x = (torch.randn(sum(sent), H) * 10.0 ** torch.randint(-4, 4, (sum(sent), 1))).bfloat16()
    x[0, 3:9] *= 1e-4
    x[1] = 0
    x[2, 5] = torch.inf
    arrived = exchanged(x, received, sent)
    dy = torch.randn(arrived.shape).bfloat16()
    found = {
        "arrived": arrived,
        "dy": exchanged(dy, sent, received),
        "shape": [sum(sent), sum(received)],
    }
    send, moved = dist.all_to_all_single, []

    def count(out, rows, *args, **kwargs):
        moved.append(rows.numel() * rows.element_size())
        return send(out, rows, *args, **kwargs)

    for grad in ("bf16", "fp8"):
        leaf = x.clone().requires_grad_()
        dist.all_to_all_single = count
        y = dispatch_rows(
            leaf, dist.group.WORLD, received, sent, ActivationConfig(expert_dispatch_grad=grad)
        )
        forward = sum(moved)
        moved.clear()
        y.backward(dy)
        dist.all_to_all_single = send
        found[grad] = (y.detach(), leaf.grad, forward, sum(moved))
        moved.clear()
    return found


def test_dispatch_rows_arrive_as_if_quantized_there():
    fmt = FORMATS["e4m3"]
    for found in run_ranks(2, one_rank):
        there = quantize_rows(found["arrived"], fmt, aligned=True)
        (sent, received), dy = found["shape"], found["dy"]
        for grad in ("bf16", "fp8"):
            y, dx, forward, backward = found[grad]
            assert torch.equal(y.nan_to_num(7), dequantize(there, torch.bfloat16).nan_to_num(7))
            again = quantize_rows(y, fmt, aligned=True)  # what the expert's block does
            assert torch.equal(dequantize(again).nan_to_num(7), dequantize(there).nan_to_num(7))
            assert forward == sent * (H + 4)  # a byte an element, and a scale a token; BF16: 2 H
            expected = (
                dy
                if grad == "bf16"
                else dequantize(quantize_rows(dy, fmt, aligned=True), torch.bfloat16)
            )
            assert torch.equal(dx, expected)
            assert backward == received * (2 * H if grad == "bf16" else H + 4)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"expert_dispatch": "fp8", "forward_scales": "tensor"},
            'expert_dispatch: got "fp8" with forward_scales',
        ),
        (
            {"expert_dispatch_grad": "fp8", "expert_dispatch": "bf16"},
            'expert_dispatch_grad: got "fp8" where tokens travel in BF16',
        ),
        (
            {"expert_dispatch_grad": "fp8", "forward_scales": "tensor"},
            'expert_dispatch_grad: got "fp8" where tokens travel in BF16',
        ),
    ],
)
def test_expert_dispatch_that_would_round_twice_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        ActivationConfig(**options)
