"""A function for each private name of another library that the project uses or replaces.

tests/test_upstream.py fails when a library no longer needs a function. Start reading in torch_.py.
"""
