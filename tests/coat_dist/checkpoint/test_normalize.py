"""First moments stored over the root of the second, and by themselves: what one kind of run wrote,
the other gets through the universal format only.
"""

import pytest
import torch

from coat_dist.checkpoint.universal.codes import read_codes, select_codes, write_codes
from coat_dist.optim import CoatAdamW
from tests.coat_dist.checkpoint.test_whole import told
from tests.coat_dist.checkpoint.universal_runs import build, contents, differences, wrong_codes
from tests.coat_dist.deepspeed.zero_runs import CASES, run, snapshot
from tests.coat_dist.deepspeed.zero_runs import differences as changes
from tests.support import run_ranks


def coat(normalize):
    return {"optimizer": {"normalize": normalize}, "activation": {"enabled": False}}


def converted(rank, world, settings, normalize, folder):
    """One kind saves, the other loads it: as it is, and converted. The error, and whatever is
    wrong.
    """
    from coat_dist import convert_to_universal

    engine = build(settings, coat=coat(normalize))
    run(engine, rank, 0, 3)
    engine.save_checkpoint(folder, tag="plain")
    saved = contents(engine)
    if rank == 0:
        convert_to_universal(f"{folder}/plain", f"{folder}/universal")
    torch.distributed.barrier()
    engine = build(settings, coat=coat(not normalize))
    run(engine, rank, 20, 21)  # state that loading has to replace
    before = snapshot(engine)
    message = told(engine.load_checkpoint, folder, tag="plain")
    wrong = changes(before, snapshot(engine))
    engine._config.load_universal_checkpoint = True
    engine.load_checkpoint(folder, tag="universal")
    return wrong + differences(contents(engine), saved) + wrong_codes(engine, saved), message


@pytest.mark.parametrize(("case", "normalize"), [("zero-2", False), ("zero-3", True)])
def test_refused_as_it_is_and_converted_by_the_universal_format(case, normalize, tmp_path):
    for wrong, message in run_ranks(2, converted, CASES[case], normalize, str(tmp_path)):
        assert wrong == [] and "convert_to_universal" in message
        assert (
            f"normalize of parameter group 0: checkpoint has {normalize}, this run has "
            f"{not normalize}" in message
        )


@pytest.mark.parametrize("normalize", [False, True])
def test_codes_are_taken_over_where_they_mean_the_same(normalize, tmp_path):
    p, q = (torch.nn.Parameter(torch.zeros(256)) for _ in range(2))
    saved, other = CoatAdamW([p], normalize=False), CoatAdamW([q], normalize=normalize)
    for optimizer, x in ((saved, p), (other, q)):
        x.grad = torch.randn(256)
        optimizer.step()
    path, starts = tmp_path / "codes.coat", torch.tensor([0, 128])
    write_codes(
        path, saved.param_groups[0], [[(starts, select_codes(saved.state[p], slice(0, 2)))]]
    )
    found = read_codes(path, other.state[q], other.param_groups[0], (0, 0, 256), (0, 1))
    assert found == (0 if normalize else 2)
    assert torch.equal(other.state[q]["coat_m_q"], saved.state[p]["coat_m_q"]) is not normalize
