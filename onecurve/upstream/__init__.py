"""Wrappers around the private names that the project uses or replaces in other libraries.

tests/test_upstream.py fails if a wrapper becomes unnecessary with a new version of a library. Start reading
in torch_.py.
"""
