"""The server that `hypercorn app:main` loads: routes, the request scope, settings, command line and lifespan.

Importing this package is cheap on purpose: no torch, no starlette. `main` builds the application when the server first
calls it, from the settings in the environment and the settings file; `headrace serve` builds one from its flags.

In reading order:

setting_types      paths, lists and secrets as settings have them
setting_rules      what settings must be together
settings           every setting, defined once: type, range, default and what it does
setting_sources    where they come from, and what is said of one that is refused
__main__           the `headrace` command before anything else is imported: signals in its first second
cli                the command line: `headrace serve`, `chat` and `pull`
application        wires settings, server, routes, middleware and lifespan into one ASGI application
runner             runs it under Hypercorn in this process
scope              a request as a scope, from the first byte of its body to the last byte of its answer
request_body       its body, whole and in time
endpoint           a handler in such a scope, and the accounting of each request
request_record     what is known of a request when it has ended
event_log          the events of a response that is made in the background, and its readers' places
background         requests that outlive their connection: a scope whose client is an event log
middleware         who may come in: pure ASGI around the application
tenants            whose request it is, by its API key, and what they are entitled to
routes             handlers, by what they answer
dialects           handlers made from the records of the dialects
generation         from a parsed body to tokens to an answer, for every wire format
admission          who may queue, and the early no with a time to come back
step_cost_file     where the table of step costs is kept between two starts
expected_wait      how long a request would wait, by the queue and what steps cost
queue_shares       how tenants share the queue
prompts            what a client wrote, as token ids
workload           what is short enough for the event loop, and what goes to a thread
response_store     responses that can be asked for later, in bounded memory
dashboard          the pages: /dashboard, what the engine does as it does it, and a chat; and the files of /docs
server             a running server: loading, the way to the engine, requests, drain
server_state       what it is at a moment: its phase, how far loading is, what is loaded
loading            from settings to an engine: the only place that knows both the gpu room and the engine room
engine_facts       what an engine is told of the settings, and what is told of an engine
engine_process     the main of the engine's own process
rank_process       that of one of several ranks of an engine
engine_on_ray      the main of an engine in an actor on a machine of a Ray cluster
garbage            what the garbage collector need not look at
workers            refuses to be run by several workers
reloading          what a running server reads again at SIGHUP
systemd            the socket that systemd has opened, and what it is told
shutdown           from the sign to stop to the end: drain first, end at once when asked again
connections        how many connections may be open, and how long each may keep the server waiting
listening          how a port goes from one server to the next without a connection being lost
hypercorn_patches  what is patched in Hypercorn, above all how connections end
hypercorn_streams  what is patched in how Hypercorn carries messages
logs               what the server says about itself: lines in a terminal, JSON elsewhere
metrics            what Prometheus reads from /metrics
routing_metrics    what it says of how several engines share the requests
histogram          a histogram that takes many equal values at once
event_loop         who keeps the event loop from its other work, and for how long
timelines          what happened to each of the last requests, and how long it took
tracing            a trace per request, by OpenTelemetry, where it is asked for
span_tracer        requests as spans
phases             what a request did, as phases that add up
trace_names        the phases of a request, and the names in traces that several modules use
transcript         the messages of a request, for its trace, where that may have them
chat               `headrace chat`: a conversation in the terminal, over HTTP
chat_commands      what can be typed there beside messages
live_markdown      Markdown in a terminal while it is written
top                `headrace top`: what a running server does, in the terminal
config_command     `headrace config`: the settings in force, and where each comes from
doctor             `headrace doctor`: what would keep a machine from serving, or slow it down
server_client      what the commands that talk to a server ask it
bench              `headrace bench`: how fast a server, or the model without one, really is
simulate           `headrace simulate` and the interactive simulator
serve_on_ray       the application on Ray Serve
ray_policies       who gets a request there, and how many replicas there are
offline            the library: a model by its name, without a server
progress           what a terminal shows of slow work
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import Receive, Scope, Send


async def main(scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application, with settings from the environment and the settings file."""
    await _application_from_environment()(scope, receive, send)


@cache
def _application_from_environment() -> Starlette:
    from app.application import create_app, end_process
    from app.setting_sources import load_settings
    from app.settings import SettingsError
    from app.workers import check_workers

    try:
        check_workers()
        return create_app(load_settings())
    except SettingsError as error:
        # The server's first call is the lifespan, where Hypercorn would log an exception and serve on without one.
        end_process(error)
