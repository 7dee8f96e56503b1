// Kernels of the CPU target by name, and how a sequence of them is launched.
#pragma once

namespace ew {

struct Kernel {
  const char* name;
  void (*entry)(const void* args);
  unsigned args_bytes;
};
const Kernel* find_kernel(const char* name);

}  // namespace ew

struct ew_hca;

// One kernel launch. Steps of one call run one after another, or together (ew_launch_together).
struct ew_step {
  const ew::Kernel* kernel;
  const void* args;
  unsigned args_bytes, grid_dim, block_dim, warp_size;
  unsigned long long elapsed_ns;  // out: how long the step ran
};
