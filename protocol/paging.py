"""What the API's lists have in common: how many entries a page has."""

from __future__ import annotations

import re

from protocol.errors import ApiError, shown


def page_size(limit: str, most: int) -> int:
    """The query's `limit`. Raises `ApiError` 400 if it is no number from 1 to `most`."""
    if not re.fullmatch(r"[0-9]{1,4}", limit) or not 1 <= int(limit) <= most:
        raise ApiError(400, f"limit must be a whole number from 1 to {most}, got {shown(limit)}.", param="limit")
    return int(limit)
