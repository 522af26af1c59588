"""The flow's kernels in Triton's interpreter; run by test_interpreted.py, which sets TRITON_INTERPRET=1 first."""

from tests.coat_dist.kernels import flow_agreement as agreement


def test_quantize():
    agreement.check_quantize(shapes=((3, 70), (2, 3, 64)))


def test_norm():
    agreement.check_norm(sizes=(72,), rows=3)


def test_norm_of_no_rows():
    agreement.check_norm_of_no_rows()


def test_activation():
    agreement.check_activation(sizes=(72,), rows=9, variants=3)


def test_activation_of_bad_values():
    agreement.check_activation_of_bad_values()
