"""A part of the sample of schemas: whatever is accepted is followed, and every refusal names what it is about."""

import re

import pytest

from tests.engine.schema_sample import Judge, made_up_schemas, sdk_schemas

NAMED = re.compile(r'Unimplemented keys: \["\w+"\]|look-ahead|at most 131072 characters')


@pytest.mark.slow
@pytest.mark.seconds
@pytest.mark.parametrize(
    ("schemas", "enforced_at_least"),
    [(list(sdk_schemas("openai.types.chat")), 45), (list(made_up_schemas(60)), 40)],
    ids=["classes of an SDK", "made up"],
)
def test_a_schema_is_followed_or_refused_by_name(schemas: list, enforced_at_least: int) -> None:
    judge = Judge()
    refusals = [judge.refusal(schema) for _, schema in schemas]
    assert all(refusal is None or NAMED.search(refusal) for refusal in refusals), refusals
    assert refusals.count(None) >= enforced_at_least
