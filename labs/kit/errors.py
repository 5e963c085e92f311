"""Input that cannot work, told in one line."""

from __future__ import annotations


class BadInput(ValueError):
    """A value that cannot work. The message is one line and names the fix; nothing has been started."""

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))  # a value may hold "\n"

    def _render_traceback_(self) -> list[str]:
        """IPython prints this in place of a traceback: the one line is all there is to know."""
        return [f"BadInput: {self}"]


def require(condition: bool, message: str) -> None:
    """Raise BadInput(message) unless `condition`."""
    if not condition:
        raise BadInput(message)
