"""Which conversations share a sequence, what micro-batches hold, and what their losses are
divided by.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from launch.chat import batches as module
from launch.chat.batches import Sequences, micro_batches, pack
from tests.launch.chat.support import chat, make_tokenizer, prepared

LENGTHS = np.random.default_rng(0).integers(1, 33, 200)


def test_pack_holds_every_item_once_and_is_nearly_full():
    for capacity in (32, 33, 100):
        found = pack(LENGTHS, capacity)
        assert sorted(item for one in found for item in one) == list(range(200))
        sums = [int(LENGTHS[one].sum()) for one in found]
        assert max(sums) <= capacity and len(found) <= LENGTHS.sum() / capacity * 1.1 + 1
    assert pack(np.asarray([4, 3, 3, 2]), 6) == [[0, 3], [1, 2]]
    assert pack(np.asarray([], np.int64), 6) == []


def sequences(**options):
    conversations = SimpleNamespace(lengths=LENGTHS, trained=LENGTHS // 2)
    return Sequences(conversations, np.arange(0, 200, 2), **{"capacity": 40, "seed": 3, **options})


def test_epochs_hold_everything_once_in_orders_of_their_own(monkeypatch):
    made = sequences()
    epochs = [
        [made[e * made.per_epoch + place] for place in range(made.per_epoch)] for e in range(3)
    ]
    for epoch in epochs:
        assert sorted(n for one in epoch for n in one) == list(range(0, 200, 2))
    assert epochs[0] != epochs[1] != epochs[2]
    again = sequences()  # any position first: a restart
    assert again[2 * made.per_epoch] == epochs[2][0] and again[0] == epochs[0][0]
    assert sequences(seed=4)[0] != epochs[0][0] or sequences(seed=4)[1] != epochs[0][1]
    calls = []
    monkeypatch.setattr(module, "pack", lambda *given: calls.append(1) or pack(*given))
    made = sequences()
    # A step over the border.
    for position in (made.per_epoch - 1, made.per_epoch, made.per_epoch - 1, made.per_epoch):
        assert made[position]
    assert len(calls) == 2


def test_after_the_last_epoch_sequences_are_empty():
    made = sequences(epochs=1.5)
    assert made.end == -(-3 * made.per_epoch // 2) and made[made.end - 1] and made[made.end] == []
    assert made.trained(0, 10**3) == made.trained(0, made.end)
    assert made.tokens(made.end - 1, 10**3) == sum(LENGTHS[made[made.end - 1]])
    assert made.tokens(0, made.per_epoch) == sum(LENGTHS[::2])
    assert [made[p] for p in range(made.per_epoch)] == [
        sequences(epochs=None)[p] for p in range(made.per_epoch)
    ]


def test_without_packing_a_sequence_is_a_conversation():
    made = sequences(packed=False, seed=None)
    assert [made[p] for p in range(4)] == [[0], [2], [4], [6]] and made.per_epoch == 100


def test_the_log_describes_what_is_trained_of_an_epoch():
    quarter, several = sequences(packed=False, epochs=0.25), sequences(epochs=2.5)
    share = f"{100 * quarter.tokens(0, 25) / (25 * 40):.1f} % full"
    assert (
        quarter.describe("train")
        == f"train: 25 conversations in 25 sequences of 40 tokens, {share}"
    )
    assert several.describe("train").startswith(
        f"train: 100 conversations in {several.per_epoch} seq"
    )


@pytest.fixture
def stored(tmp_path):
    """Thirty conversations on disk."""
    words = [" ".join(["hello"] * int(n)) for n in np.random.default_rng(1).integers(1, 6, 30)]
    lines = [chat(f"user: q{n}", f"assistant: {w}") for n, w in enumerate(words)]
    return prepared(tmp_path, make_tokenizer(texts=["hello hello"] * 9), *lines)


def batches(stored, packed, dp=1, rank=0, micro=2, accumulation=2, consumed=0):
    made = Sequences(stored, np.arange(len(stored)), capacity=64, packed=packed, seed=0)
    return micro_batches(
        made,
        micro=micro,
        accumulation=accumulation,
        dp_rank=rank,
        dp_size=dp,
        pad=1,
        consumed=consumed,
    )


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_hold_conversations_whole(stored, packed):
    """Each document of a row is a conversation from its first token on, or padding without loss."""
    known = {tuple(stored[n][0].tolist()): stored[n][1] for n in range(len(stored))}
    seen, source = 0, batches(stored, packed)
    for _ in range(4):
        batch = next(source)
        assert (
            batch["tokens"].shape == ((1, 128) if packed else (2, 64))
            and batch["tokens"].dtype == torch.int64
        )
        if packed:
            assert batch["cu_seqlens"].dtype == torch.int32
            borders = batch["cu_seqlens"].tolist()
            assert borders[0] == 0 and borders[-1] == 128 and 64 in borders
            documents = [(0, slice(a, b)) for a, b in zip(borders, borders[1:], strict=False)]
        else:
            documents = [(row, slice(0, 64)) for row in range(2)]
        for row, part in documents:
            tokens, labels, mask, positions = (
                batch[k][row, part].tolist()
                for k in ("tokens", "labels", "loss_mask", "position_ids")
            )
            assert positions == list(range(len(tokens)))
            # "<|end|>" is 0, "\n" follows it.
            end = len(tokens) - tokens[::-1].index(0) + 1 if 0 in tokens else 0
            if not packed and end:
                assert set(tokens[end:]) <= {1} and not any(mask[end - 1 :])
                tokens = tokens[:end]
            if tokens and tokens[0] != 1:
                learnt = known[tuple(tokens)]
                assert labels[: len(tokens) - 1] == tokens[1:]
                assert (
                    mask[: len(tokens) - 1] == learnt[1:].astype(float).tolist()
                    and mask[len(tokens) - 1] == 0
                )
                seen += 1
            else:
                assert not any(mask)
    assert seen >= 8


@pytest.mark.parametrize("packed", [True, False])
def test_ranks_share_a_step_and_know_its_tokens(stored, packed):
    """The same step cut into 1 x 8, 8 x 1 and 2 ranks x 2 x 2: the same targets, divided so that
    sums agree.
    """
    found = []
    for dp, micro, accumulation in ((1, 8, 1), (1, 1, 8), (2, 2, 2)):
        taken, total = [], 0.0
        for rank in range(dp):
            source = batches(stored, packed, dp, rank, micro, accumulation)
            for _ in range(accumulation):
                batch = next(source)
                trained = batch["loss_mask"].bool()
                keys = ("tokens", "labels", "position_ids")
                taken += zip(*(batch[k][trained].tolist() for k in keys), strict=True)
                # DeepSpeed divides by the micro-batches of a step and by the ranks.
                total += float(batch["loss_mask"].sum() / batch["loss_tokens"]) / accumulation / dp
        assert total == pytest.approx(1.0, abs=1e-6)
        found.append(sorted(taken))
    assert found[0] == found[1] == found[2]


def test_a_restart_continues_with_the_sequences_to_come(stored):
    straight, later = batches(stored, True), batches(stored, True, consumed=4 * 3)
    for _ in range(3 * 2):
        next(straight)
    for _ in range(5):
        a, b = next(straight), next(later)
        assert all(torch.equal(a[k], b[k]) for k in a)
