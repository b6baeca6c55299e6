"""Hosts of a test's own, for every test in this room."""

from netns import hosts as hosts
