"""Numbers drawn anew that two computations round, each after sums in an order of its own."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable


def ties_may_differ(test: Callable[..., None]) -> Callable[..., None]:
    """The test fails if it fails for two draws, one after the other.

    About one draw in some hundreds has a value so close to a tie that the last bit of a sum decides
    its code, and with it, where a group's scale or a row of a product hangs on it, more than any
    tight bound allows. Errors show in every draw. Of the first draw a warning remains.
    """

    @functools.wraps(test)
    def twice(*args: object, **kwargs: object) -> None:
        try:
            return test(*args, **kwargs)
        except AssertionError as first:
            warnings.warn(f"{test.__name__}: drawn again after {str(first)[:200]!r}", stacklevel=2)
        test(*args, **kwargs)

    return twice
