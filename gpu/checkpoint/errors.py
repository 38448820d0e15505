"""What is wrong with a model that was asked for."""

from __future__ import annotations

from engine.errors import HeadraceError


class ModelError(HeadraceError):
    """A model that cannot be found, read or run.

    The message is for the operator who chose the model: it names what was given, what is supported, and what works.
    It may hold local paths, so it belongs in the log and on the terminal, not in an answer to a client.
    """
