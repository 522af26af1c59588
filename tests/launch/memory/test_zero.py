"""What the planner says that a rank holds, against engines: to the byte but for activations."""

import pytest

from launch.memory.zero import states
from tests.launch.memory.engines import MODEL, kept_for_backward, measured, planned, settings_of
from tests.support import run_ranks, slow

FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
WITH_REMAINDERS = {"optimizer": {"master_weights": "bf16_remainder"}}
OLMO2 = {"norm_placement": "post", "qk_norm": "full"}
REMAINDER = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
}


def compare(model, settings, tp=1, recompute=None):
    run = planned(model, settings, 2 // tp, tp, recompute)
    found = states(run)
    expected = {
        "parameters": found.weights,
        "master weights": found.master,
        "optimizer moments": found.moments,
        # ZeRO-1 with fp32 sums keeps those in BF16, too.
        "gradients": found.gradients + 2 * found.elements * run.fp32_gradients_whole,
    }
    ranks = run_ranks(2, measured, model, settings, tp, recompute)
    for name, size in expected.items():
        assert max(row[name] for row in ranks) == size, name
    if run.stage == 3:  # what DeepSpeed allocates while it builds the engine, and keeps
        assert {row["gradients of this rank's share"] for row in ranks} == {found.gradients}
    for row in ranks:
        assert row["activations"] == pytest.approx(kept_for_backward(run), rel=0.001)


@pytest.mark.parametrize(
    ("stage", "coat", "more", "tp"),
    [
        *((1, {}, {}, 1), (1, {}, FP32, 1), (2, {}, FP32, 1), (3, {}, FP32, 1), (2, {}, FP32, 2)),
        *(slow(1, None, {}, 1), slow(2, None, FP32, 1), slow(3, None, FP32, 1), slow(1, {}, {}, 2)),
        *(
            slow(3, {}, FP32, 2),
            slow(1, None, {}, 2),
            slow(2, None, FP32, 2),
            slow(3, None, FP32, 2),
        ),
    ],
)
def test_stages(stage, coat, more, tp) -> None:
    compare(MODEL, settings_of(stage, coat, **more), tp)


@pytest.mark.parametrize(
    ("stage", "changes", "coat", "more"),
    [
        (
            2,
            {"num_query_groups": 2, "tie_embeddings": True},
            {"activation": {"attention": "fp8"}},
            FP32,
        ),
        (2, {"norm_affine": False, "normalization": "layernorm"}, None, FP32),
        slow(
            2, {"activation": "gelu", "normalization": "layernorm", "linear_bias": True}, {}, FP32
        ),
        (
            2,
            {},
            {
                "activation": {
                    "loss": "plain",
                    "bf16_layers": [0, -1],
                    "group_size": 16,
                    "scale": "bf16",
                }
            },
            FP32,
        ),
        (2, {}, WITH_REMAINDERS, REMAINDER),
        (2, {}, WITH_REMAINDERS, REMAINDER | FP32),
        (3, {}, WITH_REMAINDERS, REMAINDER | FP32),
        (2, OLMO2, {}, FP32),
        slow(2, OLMO2, None, FP32),
        slow(
            2, {"norm_placement": "post", "normalization": "layernorm", "qkv_bias": True}, {}, FP32
        ),
        slow(2, {"qk_norm": True, "num_query_groups": 2}, {}, FP32),
        slow(2, {"qk_norm": True, "num_query_groups": 2}, None, FP32),
    ],
)
def test_models_and_options(stage, changes, coat, more) -> None:
    compare({**MODEL, **changes}, settings_of(stage, coat, **more))


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
BLOCK = FULL | {"recompute_method": "block", "recompute_num_layers": 2}


@pytest.mark.slow
@pytest.mark.parametrize("coat", [{}, None])
@pytest.mark.parametrize(
    "recompute", [FULL, BLOCK, SELECTIVE, SELECTIVE | {"recompute_modules": ["core_attn"]}]
)
def test_recomputation(coat, recompute) -> None:
    compare(MODEL, settings_of(2, coat, **FP32), recompute=recompute)
