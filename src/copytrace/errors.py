"""The one exception of copytrace that a user is meant to see."""

from __future__ import annotations


class CopytraceError(Exception):
    """Something the user can act on. The message is one line that names the file or argument and says what to do."""
