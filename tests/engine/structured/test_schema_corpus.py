"""Schemas of installed packages: hardly any is refused without `strict`, and what is enforced is followed."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.engine import schema_corpus
from tests.engine.schema_corpus import Verdict, schemas_in
from tests.engine.schema_sample import Judge, made_up_schemas, sdk_schemas


@pytest.mark.slow
@pytest.mark.seconds
def test_schemas_of_installed_packages_are_enforced_as_far_as_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_corpus, "values_of", lambda schema: [])  # takes a package that is not installed
    judge, outcomes = Judge(), Counter[str]()
    schemas = [*list(sdk_schemas("anthropic.types"))[::10], *made_up_schemas(60)]
    for package in ("jsonschema_specifications", "schemathesis", "setuptools"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        made = ((name, make()) for name, make in schemas_in(Path(spec.origin).parent))
        # llguidance has a copy of its own of draft 2019-09's, with keywords that it lacks.
        schemas += [
            (f"{package} {name}", schema)
            for name, schema in made
            if schema is not None and not re.search("draft3|draft201909/metaschema", name)
        ][:12]
    for name, schema in schemas:
        verdict = Verdict(judge, name, schema)
        assert verdict.outcome not in ("VIOLATED", "NOT CONTAINED"), (name, verdict.reason)
        outcomes[verdict.outcome] += 1
    assert outcomes["refused"] == 0, outcomes
    assert outcomes["keywords left out"] >= 10, outcomes
    assert outcomes["enforced whole"] >= 60, outcomes
