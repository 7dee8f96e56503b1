// What happened when, as records in a file that is mapped: what was written before a kill -9 stays.
// trace/recorder.py opens it, trace/file.py reads it (and spells the layout once more; a test compares sizes).
//
// Off, a traced place costs one load and a branch; on, a record is 160 bytes stored and one or two
// clock readings.
#pragma once

#include <atomic>

#include "launch.hpp"

namespace ew {

constexpr unsigned long long kTraceMagic = 0x3145434152545745;  // "EWTRACE1"
constexpr unsigned kTraceHeaderBytes = 4096, kTraceWqeBytes = 64;
constexpr unsigned long long kPopulateBytes = 4 << 20;

struct TraceHeader {
  unsigned long long magic, num_records;  // ever taken: the file keeps the last `capacity` of them
  unsigned long long capacity, pid;
};

enum TraceKind : unsigned {
  kTraceStage = 1,     // a stage of this thread: stage says which
  kTraceMessage = 2,   // a request that a put sent
  kTracePosted = 3,    // a work-queue entry that a put or reply wrote
  kTraceExecuted = 4,  // the HCA took it up, and was done with it (hca="ucx": handed it to the network)
  kTraceArrived = 5,   // a reply's flag was seen by the client
  kTraceTaken = 6,     // a request was taken into a server's batch
  kTraceReplied = 7,   // a reply that a server sent
  kTraceSpan = 8,      // a span with a name of the caller's, in `wqe`
  kTraceDevice = 9,    // a stage of a device's stream, by its own stamps (trace/device.py)
  kTraceAcknowledged = 10,  // the peer's host says that it has executed an entry (hca="ucx")
};
enum TraceStage : unsigned {
  kTraceOther = 0, kTraceRoute = 1, kTracePack = 2, kTracePut = 3, kTraceWait = 4, kTraceCombine = 5, kTracePoll = 6,
  kTraceGather = 7, kTraceExperts = 8, kTraceReply = 9, kTraceMoe = 10,
  kTraceSend = 11,  // around route, pack and put: arguments, the HCA's turn, waking peers
};

struct TraceRecord {
  unsigned long long number;  // 1 + its place in the order of taking; written last
  unsigned long long begin_ns, end_ns;  // CLOCK_MONOTONIC
  unsigned kind, thread;      // thread: as gettid says
  unsigned stage, layer;
  unsigned client, server;    // client_id, seat
  unsigned long long seq;
  unsigned long long hca;     // tells HCAs of a process apart
  unsigned qpn, rows;
  unsigned long long idx;     // of the work-queue entry, in blocks
  unsigned long long num_bytes;
  unsigned syndrome, reason;
  unsigned char wqe[kTraceWqeBytes];
};

struct TraceFile {
  TraceHeader* header;
  TraceRecord* records;
};
extern std::atomic<TraceFile*> trace_file;

#ifdef EW_NO_TRACE  // for bench/trace_cost.py: what the looks below cost
constexpr bool tracing() { return false; }
#else
inline bool tracing() { return __builtin_expect(trace_file.load(std::memory_order_relaxed) != nullptr, 0); }
#endif
void trace(TraceRecord record);  // fills in number and thread
void trace_seat(unsigned seat);  // the server whose batches this thread takes from now on

// The queues that a put or reply of this step may post to, looked at before it runs.
void trace_before(const ew_step& step);
void trace_after(const ew_step& step, ew_hca* hca, unsigned long long begin_ns, unsigned long long end_ns);

}  // namespace ew
