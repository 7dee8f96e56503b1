// A time stamp between kernels of a stream, for traces: launched only where a trace is active. The
// place comes from a counter on the device, so a replayed graph writes new ones.
#pragma once

#include "client_state.cuh"

struct ClockStamp {
  u64 time_ns;  // of the device's timer (globaltimer on a GPU)
  u32 mark, number;  // number: 1 + its place in the order, low bits; written last
};

struct ClockStampArgs {
  u64 stamps;  // ClockStamp [capacity]
  u64 count;   // u64*, how many there ever were
  u32 capacity, mark;
};

EW_KERNEL(clock_stamp, ClockStampArgs) {
  if (thread_idx() != 0 || block_idx() != 0) return;
  const u64 number = atomic_add(at<u64>(args.count), u64{1});
  ClockStamp* stamp = at<ClockStamp>(args.stamps) + number % args.capacity;
  stamp->time_ns = clock_ns(), stamp->mark = args.mark;
  stamp->number = static_cast<u32>(number + 1);
}
