"""`expertwire doctor`: which paths work on this machine, why not, and the command that fixes it.

findings.py says what a finding is; host.py, gpu.py and fabric.py find; probe.py is what runs in
processes of its own, because it may hang or crash: drivers, torch, UCX; report.py puts it together.
"""
