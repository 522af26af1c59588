"""What Megatron's schedules and ``finalize_model_grads`` do around micro-batches, however an
engine is driven.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_patches as mp
from tests.support import run_ranks

from .test_pipeline_engine import build
from .tiny import NARROW, labelled_loss, tiny_batch, tiny_config, tiny_gpt
from .training import engine_config, start

EXPERTS: dict[str, Any] = dict(
    num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64, **NARROW
)
LOSSES: dict[str, dict[str, Any]] = {
    "aux": dict(EXPERTS, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1.0),
    "z": dict(EXPERTS, moe_router_load_balancing_type="none", moe_z_loss_coeff=0.1),
    "global": dict(
        EXPERTS, moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=1.0
    ),
    "next tokens": dict(NARROW, mtp_num_layers=1, mtp_loss_scaling_factor=1.0),
}
BIAS: dict[str, Any] = dict(
    EXPERTS,
    moe_router_load_balancing_type="none",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=1e-2,
)
BATCH = tiny_batch(0, "cpu")


def settings(steps: int, enabled: bool = False, stage: int = 2) -> dict[str, Any]:
    coat = {"activation": {"enabled": enabled}}
    return engine_config(stage, gradient_accumulation_steps=steps, gradient_clipping=0, coat=coat)


def model(**changes: Any) -> Any:
    if "mtp_num_layers" not in changes:
        return tiny_gpt(**changes)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    config = tiny_config(**changes)
    layer = mp.gpt_layer_spec(config).submodules.layer_specs[-1]
    spec = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    return tiny_gpt(**changes, gpt={"mtp_block_spec": spec})


def by_hand(engine: Any) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(labelled_loss(engine, BATCH))
        engine.step()


def by_loss(engine: Any) -> None:
    """A program that calls ``backward`` on the loss, which DeepSpeed divides."""
    for _ in range(engine.gradient_accumulation_steps()):
        labelled_loss(engine, BATCH).backward()
        engine.step()


def by_schedule(engine: Any) -> None:
    def forward_step(batches: Any, net: Any) -> Any:
        tokens, labels, positions = next(batches)
        return net(tokens, positions, None, labels=labels), lambda losses: (losses.mean(), {})

    mp.train_batch(engine, (BATCH for _ in range(100)), forward_step)


def norms(rank: int, world: int, case: str) -> dict[Any, float]:
    """Gradient norms of equal micro-batches; the order leaves each engine what the one before
    has left.
    """
    start(seed=1)
    found = {}
    for steps in (4, 1):
        for drive in (by_hand, by_loss, by_schedule):
            for enabled in (
                (False, True) if drive is by_hand and case != "next tokens" else (False,)
            ):
                engine, *_ = mp.initialize(
                    model=model(**LOSSES[case]), config=settings(steps, enabled)
                )
                drive(engine)
                found[drive.__name__, enabled, steps] = float(engine.get_global_grad_norm())
    return found


@pytest.mark.parametrize("case", LOSSES)
def test_losses_inside_backward_count_once(case):
    (found,) = run_ranks(1, norms, case)
    for (name, enabled, steps), norm in found.items():
        assert norm == pytest.approx(found["by_hand", enabled, 1], rel=1e-3), (name, enabled, steps)


def interleaved(rank: int, world: int) -> list[float]:
    """The gradient norm of an engine, with the backward of another one between its forward and its
    backward.

    Before all, a model without an engine runs backward: its scale is a tensor of no dimension.
    """
    start(seed=1)
    found: list[Any] = []
    labelled_loss(model(**LOSSES["aux"]), BATCH).backward()
    for between in (False, True):
        engine, *_ = mp.initialize(model=model(**LOSSES["aux"]), config=settings(1))
        other, *_ = mp.initialize(model=model(**LOSSES["aux"]), config=settings(8))
        loss = labelled_loss(engine, BATCH)
        if between:
            other.backward(labelled_loss(other, BATCH))
        engine.backward(loss)
        engine.step()
        found.append(float(engine.get_global_grad_norm()))
    return found


def test_engines_do_not_share_a_scale():
    alone, beside = run_ranks(1, interleaved)[0]
    assert alone == beside


def balanced(rank: int, world: int) -> list[Any]:
    """Biases and counts after a step of two micro-batches on two data-parallel ranks, by each
    way of driving.
    """
    start(seed=1)
    found: list[Any] = []
    for drive in (by_hand, by_schedule):
        engine, *_ = mp.initialize(model=model(**BIAS), config=settings(2))
        router = engine.module.decoder.layers[0].mlp.router
        assert router.expert_bias.dtype == torch.float32, (
            "a checkpoint that is loaded now would be rounded"
        )
        drive(engine)
        counts, moved = router.local_tokens_per_expert.tolist(), router.expert_bias.tolist()
        engine.eval()
        with torch.no_grad():
            engine(BATCH[0], BATCH[2], None)
        found.append((moved, counts, router.local_tokens_per_expert.tolist()))
    engine, *_ = mp.initialize(model=model(**LOSSES["global"]), config=settings(2))
    router, steps = engine.module.decoder.layers[0].mlp.router, []
    for _ in range(4):
        engine.backward(labelled_loss(engine, BATCH))
        steps.append(float(router.ga_steps))
        engine.step()
    return [*found, [*steps, float(router.ga_steps)]]


def test_step_jobs_move_the_bias_of_routers():
    first, second = run_ranks(2, balanced)
    for moved, counts, evaluated in first[:2]:
        assert all(abs(abs(x) - 1e-2) < 1e-4 or x == 0 for x in moved) and any(moved), moved
        assert not any(counts) and not any(evaluated), "counts are of one step, without evaluations"
    assert first == second and first[0][0] == first[1][0]
    assert first[2] == [1, 2, 1, 2, 0]  # global_aux_loss


def refused(rank: int, world: int) -> list[str]:
    import coat_dist

    start(seed=1)
    found: list[Any] = []
    for change in (dict(calculate_per_token_loss=True), dict(finalize_model_grads_func=print)):
        net = model(**EXPERTS, **change)
        for initialize in (mp.initialize, coat_dist.initialize):
            try:
                initialize(model=net, config=settings(1))
            except coat_dist.CoatConfigError as error:
                found.append(str(error))
    return found


def test_step_jobs_refuse_fields_of_schedules():
    per_token, again, function, once_more = run_ranks(1, refused)[0]
    assert per_token == again and function == once_more
    assert per_token.startswith("config.calculate_per_token_loss: got True, accepted: False")
    assert function.startswith("config.finalize_model_grads_func: got a function, accepted: None")


def staged(rank: int, world: int) -> list[float]:
    found = []
    for stages in (1, 2):
        net, config = (
            build(rank, stages, **LOSSES["aux"]),
            settings(4, stage=1) | {"data_types": {}},
        )
        engine, *_ = mp.initialize(model=net, config=config, dist_init_required=False)
        by_schedule(engine)
        found.append(float(engine.get_global_grad_norm()))
    return found


def test_one_and_two_stages_have_the_same_gradients():
    for one, two in run_ranks(2, staged):
        assert two == pytest.approx(one, rel=1e-2)
