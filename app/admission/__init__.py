"""Admission: which requests may queue, and when a refused client should retry.

In reading order:

tenants        Tenants by API key: their limits, weights and shares of the queue.
rates          Limits of requests and of tokens per minute, by tenant.
expected_wait  The expected time to the first token of a new request.
admission      The decision to admit or to refuse with 429 and Retry-After.
"""
