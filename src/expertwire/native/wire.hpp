// Queue pairs to peers on other hosts: what the engine does instead of storing into mapped memory.
//
//   wire.cpp          frames out and in, the engine's turn, sleeping
//   wire_open.cpp     the UCX worker, windows, peers
//   wire_request.cpp  the requester: entries -> frames, acknowledgements -> completions
//   wire_respond.cpp  the responder: frames -> memory, in order; acknowledgements
//   wire_limit.cpp    how much a peer can make this side hold
//   wire_device.cpp   which network device has an address
//
// A frame is one UCX active message. Its header: FrameHead, num_acks x Ack, num_ops x Op. Its data:
// the bytes of the ops, one after the other. Numbers are little-endian. docs/ucx.md says why it is so.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "soft_wqe.hpp"
#include "ucx_api.hpp"

constexpr unsigned kAmId = 0;
constexpr u32 kFrameMagic = 0x46575745;  // "EWWF"
constexpr u32 kFrameVersion = 2;
constexpr u32 kMaxOps = 16, kMaxAcks = 8;
constexpr u64 kFrameBytes = 256 << 10;  // of data; longer writes go in pieces

enum FrameKind : u8 { kRequestFrame = 1, kResponseFrame = 2 };

struct Secret {  // random, of one connection: told in the handshake, and in every frame
  u64 words[2];
};
// Takes the same time whatever differs.
inline bool same(const Secret& a, const Secret& b) {
  return ((a.words[0] ^ b.words[0]) | (a.words[1] ^ b.words[1])) == 0;
}

struct FrameHead {  // 80 bytes
  u32 magic;
  u8 version, kind, num_ops, num_acks;
  u64 window;       // the receiver's window
  Secret secret;    // the window's: who does not know it is not heard
  u32 qpn;          // the receiver's queue pair
  u32 sender_qpn;
  u32 incarnation;  // of the requester's queue pair: counts its resets
  u32 lead;         // bytes before the data that mean nothing
  u64 seq;          // of a request among those of the queue pair; of a response: the entry it answers
  u64 offset, total;  // of a response: which bytes these are
  u64 first_idx;    // of a request: block index of the first op
};
static_assert(sizeof(FrameHead) == 80);

struct Ack {  // 24 bytes: every entry of the queue pair before next_idx is executed
  u32 qpn, incarnation;
  u64 next_idx;
  u32 syndrome, reserved;  // not 0: the entry at next_idx failed, nothing after it is executed
};
static_assert(sizeof(Ack) == 24);

struct Op {  // 40 bytes: an entry, or a piece of a long write
  u8 opcode, opmod, num_blocks, last;  // last piece
  u8 immediate[4];                     // as in the entry
  u32 rkey, num_bytes;                 // data bytes that this op has in the frame
  u64 addr, total, offset;             // of the entry; of this piece in it
};
static_assert(sizeof(Op) == 40);

constexpr u32 kMaxHeader = sizeof(FrameHead) + kMaxAcks * sizeof(Ack) + kMaxOps * sizeof(Op);
constexpr u32 kMaxIov = 128, kScratchBytes = 4096;

struct Account {  // what one peer makes this side hold
  u64 bytes = 0;            // its frames that wait, and answers that it has not taken
  u32 acks_under_way = 0;   // frames with acknowledgements and nothing else
  bool closed = false;      // it went beyond the limits: nothing of it is taken any more
};

struct Send {  // a frame under way, reused
  Wire* wire;
  size_t idx;        // in Wire::under_way
  std::shared_ptr<Account> account;  // which it counts on; outlives window and peer
  u64 charged = 0;
  bool is_ack = false;
  u32 num_iov;
  u32 scratch_used;
  ucx::Iov iov[kMaxIov + 1];  // and a lead
  u8 header[kMaxHeader];
  u8 scratch[kScratchBytes];  // inline data and operands
  std::vector<u8> bytes;      // of a response
};

struct Sent {  // an entry that is not acknowledged yet
  u64 idx, num_bytes, received;
  u32 num_blocks;
  u8 opcode;
  bool signalled, wants_data;
};

struct WireQueue {  // the requester's side of a queue pair
  u64 sent;         // the next block to send; ci is the oldest one not acknowledged
  u64 sent_bytes;   // of the entry at `sent`
  u64 seq, acked;
  u32 incarnation;
  u32 nak;          // syndrome that the responder gave for entry `acked`
  u32 blocked;      // syndrome of entry `sent`, found here; told when its turn comes
  u64 silent_ns;    // since the last acknowledgement, with something under way
  std::vector<Sent> ring;  // by count, of num_wqe
  u64 first, count;
  Sent& front() { return ring[first % ring.size()]; }
};

struct Held {  // a request that waits: for one before it, or for a receive
  FrameHead head;
  std::vector<Op> ops;
  std::vector<u8> data;
  u32 next_op;
  u64 next_byte;
  u64 charged;
};

struct Stream {  // the responder's side of a queue pair
  u32 qpn = 0, incarnation = 0;
  u64 next_seq = 0, executed = 0;
  u32 syndrome = 0;
  bool ack_due = false;
  bool waits = false;    // the next frame is there: for a receive, or for room for its answer
  u64 rnr_since_ns = 0;
  std::map<u64, Held> held;
};

struct WireWindow {  // of a window whose peer is on another host
  u64 id;
  Secret secret;
  ew_peer* pair = nullptr;   // whom acknowledgements go to
  std::unordered_map<u32, Stream> streams;  // by the peer's queue pair
  std::shared_ptr<Account> account = std::make_shared<Account>();
};

struct Wire {
  ew_hca* hca;
  const ucx::Api* api;
  ucx::Context context;
  ucx::Worker worker;
  int event_fd, kick_fd;
  u64 ack_timeout_ns;
  std::vector<u8> address;
  std::unordered_map<u64, ew_window*> windows;
  std::vector<ew_peer*> peers;
  std::unordered_map<u32, ew_qp*> qps;
  std::vector<Send*> free, under_way;
  u32 num_due = 0, num_waiting = 0;  // streams with an acknowledgement due; that wait
  u64 due_since_ns = 0, looked_ns = 0;
  std::atomic<u32> waiters{0};       // threads in ew_hca_wait: they progress, the engine thread need not
  u64 max_peer_bytes, max_held_bytes;  // what one peer, and all of them, can make this side hold
  u64 held_bytes = 0, most_held_bytes = 0;
  u64 num_refused = 0, num_cut = 0;  // frames that nobody here wants; peers that went beyond the limits
  std::vector<ew_peer*> to_close;    // their endpoints, once UCX is not in the middle of something
};

// wire.cpp
ucx::Status on_frame(void* arg, const void* header, size_t header_bytes, void* data, size_t num_bytes,
                     const ucx::AmRecvParam* param);
Send* new_send(Wire* wire);
void free_send(Send* send);
// Acknowledgements for the peer are added. The head's num_ops and the ops are the caller's.
void send_frame(ew_peer* peer, Send* send, FrameHead head, const Op* ops);
void lose_peer(ew_peer* peer);

// wire_open.cpp
void close_endpoint(ew_peer* peer, u64 wait_ns);

// wire_request.cpp
void take_ack(Wire* wire, ew_window* window, const Ack& ack);
void take_response(Wire* wire, ew_window* window, const FrameHead& head, const u8* data, u64 num_bytes);

// wire_respond.cpp
void take_request(Wire* wire, ew_window* window, const FrameHead& head, const Op* ops, const u8* data, u64 num_bytes);
u32 retry_waiting(Wire* wire);
u32 take_due_acks(Wire* wire, ew_window* window, Ack* out);
void forget_streams(Wire* wire, ew_window* window);

// wire_limit.cpp
// Room on the peer's account. Where that of all peers is used up, the one that holds most is cut off.
bool charge(Wire* wire, ew_window* window, u64 num_bytes);
void give_back(Wire* wire, Account* account, u64 num_bytes);
void cut_off(Wire* wire, ew_window* window);

// wire_device.cpp: the value of UCX_NET_DEVICES for the device with that address; empty if there is none.
std::string net_devices(const char* address);
