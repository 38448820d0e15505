"""Handlers by what they answer: `generation` (chat, completions), `responses`, `messages`, `embeddings`, `tokens`,
`catalogue` (models), `requests`, `probes`, `administration`."""
