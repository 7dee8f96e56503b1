// The software HCA: consumes mlx5 work queues as a ConnectX would, and writes straight into the
// peer's registered memory on the same host.
//
//   soft_hca.cpp      contexts, queue pairs, the engine loop: which WQE is next
//   soft_execute.cpp  one WQE: parse, check, move bytes
//   soft_complete.cpp completions and errors
//   soft_memory.cpp   keys, windows (what a peer may touch), mapped peers
//   soft_receive.cpp  receives of writes with immediate
//   soft_wait.cpp     the engine thread, waiting and waking
//   wire*.cpp         peers on other hosts, through UCX
//   soft_fault.cpp    for tests: a path that cuts, delays, reorders, doubles or drops writes
//
// One lock guards a context. Whoever holds it is the engine: its own thread, a thread that waits
// for something and drives the engine meanwhile, or a deterministic scheduler.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
using i32 = int;

#define EW_API extern "C" __attribute__((visibility("default")))

// CQE syndromes, rdma-core mlx5dv.h MLX5_CQE_SYNDROME_*.
enum Syndrome : u32 {
  kSyndromeNone = 0, kLocalLength = 0x01, kLocalQpOperation = 0x02, kLocalProtection = 0x04, kFlushed = 0x05,
  kRemoteInvalidRequest = 0x12, kRemoteAccess = 0x13, kTransportRetryExceeded = 0x15, kRnrRetryExceeded = 0x16,
};

// ibv_access_flags.
enum Access : u32 { kLocalWrite = 1, kRemoteWrite = 2, kRemoteRead = 4, kRemoteAtomic = 8 };

enum QpState : u32 { kReset = 0, kInit = 1, kRtr = 2, kRts = 3, kSqe = 5, kErr = 6 };

constexpr u32 kWindowMagic = 0x4e495745;  // "EWIN"
constexpr u32 kWindowVersion = 1;
constexpr u32 kMaxWindowKeys = 32;
constexpr u32 kRecvEntries = 64;

struct WindowKey {  // what the peer may touch with one rkey, 48 bytes
  u32 key, access, valid, in_use;
  u64 base, length;
  u32 fd_idx, reserved;
  u64 fd_offset;
};

// One shared page per pair, written by its owner (keys) and read by the peer's engine.
struct WindowPage {
  u32 magic, version;
  u32 sleeping;   // owner waits on its eventfd and wants to be woken
  u32 num_keys;
  u32 recv_posted, recv_head;  // receives posted by the owner; completions written by the peer
  u32 reserved[10];
  WindowKey keys[kMaxWindowKeys];
  u8 recv_cqe[kRecvEntries][64];
};

struct ew_hca;
struct ew_peer;
struct Wire;       // wire.hpp: peers on other hosts
struct WireQueue;
struct WireWindow;

struct Mkey {
  u32 pd, access;
  u64 addr, length;
};

struct ew_window {
  ew_hca* hca;
  WindowPage* page;
  int fd;
  u32 recv_posted = 0, recv_tail = 0;   // counted here: the peer can write to the page
  u32 lkeys[kMaxWindowKeys] = {};       // the registration behind each entry
  u64 slots_addr = 0, slot_bytes = 0;   // whose flags the peer's immediates set
  u32 num_slots = 0;                    // 0: none, the caller takes the completions
  WireWindow* wire = nullptr;           // for a peer on another host
};

struct Mapping {
  u8* addr;
  u64 num_bytes;
};

struct ew_peer {
  ew_hca* hca;
  WindowPage* page;
  std::vector<Mapping> regions;  // by fd index
  int wake_fd;
  bool lost;
  bool touched;  // a word (a flag, a counter) of the peer changed: it may want to be woken
  u32 num_qps;
  // On another host; page is null then, and there are no regions:
  void* endpoint = nullptr;    // UCX's
  bool endpoint_closed = false;
  u64 wire_id = 0;             // of its window
  u64 secret[2] = {};          // that its window asks for
  ew_window* pair = nullptr;   // what it sends to
};

struct ew_qp_info {
  u32 qpn, num_wqe;
  u64 sq_addr, dbrec_addr, uar_addr, cq_addr, cq_dbrec_addr, proxy_addr;
  u32 num_cqe, cq_flags;
};
enum CqFlags : u32 { kCqCollapsed = 1, kCqOverrunIgnore = 2 };

struct ew_qp_memory {  // memory that the caller provides, all zero: the HCA allocates
  u64 sq_addr, dbrec_addr, uar_addr, cq_addr, cq_dbrec_addr, proxy_addr;
};

struct Segment {  // one source or sink of a WQE
  u8* addr;
  u64 num_bytes;
};

// How the path to the peers misbehaves, hca/fault.py. All zero: it does not.
struct ew_fault_plan {
  u64 seed;
  u32 mtu;                               // writes are cut into pieces of this size, 0: not cut
  u32 reorder;                           // pieces land in any order, but before a later atomic, read or immediate
  u32 max_delay;                         // a piece waits for up to so many turns of its queue
  u32 duplicate_one_in, drop_one_in;     // of the pieces, 0: none
};

struct Piece {  // of a write that was executed but has not landed yet
  u32 rkey;
  u64 addr, due_turn;
  std::vector<u8> bytes;
};

struct ew_qp {
  ew_hca* hca;
  ew_qp_info info;
  ew_peer* peer;
  u32 remote_qpn, pd, state;
  u64 pi, ci;             // producer and consumer index, 64-bit
  u32 last_record;        // what each doorbell source said last: only a change is news
  u64 last_register[2], last_proxy;
  u64 num_cqe_written;
  u64 progress;           // bytes of WQE ci that are moved already
  u64 rnr_since_ns;
  u64 trace_begin_ns;     // when WQE ci was taken up, 0: not traced
  bool cq_error;
  u32 first_syndrome;
  u64 first_error_idx;
  std::vector<Piece> pieces;
  u64 num_turns;
  void* owned;            // memory to free, if we allocated it
  u64 owned_bytes;
  WireQueue* wire = nullptr;  // its peer is on another host
};

struct ew_hca_stats {
  u64 num_wqe[64];
  u64 bytes, num_cqe, num_error_cqe, num_doorbells, num_wakes;
};

// Called for every WQE before it is executed; a non-zero return is a syndrome to fail it with,
// kHookStall to leave it for later. For fault injection and tracing.
constexpr u32 kHookStall = 0xffffffff;
typedef u32 (*ew_hca_hook)(void* context, u32 qpn, u64 wqe_idx, const void* wqe, u32 num_bytes);

// The lock of a context. An engine with work takes it again and again, and a plain mutex would let it
// win every time; here a call that waits has its turn before the engine has its next one.
class EngineLock {
 public:
  void lock() {  // control calls
    waiting_.fetch_add(1, std::memory_order_seq_cst);
    mutex_.lock();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
    engine_was_last_.store(false, std::memory_order_relaxed);
  }
  bool try_lock() {  // the engine: refused while somebody waits, but not twice in a row
    if (contended() && engine_was_last_.load(std::memory_order_relaxed)) return false;
    if (!mutex_.try_lock()) return false;
    engine_was_last_.store(true, std::memory_order_relaxed);
    return true;
  }
  void unlock() { mutex_.unlock(); }
  bool contended() const { return waiting_.load(std::memory_order_relaxed) != 0; }

 private:
  std::mutex mutex_;
  std::atomic<u32> waiting_{0};
  std::atomic<bool> engine_was_last_{false};
};

struct ew_hca {
  EngineLock lock;
  std::unordered_map<u32, Mkey> mkeys;
  std::vector<ew_qp*> qps;
  std::vector<ew_window*> windows;
  size_t next_qp = 0;
  u32 num_peers = 0;
  u32 num_watched = 0;           // windows whose immediates become flags
  u32 next_pd = 1, next_qpn;
  int wake_fd = -1;   // a byte sent here, by us or a peer, ends the wait
  int woken_fd = -1;  // the other end, never given away
  std::atomic<u32> interrupted{0};
  std::atomic<u32> sleeping{0};  // a thread of ours waits on wake_fd, perhaps for a completion
  bool completed = false;        // CQEs were written since the last look
  std::atomic<u64> num_failed{0};  // queues that had an error: each ends the wait, as an interrupt does
  ew_hca_stats stats = {};
  std::atomic<u64> num_wakes{0};  // of stats, but counted without the lock
  ew_hca_hook hook = nullptr;
  void* hook_context = nullptr;
  bool faulty = false;
  ew_fault_plan faults = {};
  u64 fault_state = 0;  // of the random numbers
  Wire* wire = nullptr;
  bool spin_paid = true;  // of a wire: the last wait was shorter than the spinning before a sleep

  std::thread thread;
  std::atomic<u32> stop{0};
  std::atomic<u32> kicks{0};      // futex word of the engine thread
  std::atomic<u32> asleep{0};
  std::atomic<bool> held_up{false};  // the last look met an entry that has to be tried again
  bool never_sleeps = false;  // doorbells come from a GPU, which cannot kick
  std::atomic<bool> polled{false};  // what is waited for is written by an adapter, which wakes nobody
};

constexpr u64 kPieceBytes = 256 << 10;  // bytes one queue may move before the others get a turn

// soft_execute.cpp: result of looking at WQE ci of a queue.
enum class Step { kNothing, kProgress, kStalled };
Step execute_next(ew_qp* qp, u64 max_bytes, u64* moved);

// soft_complete.cpp
void write_cqe(ew_qp* qp, u64 wqe_idx, u32 send_opcode, u32 num_bytes);
void fail_qp(ew_qp* qp, u64 wqe_idx, u32 send_opcode, u32 syndrome);
void flush_posted(ew_qp* qp);

// soft_memory.cpp
bool find_local(ew_hca* hca, u32 pd, u32 lkey, u64 addr, u64 num_bytes, u32 access, u8** out);
// Pins the region (in_use) until release_remote; null if the peer does not allow the access.
WindowKey* find_remote(ew_peer* peer, u32 rkey, u64 addr, u64 num_bytes, u32 access, u8** out);
void release_remote(WindowKey* key);
// The same for memory of our own that a window's peer names.
u8* find_own(ew_window* window, u32 rkey, u64 addr, u64 num_bytes, u32 access);
void revoke_entry(WindowKey* key);
bool wait_unused(const WindowKey* key, u64 deadline_ns);

// soft_receive.cpp
u32 take_immediates(ew_hca* hca);

// soft_fault.cpp
void send_in_pieces(ew_qp* qp, const Segment* list, u32 count, u32 rkey, u64 addr);
u32 land_some(ew_qp* qp);  // returns how many landed, at least 1 while some are under way
void land_all(ew_qp* qp);

// wire*.cpp; all but the first need a context with a wire
void wire_connect(ew_qp* qp);
void wire_disconnect(ew_qp* qp);
void wire_reset(ew_qp* qp);
Step wire_step(ew_qp* qp, u64 max_bytes, u64* moved);
void wire_flushed(ew_qp* qp);
u32 wire_progress(ew_hca* hca);
void wire_idle(ew_hca* hca);                       // nothing to do: what is due after a while
bool wire_reads(ew_hca* hca, u64 addr, u64 num_bytes);  // whether a frame under way reads from there
bool wire_arm(ew_hca* hca);                        // true: event_fd will tell of the next event
void wire_close_window(ew_window* window);
void wire_close_peer(ew_peer* peer);
int wire_event_fd(const ew_hca* hca);
void wire_sleep(ew_hca* hca, u32 kicks);
void wire_kick(ew_hca* hca);
void wire_add_waiter(ew_hca* hca, int change);
void wire_close(ew_hca* hca);

// soft_wait.cpp
void start_thread(ew_hca* hca);
void stop_thread(ew_hca* hca);
void wake_peer(ew_peer* peer);
void wake_self(ew_hca* hca);
u64 monotonic_ns();

inline u32 load_be32(const u8* p) {
  u32 v;
  __builtin_memcpy(&v, p, 4);
  return __builtin_bswap32(v);
}
inline u64 load_be64(const u8* p) {
  u64 v;
  __builtin_memcpy(&v, p, 8);
  return __builtin_bswap64(v);
}
inline void store_be32(u8* p, u32 v) {
  v = __builtin_bswap32(v);
  __builtin_memcpy(p, &v, 4);
}
