"""A Dockerfile as its instructions, for tests of what it promises."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from tests.support.harness import REPOSITORY

DEPLOY = REPOSITORY / "deploy"


class Instruction(NamedTuple):
    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """Those of the exec form, which needs no shell; ValueError for any other."""
        return json.loads(self.text)


def last_stage(path: Path) -> list[Instruction]:
    """What makes the image that is left when all is built."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines))
    found = [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]
    start = max(index for index, instruction in enumerate(found) if instruction.name == "FROM")
    return found[start:]


def texts(stage: list[Instruction], name: str) -> list[str]:
    return [instruction.text for instruction in stage if instruction.name == name]


def only(stage: list[Instruction], name: str) -> Instruction:
    (found,) = (instruction for instruction in stage if instruction.name == name)
    return found


def environment(stage: list[Instruction]) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(texts(stage, "ENV"))))


def health_command(stage: list[Instruction]) -> list[str]:
    return json.loads(only(stage, "HEALTHCHECK").text.partition(" CMD ")[2])
