"""DeepSpeed's offload_optimizer with CoatAdamW: states in host memory, every bit as without."""

import pytest

from coat_dist import convert_to_universal
from tests.coat_dist.deepspeed.offload_runs import CASES, assert_same, moved, trajectory, universal
from tests.support import run_ranks


@pytest.mark.parametrize("case", CASES)
def test_offload_optimizer_changes_no_bit_and_checkpoints_go_both_ways(case, tmp_path):
    resident, hosted = (
        run_ranks(2, trajectory, CASES[case], on, str(tmp_path / str(on))) for on in (False, True)
    )
    for one, other in zip(resident, hosted, strict=True):
        assert_same(one[0], other[0])
        assert_same(one[0][5:], one[1])
        assert_same(one[0][5:], other[1])
    convert_to_universal(tmp_path / "True" / "five", tmp_path / "universal")
    loaded = [run_ranks(2, universal, CASES[case], on, str(tmp_path)) for on in (False, True)]
    for one, other in zip(*loaded, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("include", ["all", "optim_states", "lp_params"])
@pytest.mark.parametrize("remainder", [True, False])
@pytest.mark.parametrize("case", ["zero-2", "zero-3"])
def test_offload_states_and_reload_states_change_no_bit(case, remainder, include):
    for offloaded in (True, False) if remainder else (False,):
        still, away = (
            run_ranks(2, moved, CASES[case], offloaded, remainder, x) for x in ("", include)
        )
        for one, other in zip(still, away, strict=True):
            assert_same(one, other)
