"""A program's whole way with a small model: training near BF16, and what it evaluates,
generates, saves and loads.
"""

import pytest
import torch

from tests.support import run_ranks

from .test_parallel import config
from .tiny import tiny, tokens

FAMILIES = {name: (name, {}) for name in ("llama", "mistral", "qwen2", "qwen3", "olmo2")}
FAMILIES["tied llama"] = "llama", {"tie_word_embeddings": True}


def padded(ids, step):
    """Ids with nothing padded, or the first row at its left and the second at its right; and
    their mask.
    """
    mask = torch.ones_like(ids)
    if step % 2:
        mask[0, :6] = mask[1, -5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def whole_way(rank, world, stage, families, folder):
    import deepspeed
    from transformers import AutoModelForCausalLM

    found = {}
    for family in families:
        name, changes = FAMILIES[family]
        curves = []
        for block in (False, True):
            model = tiny(name, torch.bfloat16, **changes)
            keys, tied = (
                list(model.state_dict()),
                model.lm_head.weight is model.model.embed_tokens.weight,
            )
            coat = (
                {"coat": {"activation": {"fp8_weight_gather": True}}} if block else {"coat": None}
            )
            adamw = {"type": "CoatAdamW" if block else "AdamW", "params": {"lr": 1e-3}}
            adamw["params"] |= {} if block else {"torch_adam": True}
            settings = {
                k: v for k, v in config(stage, optimizer=adamw, **coat).items() if v is not None
            }
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=settings
            )
            curves.append([])
            for step in range(20):
                given = padded(tokens(seed=step % 4 * world + rank), step)
                labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
                loss = engine(**given, labels=labels).loss
                engine.backward(loss)
                engine.step()
                curves[-1].append(loss.item())
        model = engine.module.eval()
        state = engine._zero3_consolidated_16bit_state_dict() if stage == 3 else model.state_dict()
        if rank == 0:
            assert list(state) == keys, family
            model.save_pretrained(f"{folder}/{family}", state_dict=state)
        torch.distributed.barrier()
        loaded = AutoModelForCausalLM.from_pretrained(
            f"{folder}/{family}", dtype=torch.bfloat16
        ).eval()
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        with torch.no_grad():
            logits = [
                [m(**padded(tokens(), step)).logits for step in range(2)] for m in (model, loaded)
            ]
        asked = {**padded(tokens(length=12), 1), "max_new_tokens": 6, "do_sample": False}
        texts = [
            m.generate(**asked, synced_gpus=m is model and stage == 3) for m in (model, loaded)
        ]
        same = all(
            torch.equal(a, b) for a, b in zip(logits[0], logits[1], strict=True)
        ) and torch.equal(*texts)
        found[family] = (
            same,
            max(abs(a / b - 1) for a, b in zip(*curves, strict=True)),
            curves[1][-1] / curves[1][0],
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_training_saving_and_generation_under_zero(stage, tmp_path):
    for found in run_ranks(2, whole_way, stage, list(FAMILIES), str(tmp_path)):
        for family, (same, difference, fell) in found.items():
            assert same and difference < 0.04 and fell < 0.98, (family, same, difference, fell)
