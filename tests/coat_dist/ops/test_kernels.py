"""Every kernel agrees with its definition; the rows are in ``agreement``."""

import importlib

import pytest

from tests.support.devices import ON_GPU

pytest.importorskip("triton")
FILES = "activation", "cross_entropy", "grouped", "norm", "quantize", "rope"
PAGES = {name: importlib.import_module(f"{__package__}.agreement.{name}") for name in FILES}
pytestmark = [] if ON_GPU else [pytest.mark.long]


@pytest.mark.parametrize(
    ("file", "row"), [(file, row) for file, page in PAGES.items() for row in page.ROWS]
)
def test_kernel_agrees_with_its_definition(file, row):
    check, *arguments = PAGES[file].ROWS[row]
    check(*arguments)
