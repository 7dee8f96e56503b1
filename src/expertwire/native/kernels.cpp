// The device code compiled for the CPU target, and the table that finds a kernel by name.
#include <cstring>

#include "client_combine.cuh"
#include "client_failover.cuh"
#include "client_pack.cuh"
#include "client_put.cuh"
#include "client_quantise.cuh"
#include "client_route.cuh"
#include "client_send.cuh"
#include "clock_stamp.cuh"
#include "device_checks.cuh"
#include "gpu_hca.cuh"
#include "trace.hpp"
#include "trip.hpp"
#include "server_echo.cuh"
#include "server_gather.cuh"
#include "server_poll.cuh"
#include "server_reply.cuh"
#include "round_checks.hpp"

namespace ew {
namespace {

template <auto kKernel, typename Args>
void enter(const void* args) {
  kKernel(*static_cast<const Args*>(args));
}

#define EW_ENTRY(name, Args) {#name, &enter<name, Args>, sizeof(Args)}
const Kernel kKernels[] = {
    EW_ENTRY(client_route, ClientRouteArgs),
    EW_ENTRY(client_pack, ClientPackArgs),
    EW_ENTRY(client_put_ibgda, ClientPutArgs),
    EW_ENTRY(client_put_direct, ClientPutArgs),
    EW_ENTRY(client_put_sequential, ClientPutArgs),
    EW_ENTRY(client_quantise, ClientQuantiseArgs),
    EW_ENTRY(client_send_direct, ClientSendArgs),
    EW_ENTRY(client_wait, ClientCombineArgs),
    EW_ENTRY(client_combine, ClientCombineArgs),
    EW_ENTRY(client_failover, ClientFailoverArgs),
    EW_ENTRY(server_poll, ServerPollArgs),
    EW_ENTRY(server_gather, ServerGatherArgs),
    EW_ENTRY(server_group, ServerGatherArgs),
    EW_ENTRY(server_gather_rows, ServerGatherArgs),
    EW_ENTRY(server_take, ServerTakeArgs),
    EW_ENTRY(server_reply_ibgda, ServerReplyArgs),
    EW_ENTRY(server_reply_direct, ServerReplyArgs),
    EW_ENTRY(server_reply_in_place, ServerReplyArgs),
    EW_ENTRY(server_echo_in_place, ServerEchoArgs),
    EW_ENTRY(clock_stamp, ClockStampArgs),
    EW_ENTRY(ibgda_run, IbgdaRunArgs),
    EW_ENTRY(gpu_hca, GpuHcaArgs),
    EW_ENTRY(check_client_rounds, ClientRoundsArgs),
    EW_ENTRY(check_server_rounds, ServerRoundsArgs),
};

}  // namespace

const Kernel* find_kernel(const char* name) {
  for (const Kernel& kernel : kKernels)
    if (strcmp(kernel.name, name) == 0) return &kernel;
  return nullptr;
}

}  // namespace ew

// Sizes of the structures that Python spells too; tests compare them.
extern "C" __attribute__((visibility("default"))) unsigned ew_struct_bytes(const char* name) {
#define EW_SIZE(Type) \
  if (strcmp(name, #Type) == 0) return sizeof(Type);
  EW_SIZE(KernelStatus)
  EW_SIZE(IbgdaKey)
  EW_SIZE(IbgdaQp)
  EW_SIZE(IbgdaPeer)
  EW_SIZE(BufferHead)
  EW_SIZE(ReplyHead)
  EW_SIZE(ClientServer)
  EW_SIZE(RouteTables)
  EW_SIZE(MessageShape)
  EW_SIZE(ServerSlot)
  EW_SIZE(ServerMessage)
  EW_SIZE(ServerModel)
  EW_SIZE(ServerTakeArgs)
  EW_SIZE(ew_step)
  EW_SIZE(ew_flight)
  EW_SIZE(ew_batch)
  EW_SIZE(ew_server)
  EW_SIZE(HcaKey)
  EW_SIZE(HcaQueue)
  EW_SIZE(ClockStamp)
  EW_SIZE(ClientQuantiseArgs)
  if (strcmp(name, "TraceRecord") == 0) return sizeof(ew::TraceRecord);
  return 0;
}

extern "C" __attribute__((visibility("default"))) unsigned long long ew_head_checksum(const void* head,
                                                                                     unsigned num_bytes) {
  return head_checksum(head, num_bytes);
}
