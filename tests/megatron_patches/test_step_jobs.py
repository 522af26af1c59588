"""What Megatron's schedules and ``finalize_model_grads`` do around micro-batches, however an
engine is driven.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatron_patches as mp
from tests.support import run_ranks

from .test_pipeline_engine import build, forward_step
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
    mp.train_batch(engine, (BATCH for _ in range(100)), forward_step)


def losses_count_once(rank: int, world: int, case: str) -> None:
    """Gradient norms of equal micro-batches; the order leaves each engine what the one before
    has left.
    """
    start(seed=1)
    found = {}
    for steps in (4, 1):
        for drive, enabled in (
            (by_hand, False),
            (by_hand, True),
            (by_loss, False),
            (by_schedule, False),
        ):
            if not (enabled and case == "next tokens"):
                engine, *_ = mp.initialize(
                    model=model(**LOSSES[case]), config=settings(steps, enabled)
                )
                drive(engine)
                found[drive, enabled, steps] = float(engine.get_global_grad_norm())
    for way, norm in found.items():
        assert norm == pytest.approx(found[by_hand, way[1], 1], rel=1e-3), way


@pytest.mark.parametrize("case", LOSSES)
def test_losses_inside_backward_count_once(case):
    run_ranks(1, losses_count_once, case)


def interleaved(rank: int, world: int) -> None:
    """The gradient norm of an engine is the same with the backward of another one between its
    forward and its backward.

    Before all, a model without an engine runs backward: its scale is a tensor of no dimension.
    """
    start(seed=1)
    found = []
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
    assert found[0] == found[1]


def test_engines_do_not_share_a_scale():
    run_ranks(1, interleaved)


def balanced(rank: int, world: int) -> list[float]:
    """Biases after a step of two micro-batches on two data-parallel ranks, by each way of
    driving.
    """
    start(seed=1)
    found = []
    for drive in (by_hand, by_schedule):
        engine, *_ = mp.initialize(model=model(**BIAS), config=settings(2))
        router = engine.module.decoder.layers[0].mlp.router
        # A checkpoint that is loaded now would be rounded otherwise.
        assert router.expert_bias.dtype == torch.float32
        drive(engine)
        moved = router.expert_bias.tolist()
        assert all(abs(abs(x) - 1e-2) < 1e-4 or x == 0 for x in moved) and any(moved), moved
        assert not router.local_tokens_per_expert.any(), "counts are of one step"
        engine.eval()
        with torch.no_grad():
            engine(BATCH[0], BATCH[2], None)
        assert not router.local_tokens_per_expert.any(), "without evaluations"
        found.append(moved)
    assert found[0] == found[1]
    engine, *_ = mp.initialize(model=model(**LOSSES["global"]), config=settings(2))
    router, steps = engine.module.decoder.layers[0].mlp.router, []
    for _ in range(4):
        engine.backward(labelled_loss(engine, BATCH))
        steps.append(float(router.ga_steps))
        engine.step()
    assert [*steps, float(router.ga_steps)] == [1, 2, 1, 2, 0]  # global_aux_loss
    return found[0]


def test_step_jobs_move_the_bias_of_routers():
    first, second = run_ranks(2, balanced)
    assert first == second


def refused(rank: int, world: int) -> None:
    import coat_dist

    start(seed=1)
    for said, change in (
        ("calculate_per_token_loss: got True, accepted: False", {"calculate_per_token_loss": True}),
        (
            "finalize_model_grads_func: got a function, accepted: None",
            {"finalize_model_grads_func": print},
        ),
    ):
        net = model(**EXPERTS, **change)
        for initialize in (mp.initialize, coat_dist.initialize):
            with pytest.raises(coat_dist.CoatConfigError, match=f"^config.{said}"):
                initialize(model=net, config=settings(1))


def test_step_jobs_refuse_fields_of_schedules():
    run_ranks(1, refused)


def staged(rank: int, world: int) -> None:
    found = []
    for stages in (1, 2):
        config = settings(4, stage=1) | {"data_types": {}}
        net = build(rank, stages, **LOSSES["aux"])
        engine, *_ = mp.initialize(model=net, config=config, dist_init_required=False)
        by_schedule(engine)
        found.append(float(engine.get_global_grad_norm()))
    assert found[1] == pytest.approx(found[0], rel=1e-2)


def test_one_and_two_stages_have_the_same_gradients():
    run_ranks(2, staged)
