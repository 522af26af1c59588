"""The kernels around attention in Triton's interpreter; run by test_interpreted.py, which sets TRITON_INTERPRET=1."""

from tests.coat_dist.kernels import attention_agreement as agreement


def test_rope():
    agreement.check_rope()


def test_dequantize():
    agreement.check_dequantize()
