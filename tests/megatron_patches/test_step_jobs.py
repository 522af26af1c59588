"""What Megatron's schedules and ``finalize_model_grads`` do around micro-batches, however an engine is driven."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
import torch

from megatron_patches import gpt_layer_spec
from tests.support import run_ranks

from .test_pipeline_engine import stage_of
from .tiny import NARROW, tiny_batch, tiny_config, tiny_gpt

EXPERTS: dict[str, Any] = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64, **NARROW)
LOSSES: dict[str, dict[str, Any]] = {
    "aux": dict(EXPERTS, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1.0),
    "z": dict(EXPERTS, moe_router_load_balancing_type="none", moe_z_loss_coeff=0.1),
    "global": dict(EXPERTS, moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=1.0),
    "next tokens": dict(NARROW, mtp_num_layers=1, mtp_loss_scaling_factor=1.0),
}
BIAS: dict[str, Any] = dict(
    EXPERTS,
    moe_router_load_balancing_type="none",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=1e-2,
)


def settings(steps: int, enabled: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "CoatAdamW", "params": {"lr": 1e-3}},
        "coat": {"activation": {"enabled": enabled}},
        **more,
    }


def start(stages: int = 1) -> Any:

    import megatron_patches as mp

    mp.initialize_model_parallel(1, pipeline_model_parallel_size=stages, seed=1)
    return mp


def model(**changes: Any) -> Any:
    if "mtp_num_layers" not in changes:
        return tiny_gpt(**changes)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    config = tiny_config(**changes)
    layer = gpt_layer_spec(config).submodules.layer_specs[-1]
    spec = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    return tiny_gpt(**changes, gpt={"mtp_block_spec": spec})


def forward_step(batches: Any, net: Any) -> Any:
    tokens, labels, positions = next(batches)
    return net(tokens, positions, None, labels=labels), lambda losses: (losses.mean(), {})


def by_hand(engine: Any, number: int = 0) -> None:
    tokens, labels, positions = tiny_batch(number, "cpu")
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(tokens, positions, None, labels=labels).mean())
        engine.step()


def by_loss(engine: Any) -> None:
    """A program that calls ``backward`` on the loss, which DeepSpeed divides."""
    tokens, labels, positions = tiny_batch(0, "cpu")
    for _ in range(engine.gradient_accumulation_steps()):
        engine(tokens, positions, None, labels=labels).mean().backward()
        engine.step()


def by_schedule(engine: Any) -> None:
    import megatron_patches as mp

    mp.train_batch(engine, (tiny_batch(0, "cpu") for _ in range(100)), forward_step)


def norms(rank: int, world: int, case: str) -> dict[Any, float]:
    """Gradient norms of equal micro-batches; the order leaves each engine what the one before has left."""
    mp, found = start(), {}
    drivers = {"by hand": by_hand, "by loss": by_loss, "by schedule": by_schedule}
    for steps in (4, 1):
        for name, drive in drivers.items():
            for enabled in (False, True) if name == "by hand" and case != "next tokens" else (False,):
                engine, *_ = mp.initialize(model=model(**LOSSES[case]), config=settings(steps, enabled))
                drive(engine)
                found[name, enabled, steps] = float(engine.get_global_grad_norm())
    return found


@pytest.mark.parametrize("case", LOSSES)
def test_losses_inside_backward_count_once(case):
    (found,) = run_ranks(1, norms, case)
    for (name, enabled, steps), norm in found.items():
        assert norm == pytest.approx(found[name, enabled, 1], rel=1e-3), (name, enabled, steps)
        assert norm == pytest.approx(found["by hand", enabled, 1], rel=1e-3), (name, enabled, steps)


def interleaved(rank: int, world: int) -> list[float]:
    """The gradient norm of an engine, with the backward of another one between its forward and its backward.

    Before all, a model without an engine runs backward: its scale is a tensor of no dimension.
    """
    mp, found = start(), []
    tokens, labels, positions = tiny_batch(0, "cpu")
    model(**LOSSES["aux"])(tokens, positions, None, labels=labels).mean().backward()
    for between in (False, True):
        engine, *_ = mp.initialize(model=model(**LOSSES["aux"]), config=settings(1))
        other, *_ = mp.initialize(model=model(**LOSSES["aux"]), config=settings(8))
        tokens, labels, positions = tiny_batch(0, "cpu")
        loss = engine(tokens, positions, None, labels=labels).mean()
        if between:
            other.backward(other(tokens, positions, None, labels=labels).mean())
        engine.backward(loss)
        engine.step()
        found.append(float(engine.get_global_grad_norm()))
    return found


def test_engines_do_not_share_a_scale():
    alone, beside = run_ranks(1, interleaved)[0]
    assert alone == beside


def balanced(rank: int, world: int) -> list[Any]:
    """Biases and counts after a step of two micro-batches on two data-parallel ranks, by each way of driving."""
    mp, found = start(), []
    for drive in (by_hand, by_schedule):
        engine, *_ = mp.initialize(model=model(**BIAS), config=settings(2))
        router = engine.module.decoder.layers[0].mlp.router
        assert router.expert_bias.dtype == torch.float32, "a checkpoint that is loaded now would be rounded"
        drive(engine)
        counts = router.local_tokens_per_expert.tolist()
        moved = router.expert_bias.tolist()
        engine.eval()
        with torch.no_grad():
            engine(*(tiny_batch(0, "cpu")[i] for i in (0, 2)), None)
        found.append((moved, counts, router.local_tokens_per_expert.tolist()))
    return found


def test_the_bias_of_routers_moves_with_each_step():
    ranks = run_ranks(2, balanced)
    for moved, counts, evaluated in ranks[0]:
        assert all(abs(abs(x) - 1e-2) < 1e-4 or x == 0 for x in moved) and any(moved), moved
        assert not any(counts) and not any(evaluated), "counts are of one step, without evaluations"
    assert ranks[0] == ranks[1] and ranks[0][0][0] == ranks[0][1][0]


def counted(rank: int, world: int) -> list[float]:
    mp, found = start(), []
    engine, *_ = mp.initialize(model=model(**LOSSES["global"]), config=settings(2))
    router = engine.module.decoder.layers[0].mlp.router
    for _ in range(2):
        tokens, labels, positions = tiny_batch(0, "cpu")
        for _ in range(2):
            engine.backward(engine(tokens, positions, None, labels=labels).mean())
            found.append(float(router.ga_steps))
            engine.step()
    return [*found, float(router.ga_steps)]


def test_global_aux_loss_counts_one_step():
    assert run_ranks(1, counted)[0] == [1, 2, 1, 2, 0]


def refused(rank: int, world: int) -> list[str]:
    mp, found = start(), []
    import coat_dist

    for change in (dict(calculate_per_token_loss=True), dict(finalize_model_grads_func=print)):
        net = model(**EXPERTS, **change)
        for initialize in (mp.initialize, coat_dist.initialize):
            try:
                initialize(model=net, config=settings(1))
            except coat_dist.CoatConfigError as error:
                found.append(str(error))
    return found


def test_what_only_a_schedule_can_honour_is_refused():
    per_token, _, function, _ = found = run_ranks(1, refused)[0]
    assert found[0] == found[1] and found[2] == found[3]
    assert per_token.startswith("config.calculate_per_token_loss: got True, accepted: False under DeepSpeed")
    assert function.startswith("config.finalize_model_grads_func: got a function, accepted: None under DeepSpeed")


def staged(rank: int, world: int) -> list[float]:
    from megatron.core import parallel_state

    found = []
    for stages in (1, 2):
        mp = start(stages)
        changes = dict(LOSSES["aux"], num_layers=4)
        whole = tiny_gpt(**changes)
        net = whole if stages == 1 else stage_of(whole, 2, rank, **changes)
        config = settings(4, zero_optimization={"stage": 1}, data_types={})
        engine, *_ = mp.initialize(model=net, config=config, dist_init_required=False)
        by_schedule(engine)
        found.append(float(engine.get_global_grad_norm()))
        if stages == 1:
            parallel_state.destroy_model_parallel()
    return found


def test_one_and_two_stages_have_the_same_gradients():
    for one, two in run_ranks(2, staged):
        assert two == pytest.approx(one, rel=1e-2)


HANDLED = {
    # finalize_model_grads
    "finish_grad_sync": "DeepSpeed reduces gradients",
    "_allreduce_conditional_embedding_grads": "of diffusion models, which gpt_layer_spec does not build",
    "_allreduce_non_tensor_model_parallel_grads": "replicated_grads.py",
    "_allreduce_word_embedding_grads": "pipeline.py, of tied embeddings",
    "_allreduce_position_embedding_grads": "of encoders and decoders on different stages",
    "_allreduce_embedding_grads": "pipeline.py, of tied embeddings",
    "_allreduce_layernorm_grads": "replicated_grads.py",
    "_update_router_expert_bias": "step_jobs.py",
    "reset_model_temporary_tensors": "step_jobs.py",
    "scale_gradients": "calculate_per_token_loss is refused",
    "broadcast": "calculate_per_token_loss is refused",
    # forward_step_calc_loss
    "set_loss_scale": "step_jobs.py",
    "loss_func": "the program's own",
    "grad_scale_func": "refused",
    # forward_step
    "forward_step_calc_loss": "above",
    "forward_step_func": "the program's own",
    "set_input_tensor": "of stages: the schedule runs",
    "set_is_first_microbatch": "of modules of Transformer Engine",
    "set_current_microbatch": "of Megatron's CUDA graphs",
}
NEUTRAL = {
    *("timers", "start", "stop", "get_model_config", "hasattr", "getattr", "isinstance", "len", "append", "clamp"),
    *("get_tensor_model_parallel_group", "get_pipeline_model_parallel_group", "get_embedding_group", "all_reduce"),
    *("get_position_embedding_group", "get_data_parallel_group", "get_pp_last_rank", "ones", "tensor", "float", "item"),
    *("get_context_parallel_world_size", "is_pipeline_last_stage", "get_attr_wrapped_model", "get_autocast_context"),
    *("nullcontext", "autocast", "is_pp_last_stage", "get_pg_size", "get_model_type", "get_model_xattn", "callable"),
}


def test_nothing_else_happens_there():
    """A call that a new Megatron adds to these functions needs its place here."""
    import importlib

    from megatron.core.pipeline_parallel import schedules

    finalizing = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    functions = [finalizing.finalize_model_grads, schedules.forward_step_calc_loss, schedules.forward_step]
    called = set()
    for function in functions:
        for node in ast.walk(ast.parse(inspect.getsource(function))):
            if isinstance(node, ast.Call):
                called.add(getattr(node.func, "attr", getattr(node.func, "id", "a call of a call")))
    assert called - NEUTRAL - {"a call of a call"} <= HANDLED.keys(), called - NEUTRAL - HANDLED.keys()
    assert {"_update_router_expert_bias", "set_loss_scale"} <= called
