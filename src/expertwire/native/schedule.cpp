// The seeded scheduler: a seed picks which lane runs at every shared store, spin and collective,
// when the HCA takes a step, in which order relaxed stores become visible, and which earlier value a
// load that is no acquire sees. A missing fence, a flag written before its payload or a flag that is
// looked at without acquire then fails on x86 too.
#include "schedule.hpp"

#include <cstring>

namespace ew {

u64 Schedule::random() {
  u64 z = (random_state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

void Schedule::release(size_t idx) {
  history.note(nullptr);
  memcpy(held[idx].dst, held[idx].bytes.data(), held[idx].bytes.size());
  history.note(held[idx].block);
  held.erase(held.begin() + static_cast<long>(idx));
}

void Schedule::release_visible(const void* p, size_t num_bytes) {
  for (size_t i = 0; i < held.size();)
    if (visible(held[i]) && overlaps(held[i].dst, held[i].bytes.size(), static_cast<const u8*>(p), num_bytes))
      release(i);
    else
      ++i;
}

void Schedule::release_block(BlockState* block) {
  for (size_t i = 0; i < held.size();)
    if (held[i].on_gpu || held[i].block == block)
      release(i);
    else
      ++i;
}

// One held store, any, unless an earlier one to the same bytes must come first.
static void release_one(Schedule* s) {
  if (s->held.empty()) return;
  const size_t idx = s->random() % s->held.size();
  for (size_t i = 0; i < idx; ++i)
    if (overlaps(s->held[i].dst, s->held[i].bytes.size(), s->held[idx].dst, s->held[idx].bytes.size()))
      return;
  s->release(idx);
}

Lane* seeded_pick(Schedule* s) {
  s->virtual_ns += 100;
  if (s->one_in(4)) release_one(s);
  if (s->idle && s->one_in(8)) {
    s->history.note(nullptr);
    s->idle(s->idle_context);
    s->history.note(nullptr);
  }
  u64 skip = s->random() % s->alive;
  Lane* pick = lane->next;
  while (skip--) pick = pick->next;
  return pick;
}

void seeded_point() {
  if (lane->schedule->one_in(4)) lane_yield();
}

static void publish(bool system) {
  Schedule* s = lane->schedule;
  if (system) return s->release_block(lane->block);
  for (HeldStore& store : s->held) store.on_gpu |= store.block == lane->block;
}

void seeded_acquire() { lane->schedule->history.acquire(lane->block); }

void seeded_fence(bool system) {
  publish(system);
  seeded_acquire();
}

static void hold(void* dst, const void* value, size_t num_bytes, bool on_gpu) {
  const auto* bytes = static_cast<const u8*>(value);
  lane->schedule->held.push_back(
      {lane->block, on_gpu, static_cast<u8*>(dst), std::vector<u8>(bytes, bytes + num_bytes)});
}

void seeded_store(void* dst, const void* value, size_t num_bytes) {
  hold(dst, value, num_bytes, false);
  seeded_point();
}

bool seeded_release(void* dst, const void* value, size_t num_bytes, bool system) {
  seeded_point();
  publish(system);
  lane->schedule->history.written(lane->block, dst, num_bytes);
  if (!system) hold(dst, value, num_bytes, true);
  return system;
}

void seeded_engine_store(void* dst, u32 word, bool release) {
  Schedule* s = lane->schedule;
  const auto* bytes = reinterpret_cast<const u8*>(&word);
  if (release) s->release_block(nullptr);
  s->held.push_back({nullptr, false, static_cast<u8*>(dst), std::vector<u8>(bytes, bytes + sizeof(word))});
  if (release) s->release(s->held.size() - 1);
}

// An atomic acts on memory; what this lane sees of its word must be there first.
void seeded_atomic(const void* p, size_t num_bytes) {
  seeded_point();
  lane->schedule->release_visible(p, num_bytes);
  lane->schedule->history.written(lane->block, p, num_bytes);
}

void seeded_copy(void* dst, const void* src, u64 num_bytes) {
  // Up to four pieces, so that half a payload can be visible.
  const u64 piece = num_bytes / 4 + 1;
  for (u64 begin = 0; begin < num_bytes; begin += piece) {
    const u64 count = begin + piece < num_bytes ? piece : num_bytes - begin;
    std::vector<u8> value(count);
    seeded_read(static_cast<const u8*>(src) + begin, value.data(), count);
    seeded_store(static_cast<u8*>(dst) + begin, value.data(), count);
  }
}

void seeded_zero(void* dst, u64 num_bytes) {
  const std::vector<u8> zeros(num_bytes);
  seeded_store(dst, zeros.data(), num_bytes);
}

void seeded_read(const void* src, void* value, size_t num_bytes) {
  Schedule* s = lane->schedule;
  const auto* from = static_cast<const u8*>(src);
  s->history.read(lane->block, src, value, num_bytes, s->random());
  for (const HeldStore& store : s->held) {
    if (!s->visible(store) || !overlaps(store.dst, store.bytes.size(), from, num_bytes)) continue;
    for (size_t i = 0; i < store.bytes.size(); ++i) {
      const u8* at = store.dst + i;
      if (at >= from && at < from + num_bytes) static_cast<u8*>(value)[at - from] = store.bytes[i];
    }
  }
}

}  // namespace ew
