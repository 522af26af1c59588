"""Formats of moments: the names that are accepted and the classes that define them."""

from typing import get_args

from coat_dist.formats import ALWAYS_EXPANDED, FirstMomentFormat, SecondMomentFormat
from coat_dist.reference.moment_formats import MOMENT_FORMATS


def test_every_accepted_name_has_a_format_and_every_format_is_accepted():
    assert {*get_args(FirstMomentFormat), *get_args(SecondMomentFormat)} == set(MOMENT_FORMATS)
    assert all(name == one.name for name, one in MOMENT_FORMATS.items()) and set(ALWAYS_EXPANDED) < set(MOMENT_FORMATS)
