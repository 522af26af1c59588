"""The program under its launchers, started with a misspelt option."""

import re

import pytest

from tests.launch.launchers import DEEPSPEED, TORCHRUN, begin_from_nothing, output_of
from tests.launch.pretrain_runs import command, configuration

pytestmark = pytest.mark.skipif(
    __import__("torch").cuda.is_available(), reason="starts two ranks on the CPU"
)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [DEEPSPEED, TORCHRUN], ids=["deepspeed", "torchrun"])
def test_a_misspelt_option_is_one_line_of_one_rank(launcher, work, tmp_path):
    """``-m slow``: the ranks import everything before they look at their arguments."""
    process = begin_from_nothing(
        launcher,
        [*command(work, tmp_path / "run", configuration(tmp_path, 2)), "--learn-rate", "1"],
    )
    text = output_of(process)
    assert process.returncode != 0 and "usage: " not in text
    # torchrun's report may repeat it.
    assert len(re.findall("^error: .*no such option", text, re.M)) == 1, text
    assert "error: --learn-rate: no such option" in text
    assert not (tmp_path / "run").exists()
