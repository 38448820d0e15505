"""The runner of a device that computes while the host goes on.

In reading order:

tables   The requests' rows on the device, and their updates.
inputs   A step's inputs and sampling parameters, made on the device.
graphs   Steps as CUDA graphs.
warm_up  The steps that are run before serving, and the memory they take.
runner   `DeviceRunner`: one plan in, one started step, and the download of its tokens.
"""
