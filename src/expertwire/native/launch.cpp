// C entry points that run device code on the calling thread.
#include "launch.hpp"

#include <cerrno>

#include "error.hpp"
#include "fiber.hpp"
#include "trace.hpp"

#define EW_API extern "C" __attribute__((visibility("default")))

EW_API int ew_hca_poll(ew_hca* hca, unsigned max_wqes);

namespace {

struct Engines {
  ew_hca* const* hcas;
  unsigned num_hcas, max_wqes;
};

// Lanes that all spin wait for the HCA, so the HCA is what should run.
void run_engines(void* context) {
  const auto* engines = static_cast<const Engines*>(context);
  for (unsigned i = 0; i < engines->num_hcas; ++i) ew_hca_poll(engines->hcas[i], engines->max_wqes);
}

int check(const ew_step& step) {
  if (!step.kernel) return ew_fail(-EINVAL, "launch of a kernel that was not found");
  if (step.args_bytes != step.kernel->args_bytes)
    return ew_fail(-EINVAL, "kernel %s takes %u bytes of arguments, got %u", step.kernel->name,
                   step.kernel->args_bytes, step.args_bytes);
  return 0;
}

}  // namespace

EW_API const ew::Kernel* ew_kernel_find(const char* name) { return ew::find_kernel(name); }

// Runs the steps in order and times them; while all lanes of one spin, the given HCAs are driven.
EW_API int ew_launch(ew_step* steps, unsigned num_steps, ew_hca* const* hcas, unsigned num_hcas) {
  Engines engines = {hcas, num_hcas, 64};
  const bool tracing = ew::tracing();
  for (unsigned i = 0; i < num_steps; ++i) {
    if (int error = check(steps[i])) return error;
    const ew::LaunchSpec spec = {steps[i].kernel->entry, steps[i].args, steps[i].grid_dim, steps[i].block_dim,
                                 steps[i].warp_size};
    if (tracing) ew::trace_before(steps[i]);
    const ew::u64 start = ew::clock_ns();
    if (int error = ew::run_fast(&spec, 1, run_engines, &engines)) return error;
    const ew::u64 end = ew::clock_ns();
    steps[i].elapsed_ns = end - start;
    if (tracing) ew::trace_after(steps[i], num_hcas ? hcas[0] : nullptr, start, end);
  }
  // What was just posted leaves at once instead of after the caller's bookkeeping (one turn of each
  // queue, so at most 256 KiB; the rest goes with the next wait or the engine's own thread).
  run_engines(&engines);
  return 0;
}

// Runs the steps side by side under the seeded scheduler; the HCAs take single steps in between.
// Loads of watched memory that are not ordered may see an earlier value of it.
EW_API int ew_launch_seeded(const ew_step* steps, unsigned num_steps, ew_hca* const* hcas, unsigned num_hcas,
                            unsigned long long seed, const ew::Range* watched, unsigned num_watched) {
  constexpr unsigned kMaxSteps = 16;
  if (num_steps > kMaxSteps) return ew_fail(-EINVAL, "at most %u kernels run side by side", kMaxSteps);
  ew::LaunchSpec specs[kMaxSteps];
  for (unsigned i = 0; i < num_steps; ++i) {
    if (int error = check(steps[i])) return error;
    specs[i] = {steps[i].kernel->entry, steps[i].args, steps[i].grid_dim, steps[i].block_dim, steps[i].warp_size};
  }
  Engines engines = {hcas, num_hcas, 1};
  return ew::run_seeded(specs, num_steps, run_engines, &engines, seed, watched, num_watched);
}
