"""The memray-array tables, rebuilt: each stack in an environment of its own, one process a write and one a read.

:mod:`configurations` says what is run, :mod:`environments` and :mod:`server` make what it needs, :mod:`worker` runs it
inside a session, :mod:`runner` keeps the results, and :mod:`tables` renders them.
"""
