// The part of the UCX API that is used, declared here so that neither headers nor a library of UCX
// are needed to build, and opened at run time (ucx_load.cpp).
//
// UCX adds fields at the end of its structures only, and a mask says which ones a caller has set: what
// is declared here is what UCX 1.11 has, newer ones read no further. tests/ucx/test_abi.py compares
// names, offsets and values with the headers of the libucx wheel.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ucx {

using Status = signed char;  // ucs_status_t: an enum in one byte (packed)
constexpr int kOk = 0, kInProgress = 1, kBusy = -15;

using Context = void*;
using Worker = void*;
using Endpoint = void*;
using Config = void*;
using Request = void*;  // ucs_status_ptr_t: null, an error in the last 100 values, or a request

constexpr uint64_t kFeatureWakeup = 1 << 4, kFeatureAm = 1 << 6;

struct Params {  // ucp_params_t
  uint64_t field_mask, features;
  size_t request_size;
  void* request_init;
  void* request_cleanup;
  uint64_t tag_sender_mask;
  int mt_workers_shared;
  size_t estimated_num_eps, estimated_num_ppn;
  const char* name;
};
constexpr uint64_t kParamFeatures = 1 << 0, kParamNumEps = 1 << 6;

struct WorkerParams {  // ucp_worker_params_t
  uint64_t field_mask;
  int thread_mode;
  unsigned long cpu_mask[1024 / (8 * sizeof(unsigned long))];
  unsigned events;
  void* user_data;
  int event_fd;
  uint64_t flags;
};
constexpr uint64_t kWorkerThreadMode = 1 << 0;
constexpr int kThreadModeSerialized = 1;

struct WorkerAttr {  // ucp_worker_attr_t
  uint64_t field_mask;
  int thread_mode;
  uint32_t address_flags;
  void* address;
  size_t address_length, max_am_header;
};
constexpr uint64_t kAttrMaxAmHeader = 1 << 3;

using ErrorCallback = void (*)(void* arg, Endpoint ep, Status status);
struct EndpointParams {  // ucp_ep_params_t
  uint64_t field_mask;
  const void* address;
  int err_mode;
  struct {
    ErrorCallback cb;
    void* arg;
  } err_handler;
  void* user_data;
  unsigned flags;
};
constexpr uint64_t kEpAddress = 1 << 0, kEpErrMode = 1 << 1, kEpErrHandler = 1 << 2;
constexpr int kErrModePeer = 1;

struct AmRecvParam {  // ucp_am_recv_param_t
  uint64_t recv_attr;
  Endpoint reply_ep;
};
constexpr uint64_t kAmRecvRndv = 1 << 17;
using AmCallback = Status (*)(void* arg, const void* header, size_t header_bytes, void* data, size_t num_bytes,
                              const AmRecvParam* param);
struct AmHandlerParam {  // ucp_am_handler_param_t
  uint64_t field_mask;
  unsigned id;
  uint32_t flags;
  AmCallback cb;
  void* arg;
};
constexpr uint64_t kAmHandlerId = 1 << 0, kAmHandlerFlags = 1 << 1, kAmHandlerCb = 1 << 2, kAmHandlerArg = 1 << 3;
constexpr uint32_t kAmWholeMessage = 1 << 0;

struct Iov {  // ucp_dt_iov_t
  void* buffer;
  size_t length;
};

using SendCallback = void (*)(Request request, Status status, void* user_data);
struct RequestParam {  // ucp_request_param_t
  uint32_t op_attr_mask, flags;
  void* request;
  SendCallback cb;
  uint64_t datatype;
  void* user_data;
  void* reply_buffer;
  int memory_type;
  void* recv_info;
};
constexpr uint32_t kOpCallback = 1 << 1, kOpUserData = 1 << 2, kOpDatatype = 1 << 3, kOpFlags = 1 << 4;
constexpr uint64_t kDatatypeIov = 2;
constexpr uint32_t kAmSendEager = 1 << 1;
constexpr uint32_t kCloseForce = 1 << 0;

// Functions by the name they have in the library.
struct Api {
  void (*ucp_get_version)(unsigned* major, unsigned* minor, unsigned* release);
  Status (*ucp_config_read)(const char* env_prefix, const char* filename, Config* config);
  void (*ucp_config_release)(Config config);
  Status (*ucp_config_modify)(Config config, const char* name, const char* value);
  Status (*ucp_init_version)(unsigned major, unsigned minor, const Params* params, Config config, Context* context);
  void (*ucp_cleanup)(Context context);
  Status (*ucp_worker_create)(Context context, const WorkerParams* params, Worker* worker);
  void (*ucp_worker_destroy)(Worker worker);
  Status (*ucp_worker_query)(Worker worker, WorkerAttr* attr);
  Status (*ucp_worker_get_address)(Worker worker, void** address, size_t* length);
  void (*ucp_worker_release_address)(Worker worker, void* address);
  unsigned (*ucp_worker_progress)(Worker worker);
  Status (*ucp_worker_get_efd)(Worker worker, int* fd);
  Status (*ucp_worker_arm)(Worker worker);
  Status (*ucp_worker_set_am_recv_handler)(Worker worker, const AmHandlerParam* param);
  Status (*ucp_ep_create)(Worker worker, const EndpointParams* params, Endpoint* ep);
  Request (*ucp_ep_close_nbx)(Endpoint ep, const RequestParam* param);
  Request (*ucp_am_send_nbx)(Endpoint ep, unsigned id, const void* header, size_t header_bytes, const void* buffer,
                             size_t count, const RequestParam* param);
  Status (*ucp_request_check_status)(Request request);
  void (*ucp_request_free)(Request request);
  const char* (*ucs_status_string)(Status status);
};

// Opens the library at `path` once per process; later calls return the same. Null, with ew_fail's
// text set, if it is not there or too old.
const Api* load(const char* path);

inline bool is_error(Request request) {
  return reinterpret_cast<uintptr_t>(request) >= static_cast<uintptr_t>(-100);
}
inline Status error_of(Request request) { return static_cast<Status>(reinterpret_cast<intptr_t>(request)); }

}  // namespace ucx
