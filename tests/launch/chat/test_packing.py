"""Which conversations share a sequence, what micro-batches hold, and what their losses are divided by."""

import json
import shutil

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from launch.chat import packing
from launch.chat.batches import Layout, micro_batches
from launch.chat.packing import Sequences, pack
from launch.chat.plan import Held, _about
from launch.chat.store import Conversations, Reading, prepare
from launch.chat.template import ChatTemplate
from launch.prep import DataError
from tests.launch.chat.support import chat, make_tokenizer

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
    options = {"capacity": 40, "seed": 3, **options}
    return Sequences(LENGTHS, LENGTHS // 2, np.arange(0, 200, 2), **options)


def test_epochs_hold_everything_once_in_orders_of_their_own():
    made = sequences()
    epochs = [[made[e * made.per_epoch + place] for place in range(made.per_epoch)] for e in range(3)]
    for epoch in epochs:
        assert sorted(n for one in epoch for n in one) == list(range(0, 200, 2))
    assert epochs[0] != epochs[1] != epochs[2]
    again = sequences()  # any position first: a restart
    assert again[2 * made.per_epoch] == epochs[2][0] and again[0] == epochs[0][0]
    assert sequences(seed=4)[0] != epochs[0][0] or sequences(seed=4)[1] != epochs[0][1]


def test_after_the_last_epoch_sequences_are_empty():
    made = sequences(epochs=1.5)
    assert made.end == -(-3 * made.per_epoch // 2) and made[made.end - 1] and made[made.end] == []
    assert made.trained(0, 10**3) == made.trained(0, made.end)
    assert made.tokens(made.end - 1, 10**3) == sum(LENGTHS[made[made.end - 1]])
    assert made.tokens(0, made.per_epoch) == sum(LENGTHS[::2])
    assert [made[p] for p in range(made.per_epoch)] == [sequences(epochs=None)[p] for p in range(made.per_epoch)]


def test_what_is_told_of_an_epoch_is_what_is_trained_of_it(monkeypatch):
    """Of less than an epoch its part, of several one."""
    quarter = Held(conversations=None, sequences=sequences(packed=False, epochs=0.25))
    share = f"{100 * quarter.sequences.tokens(0, 25) / (25 * 40):.1f} % full"
    assert _about(quarter, "train", 40) == f"train: 25 conversations in 25 sequences of 40 tokens, {share}"
    several = Held(conversations=None, sequences=sequences(epochs=2.5))
    assert _about(several, "train", 40).startswith(f"train: 100 conversations in {several.sequences.per_epoch} seq")
    made = sequences(epochs=3)
    calls = []
    monkeypatch.setattr(packing, "pack", lambda *given: calls.append(1) or pack(*given))
    for position in (made.per_epoch - 1, made.per_epoch, made.per_epoch - 1, made.per_epoch):  # a step over the border
        assert made[position]
    assert len(calls) == 1


def test_without_packing_a_sequence_is_a_conversation():
    made = sequences(packed=False, seed=None)
    assert [made[p] for p in range(4)] == [[0], [2], [4], [6]] and made.per_epoch == 100


@pytest.fixture
def stored(tmp_path):
    """Thirty conversations on disk."""
    rng = np.random.default_rng(1)
    words = [" ".join(["hello"] * int(n)) for n in rng.integers(1, 6, 30)]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(chat(f"user: q{n}", f"assistant: {w}") + "\n" for n, w in enumerate(words)))
    template = ChatTemplate(make_tokenizer(texts=["hello hello"] * 9))
    return Conversations(prepare([file], template, Reading(seq_length=64), tmp_path / "cache")), template


def batches(stored, packed, dp=1, rank=0, micro=2, accumulation=2, consumed=0):
    made = Sequences(stored.lengths, stored.trained, np.arange(len(stored)), capacity=64, packed=packed, seed=0)
    layout = Layout(
        micro=micro, accumulation=accumulation, dp_rank=rank, dp_size=dp, seq_length=64, packed=packed, pad=1
    )
    return micro_batches(stored, made, layout, consumed)


def targets(batch):
    """Every trained (token, next token) with its position."""
    where = batch["loss_mask"].bool()
    return sorted(zip(*(batch[k][where].tolist() for k in ("tokens", "labels", "position_ids")), strict=True))


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_hold_conversations_whole(stored, packed):
    """Each document of a row is a conversation from its first token on, or padding that nothing is learnt from."""
    stored, _ = stored
    known = {tuple(stored[n][0].tolist()): stored[n][1] for n in range(len(stored))}
    seen, source = 0, batches(stored, packed)
    for _ in range(4):
        batch = next(source)
        assert batch["tokens"].shape == ((1, 128) if packed else (2, 64)) and batch["tokens"].dtype == torch.int64
        if packed:
            assert batch["cu_seqlens"].dtype == torch.int32
            borders = batch["cu_seqlens"].tolist()
            assert borders[0] == 0 and borders[-1] == 128 and 64 in borders
            documents = [(0, slice(a, b)) for a, b in zip(borders, borders[1:], strict=False)]
        else:
            documents = [(row, slice(0, 64)) for row in range(2)]
        for row, part in documents:
            tokens, labels, mask, positions = (
                batch[k][row, part].tolist() for k in ("tokens", "labels", "loss_mask", "position_ids")
            )
            assert positions == list(range(len(tokens)))
            end = len(tokens) - tokens[::-1].index(0) + 1 if 0 in tokens else 0  # "<|end|>" is 0, "\n" follows it
            if not packed and end:
                assert set(tokens[end:]) <= {1} and not any(mask[end - 1 :])
                tokens = tokens[:end]
            if tokens and tokens[0] != 1:
                learnt = known[tuple(tokens)]
                assert labels[: len(tokens) - 1] == tokens[1:]
                assert mask[: len(tokens) - 1] == learnt[1:].astype(float).tolist() and mask[len(tokens) - 1] == 0
                seen += 1
            else:
                assert not any(mask)
    assert seen >= 8


@pytest.mark.parametrize("packed", [True, False])
def test_ranks_share_a_step_and_know_its_tokens(stored, packed):
    """The same step cut into 1 x 8, 8 x 1 and 2 ranks x 2 x 2: the same targets, divided so that sums agree."""
    stored, _ = stored
    found = []
    for dp, micro, accumulation in ((1, 8, 1), (1, 1, 8), (2, 2, 2)):
        taken, total = [], 0.0
        for rank in range(dp):
            source = batches(stored, packed, dp, rank, micro, accumulation)
            for _ in range(accumulation):
                batch = next(source)
                taken += targets(batch)
                # DeepSpeed divides by the micro-batches of a step and by the ranks.
                total += float(batch["loss_mask"].sum() / batch["loss_tokens"]) / accumulation / dp
        assert total == pytest.approx(1.0, abs=1e-6)
        found.append(sorted(taken))
    assert found[0] == found[1] == found[2]


def test_a_restart_continues_with_the_sequences_to_come(stored):
    stored, _ = stored
    straight, later = batches(stored, True), batches(stored, True, consumed=4 * 3)
    for _ in range(3 * 2):
        next(straight)
    for _ in range(5):
        a, b = next(straight), next(later)
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_what_is_left_out_is_counted_and_listed(tmp_path):
    """Lines: kept, empty line, malformed, empty, too long, kept."""
    file = tmp_path / "chats.jsonl"
    long = chat("user: q", "assistant: " + "hello " * 90)
    lines = [
        chat("user: q", "assistant: a"),
        "",
        '{"messages": 1}',
        chat("user: q"),
        long,
        chat("user: q", "assistant: b"),
    ]
    file.write_text("\n".join(lines))
    template = ChatTemplate(make_tokenizer())
    with pytest.raises(DataError, match=rf"^{file}:3: messages: got 1.*--skip-bad"):
        prepare([file], template, Reading(seq_length=64), tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if not p.name.startswith(".unfinished")]
    made = Conversations(prepare([file], template, Reading(seq_length=64, skip_bad=True), tmp_path / "cache"))
    assert len(made) == 2 and made.places.tolist() == [[0, 1], [0, 6]]
    assert made.summary["counts"] == {"kept": 2, "malformed": 1, "empty": 1, "too long": 1}
    listed = [json.loads(line) for line in made.dropped().splitlines()]
    assert [(one["line"], one["what"]) for one in listed] == [(3, "malformed"), (4, "empty"), (5, "too long")]
    assert all(one["file"] == str(file) and one["why"] for one in listed)

    cut = Reading(seq_length=64, skip_bad=True, too_long="truncate")
    made = Conversations(prepare([file], template, cut, tmp_path / "cache"))
    assert made.summary["counts"] == {"kept": 3, "malformed": 1, "empty": 1, "cut": 1}
    assert made.lengths.tolist()[1] == 64 and json.loads(made.dropped().splitlines()[2])["what"] == "cut"

    file.write_text(long)
    with pytest.raises(
        DataError, match=f"no conversation to train on .too long 1; the first, {file}:1: 547 tokens, more"
    ):
        prepare([file], template, Reading(seq_length=64), tmp_path / "cache")
    file.write_text(chat("user: q", "assistant: a"), encoding="utf-16")
    with pytest.raises(DataError, match=f".malformed 1; the first, {file}:1: not UTF-8., accepted: at least one of"):
        prepare([file], template, Reading(seq_length=64, skip_bad=True), tmp_path / "cache")


def test_what_is_prepared_is_used_again_until_anything_changes(tmp_path, monkeypatch):
    file, cache = tmp_path / "chats.jsonl", tmp_path / "cache"
    file.write_text(chat("user: q", "assistant: a") + "\n{}")
    template, bad = ChatTemplate(make_tokenizer()), Reading(seq_length=64, skip_bad=True)
    first = prepare([file], template, bad, cache)
    with monkeypatch.context() as patch:
        patch.setattr(ChatTemplate, "encode", None)
        assert prepare([file], template, bad, cache) == first
        moved = tmp_path / "elsewhere" / "other.jsonl"
        moved.parent.mkdir()
        shutil.copy(file, moved)
        assert prepare([moved], template, bad, cache) == first
    here, there = (Conversations(first, [path]) for path in (file, moved))
    assert here.summary["files"] == Conversations(first).summary["files"] == [str(file)]
    assert there.summary["files"] == [str(moved)] and there.dropped() == here.dropped().replace(str(file), str(moved))
    assert str(moved) in there.dropped()
    assert prepare([file], template, Reading(seq_length=65, skip_bad=True), cache) != first
    assert prepare([file, moved], template, bad, cache) != first
    file.write_text(chat("user: q", "assistant: b"))
    assert prepare([file], template, Reading(seq_length=64), cache) != first
    (first / "ends.npy").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        Conversations(first)
