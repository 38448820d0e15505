"""What touches the device: executor, worker, model runner, models, layers, attention and weights.

Imports of the engine are limited to its plan, messages and errors. Nothing here knows HTTP.

Reading order: `config`, `weights`, `models`, `layers`, `attention`, `sampling`, `input_batch`, `model_runner`,
`worker`, `executor`.
"""
