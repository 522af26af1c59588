"""Which conversations are held out, and that none is evaluated that was trained on."""

import numpy as np
import pytest

pytest.importorskip("transformers")

from coat_dist import CoatConfigError
from coat_dist.checkpoint.manifest import CheckpointError
from launch.chat.held_out import check_kept, hold_out
from launch.chat.store import Conversations, Reading, prepare
from launch.chat.template import ChatTemplate
from tests.launch.chat.support import chat, make_tokenizer


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Files of conversations, read in the order in which they are asked for."""
    folder, template = tmp_path_factory.mktemp("chats"), ChatTemplate(make_tokenizer())
    for name, numbers in (("a", range(30)), ("b", range(30, 41)), ("one", [0])):
        lines = [chat(f"user: {n}?", f"assistant: {n}!") for n in numbers]
        (folder / name).with_suffix(".jsonl").write_text("\n".join(lines))

    def read(*names):
        files = [folder / f"{name}.jsonl" for name in names]
        return Conversations(prepare(files, template, Reading(seq_length=64), folder / "cache"))

    return read


def content(conversations, numbers):
    return sorted(conversations[n][0].tobytes() for n in numbers)


def test_the_order_of_files_changes_nothing(stored):
    one, other = stored("a", "b"), stored("b", "a")
    (here, digest), (there, same) = (hold_out(c, 0.2, 7) for c in (one, other))
    assert content(one, here) == content(other, there) and digest == same
    assert here.tolist() != there.tolist(), "their places are others"
    assert len(here) == 9 and here.tolist() == sorted(set(here.tolist()))  # of 41


def test_every_seed_draws_others(stored):
    chats, counts = stored("a", "b"), np.zeros(41, int)
    digests = set()
    for seed in range(200):
        numbers, digest = hold_out(chats, 0.2, seed)
        counts[numbers] += 1
        digests.add(digest)
    assert len(digests) == 200
    assert counts.sum() == 200 * 9 and counts.min() > 15 and counts.max() < 80  # 44 each, standard deviation 5.9


def test_shares(stored):
    assert hold_out(stored("a"), 0.0, 0)[1] is None and not len(hold_out(stored("a"), 0.0, 0)[0])
    assert [len(hold_out(stored("a"), share, 0)[0]) for share in (0.001, 0.5, 0.999)] == [1, 15, 29]
    with pytest.raises(CoatConfigError, match=r"--valid-share: got 0.5 of 1 conversation, accepted: 0"):
        hold_out(stored("one"), 0.5, 0)


def test_copies_are_held_out_together_in_any_order(stored):
    chats = stored("a")
    copies = [*range(30), *range(30), *range(30)]

    class Repeated:
        def __init__(self, numbers):
            self.numbers = numbers

        def __len__(self):
            return len(self.numbers)

        def __getitem__(self, place):
            return chats[self.numbers[place]]

    one, other = Repeated(copies), Repeated(copies[::-1])
    (here, digest), (there, same) = (hold_out(c, 0.1, 3) for c in (one, other))
    assert len(here) == 9 and digest == same and content(one, here) == content(other, there)
    for seed in range(20):  # a tenth and a bit more: the cut would go through copies
        held, _ = hold_out(one, 0.12, seed)
        left = set(range(90)) - set(held.tolist())
        assert len(held) == 12 and not set(content(one, held)) & set(content(one, left))
    assert len(hold_out(Repeated([4, 4]), 0.5, 0)[0]) == 1, "something is left to train on"


def test_what_was_trained_on_is_not_evaluated(tmp_path, stored):
    digest, other = (hold_out(stored("a"), 0.2, seed)[1] for seed in (0, 1))
    kept = {"packed": True, "valid_share": 0.2, "held_out": digest}
    check_kept(tmp_path, kept, 0.2, digest)
    check_kept(tmp_path, kept, 0.0, None)  # --valid FILE, or nothing is held out any more
    with pytest.raises(CheckpointError, match=r"^--valid-share: got 0.2, which .*accepted: --valid FILE, .* --seed$"):
        check_kept(tmp_path, kept, 0.2, other)
    with pytest.raises(CheckpointError, match="may have trained on"):  # everything was trained on
        check_kept(tmp_path, {"packed": True, "valid_share": 0.0, "held_out": None}, 0.2, digest)
    with pytest.raises(CheckpointError, match=r"by their places in the files.*accepted: --valid FILE, or .*share 0$"):
        check_kept(tmp_path, {"packed": True, "valid_share": 0.2}, 0.2, digest)
