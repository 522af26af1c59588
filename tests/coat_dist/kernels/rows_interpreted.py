"""The kernels of row scales in Triton's interpreter; test_interpreted.py runs this, with TRITON_INTERPRET=1."""

from tests.coat_dist.kernels import rows_agreement as agreement


def test_quantize():
    agreement.check_quantize(shapes=((4, 70), (2, 2, 33), (3, 1)))


def test_norm():
    agreement.check_norm(sizes=(72,), rows=2, exact_bits=True)


def test_activation():
    agreement.check_activation(sizes=(72, 101), rows=1, variants=1)


def test_activation_of_bad_values():
    agreement.check_activation_of_bad_values()


def test_nothing_and_little():
    agreement.check_nothing_and_little()
