"""Anthropic's wire format.

errors          the envelope of errors, on every route below /v1/messages
"""

from protocol.anthropic.errors import error_body

__all__ = ["error_body"]
