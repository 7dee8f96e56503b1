"""The GPU target: device code compiled by NVRTC through cuda.core, launched on torch's streams.

Nothing here is imported by the CPU path. `cuda-core` comes with `pip install 'expertwire[gpu]'`;
compiling needs no GPU, launching does.

    source.py   the .cuh files as one translation unit
    compile.py  NVRTC: source -> cubin
    cache.py    cubins on disk, by content
    launch.py   Launch: the same kernels and argument structures as on the CPU
    local.py    client and server on one GPU, in one process
    service.py, remote.py  the same in several processes, over memory shared by ipc.py
"""
