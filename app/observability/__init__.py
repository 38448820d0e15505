"""Logs, metrics, dashboard frames and traces.

In reading order:

logs     Log lines for terminals, JSON logs elsewhere.
metrics  The metrics of /metrics, under vLLM's names.
frames   One frame of the dashboard: an engine's state at one moment.
tracing  The choice of a tracer, and the timelines of the last requests.
spans    Requests as OpenTelemetry spans.
"""
