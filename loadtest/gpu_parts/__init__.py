"""The parts of `loadtest.gpu_bench`: what it measures, and against what."""
