"""One request on the wire: its scope, its record, and the connection below it.

In reading order:

record       The record of a request: its phases, figures and transcript.
scope        A request as a scope: from the first byte of its body to the last byte of its answer.
middleware   Checks before every handler: Host, Origin, Content-Type and API keys.
connections  Limits on open connections and on slow clients.
hypercorn    Patches of Hypercorn: how connections end and how messages reach the application.
listening    Listening sockets: port sharing at a restart, and sockets passed by systemd.
"""
