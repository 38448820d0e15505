"""Handlers by what they answer: `generation` (chat, completions), `catalogue` (models), `requests`, `probes`."""
