"""What touches the device: executor, worker, model runner, models, layers, attention and weights.

Imports of the engine are limited to its plan, messages and errors. Nothing here knows HTTP.

Reading order: `config`, `weights`, `models`, `layers`, `attention`, `sampling`, `input_batch`, `model_runner`,
`worker`, `executor`.
"""

import os

# OpenMP's threads spin while they wait for each other, and a spinning thread takes the core from the very thread that
# it waits for as soon as anything else runs: an event loop, a tokenizer, a second server. With both cores of a small
# machine contended, steps took 3 to 10 times as long. Sleeping costs some microseconds per parallel region. It is read
# when torch is loaded, so it has to be said before that.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
