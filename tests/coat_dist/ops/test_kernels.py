"""Every kernel agrees with its definition; the rows are in ``agreement``."""

import importlib

import pytest

from tests.support.devices import ON_GPU

pytest.importorskip("triton")
FILES = (
    *("activation", "adamw", "adamw_edges", "adamw_fp32", "cross_entropy"),
    *("grouped", "norm", "quantize", "rope"),
)
PAGES = {name: importlib.import_module(f"{__package__}.agreement.{name}") for name in FILES}
# NumPy, by which the interpreter computes, warns where a kernel divides by zero.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
if not ON_GPU:
    pytestmark.append(pytest.mark.long)


@pytest.mark.parametrize(
    ("file", "row"), [(file, row) for file, page in PAGES.items() for row in page.ROWS]
)
def test_kernel_agrees_with_its_definition(file, row):
    check, *arguments = PAGES[file].ROWS[row]
    check(*arguments)
