"""Wrappers for private names of other libraries that the project uses or replaces.

tests/test_upstream.py fails when a new version of a library makes a wrapper unnecessary. Start reading in
torch_.py.
"""
