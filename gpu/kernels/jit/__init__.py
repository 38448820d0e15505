"""The Triton side of gpu.kernels: one module for each of its modules, imported only where Triton runs.

A module holds the kernels and the functions that launch them; what they compute is said by the public functions.
"""
