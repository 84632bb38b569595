"""Hypothesis profiles: the same examples in every run, or `--hypothesis-profile=explore`."""

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=200)
settings.load_profile("repeatable")
