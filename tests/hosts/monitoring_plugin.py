"""A pytest plugin that watches every call through ``sys.monitoring``, under the number that profilers take."""

import sys

TOOL = sys.monitoring.PROFILER_ID
calls = 0


def _called(*_):
    global calls
    calls += 1


def pytest_sessionstart():
    sys.monitoring.use_tool_id(TOOL, "another")
    sys.monitoring.register_callback(TOOL, sys.monitoring.events.CALL, _called)
    sys.monitoring.set_events(TOOL, sys.monitoring.events.CALL)


def pytest_sessionfinish():
    assert calls > 1000
    assert sys.monitoring.get_tool(TOOL) == "another"
    assert sys.monitoring.get_events(TOOL) == sys.monitoring.events.CALL
    sys.monitoring.free_tool_id(TOOL)
