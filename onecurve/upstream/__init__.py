"""Wrappers around private names in other libraries that the project uses or replaces.

tests/test_upstream.py fails if a wrapper becomes unnecessary with a new version of a library. Start reading
in torch_.py.
"""
