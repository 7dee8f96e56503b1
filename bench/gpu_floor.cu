// The bare floor of a trip: copy, flag, wait, copy, with no routing, head, check or sum. One launch
// a side and trip; every wait ends at a deadline.
typedef unsigned long long u64;
typedef unsigned int u32;

__device__ u64 now_ns() {
  u64 ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}
__device__ void copy(uint4* dst, const uint4* src, u64 count) {
  const u64 step = static_cast<u64>(gridDim.x) * blockDim.x;
  u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    const uint4 a = src[i], b = src[i + step], c = src[i + 2 * step], d = src[i + 3 * step];
    dst[i] = a, dst[i + step] = b, dst[i + 2 * step] = c, dst[i + 3 * step] = d;
  }
  for (; i < count; i += step) dst[i] = src[i];
}
// trips: counts what was released, if given.
__device__ void release(u64* flag, u64 seq, u32* arrived, u32* trips = nullptr) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  if (gridDim.x > 1 && atomicAdd(arrived, 1u) != gridDim.x - 1) return;
  *reinterpret_cast<volatile u32*>(arrived) = 0;
  if (trips) *reinterpret_cast<volatile u32*>(trips) = static_cast<u32>(seq);
  __threadfence_system();
  asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(flag), "l"(seq) : "memory");
}
__device__ bool acquire(const u64* flag, u64 seq, u64 timeout_ns) {
  __shared__ u32 ok;
  if (threadIdx.x == 0) {
    const u64 deadline = now_ns() + timeout_ns;
    u64 seen;
    do asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
    while (seen != seq && now_ns() < deadline);
    ok = seen == seq;
  }
  __syncthreads();
  return ok;
}

// Each side knows the next number from what lies at home: the client from the reply's flag, the
// server from its count of trips; both move only after all blocks of the trip before have arrived.
struct FloorArgs {
  uint4 *source, *slot, *reply, *output;
  u64 *slot_flag, *reply_flag;
  u32* arrived;  // [2]: blocks; trips answered so far, at the server
  u64 count, timeout_ns;
};

extern "C" __global__ void floor_client(const __grid_constant__ FloorArgs args) {
  const u64 seq = *reinterpret_cast<volatile u64*>(args.reply_flag) + 1;
  copy(args.slot, args.source, args.count);
  release(args.slot_flag, seq, args.arrived);
  if (acquire(args.reply_flag, seq, args.timeout_ns)) copy(args.output, args.reply, args.count);
}
extern "C" __global__ void floor_server(const __grid_constant__ FloorArgs args) {
  volatile u32* trips = args.arrived + 1;
  const u64 seq = *trips + 1ull;
  if (acquire(args.slot_flag, seq, args.timeout_ns)) copy(args.reply, args.slot, args.count);
  release(args.reply_flag, seq, args.arrived, args.arrived + 1);
}
