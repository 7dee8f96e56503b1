// Opens UCX at run time.
#include "ucx_api.hpp"

#include <dlfcn.h>

#include <cerrno>
#include <mutex>

#include "error.hpp"

namespace ucx {
namespace {

constexpr unsigned kMajor = 1, kMinor = 11;  // the first with all that is used

template <typename Function>
bool find(void* library, const char* name, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
  if (!*out) ew_fail(-ENOSYS, "UCX has no %s: version %u.%u or newer is needed", name, kMajor, kMinor);
  return *out != nullptr;
}

bool find_all(void* library, Api* api) {
#define EW_FIND(name) find(library, #name, &api->name)
  return EW_FIND(ucp_get_version) && EW_FIND(ucp_config_read) && EW_FIND(ucp_config_release) &&
         EW_FIND(ucp_config_modify) && EW_FIND(ucp_init_version) && EW_FIND(ucp_cleanup) &&
         EW_FIND(ucp_worker_create) && EW_FIND(ucp_worker_destroy) && EW_FIND(ucp_worker_query) &&
         EW_FIND(ucp_worker_get_address) && EW_FIND(ucp_worker_release_address) && EW_FIND(ucp_worker_progress) &&
         EW_FIND(ucp_worker_get_efd) && EW_FIND(ucp_worker_arm) && EW_FIND(ucp_worker_set_am_recv_handler) &&
         EW_FIND(ucp_ep_create) && EW_FIND(ucp_ep_close_nbx) && EW_FIND(ucp_am_send_nbx) &&
         EW_FIND(ucp_request_check_status) && EW_FIND(ucp_request_free) && EW_FIND(ucs_status_string);
#undef EW_FIND
}

}  // namespace

const Api* load(const char* path) {
  static std::mutex mutex;
  static Api api;
  static bool loaded = false;
  std::lock_guard guard(mutex);
  if (loaded) return &api;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    ew_fail(-ENOENT, "%s", dlerror());
    return nullptr;
  }
  unsigned major = 0, minor = 0, release = 0;
  if (find_all(library, &api)) {
    api.ucp_get_version(&major, &minor, &release);
    if (major == kMajor && minor >= kMinor) {
      loaded = true;  // it stays open: UCX does not like to be unloaded
      return &api;
    }
    ew_fail(-ENOSYS, "%s is UCX %u.%u.%u; 1.%u or a later 1.x is needed", path, major, minor, release, kMinor);
  }
  dlclose(library);
  return nullptr;
}

}  // namespace ucx
