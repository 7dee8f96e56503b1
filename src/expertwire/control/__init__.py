"""The control plane between processes: frames, authentication, handshakes, shared memory."""
