"""The main of a process that renders one chat template which nobody here has read, under limits of the kernel.

It is started by `protocol.template_process`, and imports the standard library and Jinja only, which takes a tenth of a
second. What bounds it is told in `protocol.bounded_child`.

    parent → child   first the template's source, then the variables of one rendering each (JSON)
    child → parent   0 and the text (first: the names of the variables that it reads, as JSON), or a `Failure` and words
"""

from __future__ import annotations

import json

from protocol.bounded_child import serve, to_bytes, to_text
from protocol.jinja_sandbox import CompiledTemplate, Failure, RenderingFailed

_MOST_WORDS = 2**16  # characters of a complaint, some of which are markers


def main(timeout: float) -> None:
    """Serve the parent until it closes the socket. `timeout`: seconds of the processor that a rendering may take."""
    template: CompiledTemplate | None = None

    def answer(message: bytearray) -> tuple[int, bytes]:
        nonlocal template
        try:
            text = to_text(message)
            if template is None:
                template = CompiledTemplate(text)
                return 0, json.dumps(sorted(template.variables)).encode()
            return 0, to_bytes(template.render(json.loads(text)))
        except RenderingFailed as failure:
            return failure.kind, to_bytes(failure.words[:_MOST_WORDS])
        except MemoryError:
            return Failure.MEMORY, b"it takes more memory than it may have"
        except Exception as error:
            return Failure.UNFIT, type(error).__name__.encode()

    serve(answer, timeout)
