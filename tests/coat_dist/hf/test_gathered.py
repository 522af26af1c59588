"""ZeRO-3 gathers weights of transformers models as codes while they train: half the bytes, equal
bits, nothing kept.
"""

import pytest
import torch

from tests.support import run_ranks, slow
from tests.support.gathers import AHEAD, KEPT, LET_GO, check_gathered, compared

from .test_parallel import config
from .tiny import tiny, tokens

CASES = {
    "llama": (LET_GO, {}),
    "olmo2": (LET_GO, {}),
    "qwen2": (KEPT, {}),
    "phi3": (AHEAD, {}),
    "mistral": (LET_GO, {"forward_scales": "tensor", "forward": "quantized"}),
    # Keys and values stay whole.
    "qwen3": (LET_GO | {"stage3_param_persistence_threshold": 3000}, {}),
    "llama, checkpointed": (LET_GO, {}),
    "olmo2, checkpointed": (AHEAD, {}),
    "olmo2, with adapters": (LET_GO, {}),
    "llama, with adapters": (LET_GO, {}),
    "smollm3, with adapters": (LET_GO, {}),
    "llama, with adapters that read weights": (KEPT, {}),
}


def built(case, gather):
    import deepspeed

    name, zero, activation = case.split(",")[0], *CASES[case]
    model = tiny(name, torch.bfloat16, pad_token_id=None, num_hidden_layers=3)
    # Parts of a product with other scales alone, and subnormal codes together.
    for key, p in model.named_parameters():
        if "k_proj.weight" in key or "up_proj.weight" in key:
            p.data.mul_(2.0**-7)
    if "checkpointed" in case:
        model.gradient_checkpointing_enable({"use_reentrant": name == "olmo2"})
    if "adapters" in case:
        from .test_adapters import adapted

        model = adapted(model, use_dora="read weights" in case).to(torch.bfloat16)
    settings = config(3, gradient_accumulation_steps=2)
    settings["zero_optimization"] |= zero
    settings["coat"] = {"activation": {"fp8_weight_gather": gather, **activation}, "optimizer": {}}
    return deepspeed.initialize(model=model, config=settings)[0]


def micro_batch(engine, ids):
    """Its loss; weights are let go as backward goes, where they are to be."""
    loss, here = engine(input_ids=ids, labels=ids, use_cache=False).loss, set()
    layers = next(m.layers for m in engine.module.modules() if hasattr(m, "layers"))

    def look(_):
        for i, layer in enumerate(layers):
            if any(
                p.ds_status.name == "AVAILABLE" and not p.ds_persist for p in layer.parameters()
            ):
                here.add(i)

    trained = next(p for p in layers[0].mlp.parameters() if p.requires_grad)
    hook = trained.register_hook(look)
    engine.backward(loss)
    hook.remove()
    engine.step()
    if engine.zero_max_reuse_distance() == 0 and engine.zero_prefetch_bucket_size() == 0:
        assert here == {0}, here
    return loss.item()


def without_training(engine, model):
    """What is read as values: in evaluation, in training mode without gradients, and past the
    engine.
    """
    engine.eval()
    with torch.no_grad():
        found = [
            engine(input_ids=tokens()).logits,
            model.generate(tokens(length=4), max_new_tokens=3, do_sample=False),
        ]
    engine.train()
    with torch.no_grad():
        found += [engine(input_ids=tokens()).logits]
    ids = tokens()
    engine(input_ids=ids, labels=ids)  # whose weights stay, without a backward
    with torch.no_grad():
        found += [
            model.get_decoder()(input_ids=ids).last_hidden_state,
            engine(input_ids=ids).logits,
        ]
    return found


def trained(rank, world, cases):
    def train(engine, steps):
        seen = [micro_batch(engine, tokens(seed=2 * i + rank)) for i in range(steps)]
        if steps > 1:
            for read in without_training(engine, engine.module):
                assert read.isfinite().all()
                seen.append(read.tolist())
            seen += [micro_batch(engine, tokens(seed=2 * i + rank)) for i in range(steps)]
        return seen

    return compared(cases, built, train)


def expected(case):
    # Checkpoints need both layouts at once.
    return 0.5 if CASES[case][0] == LET_GO and "checkpointed" not in case else None


SHORT = ["llama", "olmo2"]


@pytest.mark.parametrize(
    "cases",
    [SHORT, slow([case for case in CASES if case not in SHORT])],
)
def test_fp8_weight_gather_trains_to_the_same_bits(cases):
    for found in run_ranks(2, trained, cases):
        check_gathered(found, expected)
