"""The cross entropy kernels in Triton's interpreter; run by test_interpreted.py, which sets TRITON_INTERPRET=1."""

from tests.coat_dist.kernels import cross_entropy_agreement as agreement


def test_stats():
    agreement.check_stats()


def test_extremes():
    agreement.check_extremes()


def test_blocks():
    agreement.check_blocks()


def test_grad():
    agreement.check_grad()
