"""Pages of models, turned by the `anthropic` package itself."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs

import anthropic
import httpx2
import pytest

from protocol.anthropic.dialect import model_info, model_page
from protocol.errors import ApiError

NAMES = ["a", "b/c", "d", "e", "f"]
INFOS = [model_info(name, created=1_700_000_000, max_model_len=64) for name in NAMES]


def page(query: str) -> bytes:
    return model_page(INFOS, parse_qs(query))


@pytest.mark.parametrize("query", [{}, {"limit": 2}, {"limit": 1, "lifecycle": ["active"]}])
def test_the_client_turns_the_pages(query: dict[str, Any]) -> None:
    def answer(request: Any) -> Any:
        return httpx2.Response(
            200, content=page(request.url.query.decode()), headers={"content-type": "application/json"}
        )

    with anthropic.Anthropic(
        base_url="http://nowhere", api_key="a", http_client=httpx2.Client(transport=httpx2.MockTransport(answer))
    ) as sdk:
        models = list(sdk.models.list(**query))
        assert [model.id for model in models] == NAMES
        assert models[0].created_at.isoformat() == "2023-11-14T22:13:20+00:00"
        assert [model.id for model in sdk.models.list(after_id="b/c", limit=2).data] == ["d", "e"]
        assert [model.id for model in sdk.models.list(before_id="e", limit=2).data] == ["b/c", "d"]
        assert sdk.models.list(lifecycle=["retired"]).data == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("after_id=z", "after_id"),
        ("before_id=z", "before_id"),
        ("after_id=a&before_id=e", "before_id"),
    ],
)
def test_a_query_that_is_none_is_refused_by_name(query: str, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        page(query)
    assert (refused.value.status, refused.value.param) == (400, param)
